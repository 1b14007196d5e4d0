"""A decoder's short step on a CPU as one compiled function.

Begin with ``step``, which reads like the readable blocks; ``dot`` has its dot products, ``decoder`` calls it.
"""
