"""Optuna search of the layer plan that drafts fastest: texts, costs, study, confirmation, pictures; built-in prompts.

Begin with ``study``; the predicted speed-up that it maximises is computed in ``decoding/run/prediction.py``.
"""
