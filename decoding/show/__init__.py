"""Views of a text while it is written: streamed text, coloured trace, page of the rounds,
statistics.

Each reads the loop's ``Round`` records; ``output`` directs them. Begin with ``output``,
``trace`` and ``page``.
"""
