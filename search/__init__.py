"""Optuna search of the fastest layer plan for drafts.

Begin with ``__main__``, which says how a plan is found. ``acceptance`` and ``costs`` give a plan's
expected speed-up, ``study`` maximises it, and ``confirm`` decodes with the best plans. ``compare``
asks whether the sampler helps, and ``plots`` draws.
"""
