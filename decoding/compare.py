"""Speculation beside plain decoding of the same request: how much faster, and whether the text is the same."""

from __future__ import annotations

import torch

from decoding.sampling import SamplingParams
from decoding.writer import Sample, Writer


def comparison(writer: Writer, sample: Sample, params: SamplingParams, seed: int) -> str:
    """Decode the sample's request plainly and say how much faster speculation was and, when greedy, if texts agree."""
    plain = writer.write_plainly(sample.text.rules, params, seed)
    line = (
        f"[plain decoding: {plain.statistics.tokens} tokens, {plain.tokens_per_second:.1f} tokens/s; "
        f"speed-up {sample.tokens_per_second / plain.tokens_per_second:.2f}x"
    )
    if params.temperature:
        return line + "]"
    ours, theirs = sample.text.generated, plain.text.generated
    if ours == theirs:
        return line + "; greedy texts are equal]"
    if params.repetition_penalty != 1 or sample.text.rules.banned:
        return line + "; greedy texts differ]"  # what decided was not the raw logits
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    gap = logit_gap(writer, theirs[:at], ours[at : at + 1] + theirs[at : at + 1])
    return line + f"; greedy texts differ from token {at} on, where the two logits are {gap:.3g} apart]"


def logit_gap(writer: Writer, common: list[int], two: list[int]) -> float:
    """How far apart plain decoding's logits of two candidate tokens lie after the prompt and the common text."""
    model, tokens = writer.model, [*writer.prompt, *common]
    with torch.inference_mode():
        cache = model.new_cache(len(tokens))
        ids = torch.tensor([tokens], device=model.device)
        model.prefill(ids[:, :-1], cache)
        logits = model(ids[:, -1:], cache, len(tokens) - 1)[0, -1, two].float()
    return (logits.max() - logits.min()).item()
