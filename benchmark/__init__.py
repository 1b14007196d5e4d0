"""Benchmark of decoding on this machine: every way to draft, other libraries, and single steps.

Begin with ``sections``, each of which measures one table. ``timing`` is its only clock, and ``ways``
writes the texts. ``costs`` times single steps, ``shapes`` those of models that are not there, and
``picture`` draws the results.
"""
