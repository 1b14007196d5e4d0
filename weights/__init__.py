"""Weights: reading, writing, fetching and measuring them, and the shipped checkpoints."""
