"""Optuna search of the fastest layer plan for drafts: costs, study, confirmation, picture, built-in prompts.

Begin with ``study``. It maximises the predicted speed-up, which ``decoding/run/prediction.py`` computes.
"""
