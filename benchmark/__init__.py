"""Benchmark of decoding on this machine: every way to draft, other libraries, and single steps.

Begin with ``sections``, each of which measures one table. ``ways`` write the texts, ``timing`` has
the clock, ``shapes`` the costs of steps and of whole rounds, and ``picture`` draws the results.
"""
