"""Weights: loading, saving, fetching and the hub, tokenizers, kept low-bit copies, memory, and the
shipped checkpoints. Begin with ``load``.
"""
