"""Corpus writer: ``python -m training.corpus`` lets a chat model write stories to train a small
model on.

``stories`` makes the requests and filters, ``__main__`` writes and stores. Begin with ``__main__``.
"""
