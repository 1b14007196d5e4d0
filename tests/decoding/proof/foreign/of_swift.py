"""Texts by ``swift_forward`` of SWIFT, in the clone that SWIFT names, at TEMPERATURE.

Two drafts at one place stand for its up to ten at several.
"""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from tests.decoding.proof.foreign.bigrams import (
    PROMPT,
    TARGET,
    TEMPERATURE,
    TOKENS,
    Bigrams,
    foreign,
)

swift = foreign("SWIFT", "swift.utils", under="model")
swift.TOPK = 2  # drafts at a place
# Its script also imports other packages, and a block of an older transformers.
others = ("fastchat", "fastchat.utils", "bayes_opt", "evaluation_llama", "evaluation_llama.eval")
block = ("model.swift.modeling_llama", "model.swift.kv_cache")
stubs = {name: MagicMock() for name in (*others, *block)}
with patch.dict(sys.modules, {**stubs, "model.swift": MagicMock(), "model.swift.utils": swift}):
    script = Path(os.environ["SWIFT"], "evaluation_llama", "inference_swift.py")
    forward = runpy.run_path(str(script))["swift_forward"]
forward.__globals__["get_choices_list"] = lambda probs, **_: [
    [0] * depth + [child] for depth in range(len(probs)) for child in range(swift.TOPK)
]
forward.__globals__["initialize_past_key_values"] = lambda model: (
    [],
    [torch.zeros(64, 1)],
    torch.zeros(1),
)
swift.clone_past_key_values = MagicMock()


class SelfDrafting(Bigrams):
    """Model in two parts: its layers give the logits, which its head passes on."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        weight = SimpleNamespace(weight=torch.zeros(1))
        layer = SimpleNamespace(self_attn=SimpleNamespace(q_proj=weight))
        self.model = lambda input_ids, **_: [self.table.log()[input_ids]]
        self.model.layers = [layer]

    def lm_head(self, logits: Tensor) -> Tensor:
        return logits


def speculative() -> tuple[int, ...]:
    """A text in rounds of one drafted place, cut to its length."""
    written, *_ = forward(
        torch.tensor([PROMPT]),
        SelfDrafting(),
        SimpleNamespace(eos_token_id=-1),
        TOKENS - 1,
        {"context_window": 0, "optimization": False},
        logits_processor=swift.prepare_logits_processor(TEMPERATURE),
    )
    return tuple(written[0, len(PROMPT) : len(PROMPT) + TOKENS].tolist())
