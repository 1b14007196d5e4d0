"""Training: the recipe, its text, options and optimisers, the evaluation, a sample of text, and the
writing of a corpus. Begin with ``recipe``; the loop is ``train.py``.
"""
