"""Weights: model folders and their files, the hub, tokenizers, memory, and the shipped checkpoints.

Begin with ``load``, which finds a folder and loads its model.
"""
