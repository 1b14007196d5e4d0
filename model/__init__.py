"""Decoders of the families of ``config.FAMILIES``, with an explicit KV cache and layer plans.

Begin with ``llama`` or ``gemma2``: one block each, made of ``layers``. ``decoder`` has the forward
pass, ``cache`` the KV cache and ``plan`` the layer plan. ``config`` reads ``config.json``.
``quantise`` rounds weights, and ``low_bits`` has the blocks under a plan. ``steps`` says what else
a model can do, and ``parallel`` splits one over processes.
``device`` knows what a device can do, ``errors`` has errors with a remedy, and ``places`` has the
folders of files that are kept between runs. ``fast`` makes the same models faster.
"""
