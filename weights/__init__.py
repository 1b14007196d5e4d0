"""Weights: loading, saving, fetching and the hub, tokenizers, importance, memory, and the
shipped checkpoints. Begin with ``load``.
"""
