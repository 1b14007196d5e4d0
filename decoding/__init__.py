"""Speculative decoding: the loop, its drafters, rules of verification, randomness and policies.

Begin with ``speculate.py``, then ``verify.py``. ``proof`` computes that the loop is lossless.
"""
