"""Text for training, and a sample of it. Begin with ``train.py``, which holds the recipe and its
loop.
"""
