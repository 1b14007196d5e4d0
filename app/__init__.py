"""All around the algorithm: sessions, options, drafts by name, chats, output, and the server.

Begin with ``session``, then ``sample``, ``drafts`` and ``options``. All folders may use ``common``.
"""

import os

# Number of times that an idle OpenMP thread of torch looks for work before it sleeps. While it
# looks, it keeps a core from other programs and from the threads of a compiled step. It is set
# here, for commands and Python programs alike, since torch reads it when it is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
