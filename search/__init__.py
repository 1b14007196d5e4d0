"""Optuna search of the fastest layer plan for drafts: texts, costs, acceptance, prediction,
study, confirmation, picture, built-in prompts.

Begin with ``study``. It maximises the predicted speed-up, which ``prediction`` computes from the
acceptance of a plan's drafts (``acceptance``) and their costs (``costs``).
"""
