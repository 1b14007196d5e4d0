"""Views of a text that is being written: streamed text, coloured trace, page of the rounds, statistics.

Each reads the loop's ``Round`` records. Begin with ``streaming``, then ``trace`` and ``page``.
"""
