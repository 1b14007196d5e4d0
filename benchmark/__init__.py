"""Benchmark of decoding on this machine: every way to draft, other libraries, and single steps.

Begin with ``sections``, each of which measures one table. ``contenders`` write texts with this project's loop,
``libraries`` with other libraries. ``picture`` draws the results.
"""
