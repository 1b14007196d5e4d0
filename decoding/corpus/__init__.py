"""Corpus writer: a chat model writes texts for a small model to learn from, ``python -m decoding.corpus``.

``author`` asks for the texts, ``batch`` samples them, ``quality`` filters them, ``text_file`` keeps them.
"""
