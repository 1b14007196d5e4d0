"""Benchmark of decoding on this machine: every way to draft, other libraries, and single steps.

Begin with ``sections``, each of which measures one table. ``ways`` write the texts, ``timing`` is
the only clock, ``shapes`` has the costs of steps, and ``picture`` draws the results.
"""
