"""Decoders of the families of ``config.FAMILIES``, with an explicit KV cache and layer plans.

Begin with ``llama`` or ``gemma2``: one block each, made of ``layers``. ``decoder`` has the forward
pass, ``cache`` the KV cache and ``plan`` the layer plan; ``quantise`` rounds weights and makes
sublayers in low bits, ``parallel`` splits a model over processes, and ``families`` builds the model
of a config. ``fast`` makes the same models faster.
"""
