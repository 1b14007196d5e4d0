"""Corpus writer: ``python -m training.corpus`` lets a chat model write stories to train a small
model on.

``stories`` makes requests and filters stories. Begin with ``__main__``.
"""
