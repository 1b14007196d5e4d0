"""Speculation beside plain decoding of the same request: how much faster, and whether the text is the same."""

from __future__ import annotations

import torch

from decoding.sampling import SamplingParams
from decoding.verify import Chance, verify_by_ratio
from decoding.writer import Sample, Writer


def comparison(writer: Writer, sample: Sample, params: SamplingParams, chance: Chance) -> str:
    """Decode the sample's request plainly and say how much faster speculation was and if the texts agree.

    They must in greedy decoding and under the race; under the ratio rule they only have the same law.
    """
    plain = writer.write_plainly(sample.text.rules, params, chance)
    line = (
        f"[plain decoding: {plain.statistics.tokens} tokens, {plain.tokens_per_second:.1f} tokens/s; "
        f"speed-up {sample.tokens_per_second / plain.tokens_per_second:.2f}x"
    )
    greedy = params.temperature == 0
    if not greedy and chance.verify is verify_by_ratio:
        return line + "]"
    ours, theirs = sample.text.generated, plain.text.generated
    if ours == theirs:
        return line + "; the texts are equal]"
    why = getattr(writer.model, "why_rows_vary", None) or "which is a defect where steps do not depend on their length"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    line += f"; the texts differ from token {at} on ({why})"
    if (
        greedy and at < min(len(ours), len(theirs)) and params.repetition_penalty == 1 and not sample.text.rules.banned
    ):  # the raw logits decided
        gap = logit_gap(writer, theirs[:at], ours[at : at + 1] + theirs[at : at + 1])
        line += f", where the two logits are {gap:.3g} apart"
    return line + "]"


def logit_gap(writer: Writer, common: list[int], two: list[int]) -> float:
    """How far apart plain decoding's logits of two candidate tokens lie after the prompt and the common text."""
    model, tokens = writer.model, [*writer.prompt, *common]
    with torch.inference_mode():
        cache = model.new_cache(len(tokens))
        ids = torch.tensor([tokens], device=model.device)
        model.prefill(ids[:, :-1], cache)
        logits = model(ids[:, -1:], cache, len(tokens) - 1)[0, -1, two].float()
    return (logits.max() - logits.min()).item()
