"""Benchmark of decoding on this machine: every way to draft, other libraries, and single steps.

Begin with ``sections``, each of which measures one table. ``ways`` write the texts, ``timing`` has
the clock, ``shapes`` the costs of steps, ``rounds`` those of whole rounds, ``adaptive`` simulates
draft lengths without a clock, and ``picture`` draws the results.
"""
