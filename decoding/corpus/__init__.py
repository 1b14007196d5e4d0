"""Corpus writer: ``python -m decoding.corpus`` lets a chat model write texts to train a small model on.

``author`` makes the prompts and writes, ``quality`` filters, ``text_file`` stores. Begin with ``author``.
"""
