"""Drafter for ``--draft``: nothing but the tokens that a grammar forces, which any drafter gets."""

from typing import Any

from decoding.drafters import NoDraft
from decoding.model_port import Model


class Forced(NoDraft):
    """Drafter of a user, which drafts nothing itself."""

    def __init__(self, target: Model, cache: Any) -> None:
        super().__init__()
