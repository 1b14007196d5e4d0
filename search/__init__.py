"""Optuna search of the fastest layer plan for drafts.

Begin with ``__main__``, which says how a plan is found. ``acceptance`` and ``costs`` give a plan's
expected speed-up on the ``texts``, ``study`` maximises it and compares the ways to search,
``confirm`` decodes with the best plans, and ``plots`` draws.
"""
