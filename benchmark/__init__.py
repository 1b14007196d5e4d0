"""Benchmark of decoding on this machine: every way to draft, other libraries, and single steps.

Begin with ``sections``, each of which measures one table of ``contenders``. ``picture`` draws the
results.
"""
