"""Files, text, options and reports of ``train.py``, which holds the recipe and its loop. Begin there."""
