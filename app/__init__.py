"""All around the algorithm: sessions, options, drafts by name, chats, output, and the server.

Begin with ``session``, then ``sample``, ``drafts`` and ``options``. All folders may use ``common``.
"""
