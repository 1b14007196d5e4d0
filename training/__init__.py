"""Training: the recipe, its text, a sample of it, and the writing of a corpus. Begin with
``recipe``; the loop is ``train.py``.
"""
