"""Drafter for ``--draft``: nothing but the tokens that a grammar forces, which any drafter gets."""

from decoding.drafters import NoDraft


class Forced(NoDraft):
    """Drafter of a user, which drafts nothing itself."""

    def __init__(self, *target_and_cache: object) -> None:
        """Take what every drafter of a user is made with."""
