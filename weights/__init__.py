"""Weights: loading, saving, fetching, tokenizers, memory, and the shipped checkpoints. Begin with
``load``.
"""
