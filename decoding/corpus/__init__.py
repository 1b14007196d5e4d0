"""Corpus writer: ``python -m decoding.corpus`` lets a chat model write stories to train a small model on.

``templates`` makes the requests, ``quality`` filters, ``__main__`` writes and stores. Begin with ``__main__``.
"""
