"""Speculative decoding: the loop, its drafters, rules of verification, randomness and policies.

Begin with ``speculate.py``, then ``verify.py``. The folders prove, run, show and serve the loop.
"""
