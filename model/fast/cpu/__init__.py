"""Short step of a decoder on a CPU, as one compiled function.

Begin with ``step``, which reads like the readable blocks. ``dot`` has its dot products, and ``decoder`` calls it.
"""
