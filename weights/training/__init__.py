"""Text and files of training. Begin with ``train.py``, which holds the recipe and its loop."""
