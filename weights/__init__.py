"""Weights: reading, writing, fetching and measuring them, and the shipped checkpoints."""

import model  # noqa: F401 - first of all: it says how torch's threads wait
