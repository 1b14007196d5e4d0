"""Benchmark of decoding on this machine: every way to draft, other libraries, and single steps.

Begin with ``sections``, each of which measures one table. ``ways`` write the texts, ``timing`` has
the clock, ``steps`` the costs of steps, ``shapes`` those of random weights, ``rounds`` the speed of
their rounds, and ``picture`` draws the results.
"""
