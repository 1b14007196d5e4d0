"""Views of a text: streamed, coloured trace, page of the rounds, moving picture, conversation.

Each reads the loop's ``Round`` records; ``output`` directs them. Begin with ``output``,
``trace`` and ``page``.
"""
