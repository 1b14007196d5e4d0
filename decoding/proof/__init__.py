"""Proof by enumeration that the loop's text has plain sampling's distribution.

Begin with ``judge.py``; ``enumeration.py`` computes the law of the loop, ``plain_law.py`` that of
plain sampling.
"""
