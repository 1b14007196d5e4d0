"""Benchmark of this machine: every way to draft, other libraries, and the single steps they are made of.

Begin with ``__main__``, whose ``SECTIONS`` name the measurements: of whole texts (``texts``), written by our loop
(``contenders``) and by other libraries (``libraries``), and of single steps (``steps``). ``report`` shows them.
"""

from typing import Any

Row = dict[str, Any]  # one line of a table by column names; --json writes the same
