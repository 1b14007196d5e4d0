"""Optuna search of the fastest layer plan for drafts.

Begin with ``__main__``, which says how a plan is found. ``study`` maximises the predicted speed-up,
which ``prediction`` computes from the acceptance of a plan's drafts (``acceptance``) on calibration
texts (``texts``) and from their costs (``costs``), and draws. ``confirm`` compares the best plans
while they decode.
"""
