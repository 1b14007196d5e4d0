"""Decoders of the families of ``config.FAMILIES``, with an explicit KV cache and layer plans.

Begin with ``llama`` or ``gemma2``: one block each, made of ``layers``. ``decoder`` has the forward
pass, ``cache`` the KV cache and ``plan`` the layer plan. ``quantise`` rounds weights, and
``low_bits`` has the blocks under a plan. ``steps`` says what else a model can do, ``parallel``
splits one over processes, and ``families`` builds that of a config. ``fast`` makes the same models
faster.
"""
