"""Training: the recipe, its text and runs, a sample of text, and the writing of a corpus. Begin
with ``recipe``; the loop is ``train.py``.
"""
