"""Speculation beside plain decoding of the same request: how much faster, and whether the text is the same."""

from __future__ import annotations

import torch

from decoding.run.writer import Sample, Writer
from decoding.sampling import SamplingParams
from decoding.verify import Chance, verify_by_ratio

FEW_TOKENS, SHORT = 48, 0.5  # a text of fewer tokens, or written in fewer seconds, tells nothing about speed


def comparison(writer: Writer, sample: Sample, params: SamplingParams, chance: Chance) -> str:
    """Decode the sample's request plainly; say how much faster speculation was, and whether the texts agree.

    They must in greedy decoding and under the race; under the ratio rule they only have the same law.
    """
    plain = writer.write_plainly(sample.text.rules, params, chance)
    ratio = sample.tokens_per_second / plain.tokens_per_second
    line = f"{ratio:.2f} times plain decoding ({plain.tokens_per_second:.1f} tokens/s), "
    line += agreement(writer, sample, plain, params, chance)
    tokens = min(sample.statistics.tokens, plain.statistics.tokens)
    seconds = min(sample.seconds, plain.seconds)
    if tokens < FEW_TOKENS or seconds < SHORT:
        line += f"; too short to mean anything ({tokens} tokens, {seconds:.2f} s): let it write more"
    return f"[{line}]"


def agreement(writer: Writer, sample: Sample, plain: Sample, params: SamplingParams, chance: Chance) -> str:
    """Whether the two texts are the same; if not, where they part, why, and in greedy decoding by how little."""
    greedy = params.temperature == 0
    if not greedy and chance.verify is verify_by_ratio:
        return "another text of the same law"
    ours, theirs = sample.text.generated, plain.text.generated
    if ours == theirs:
        return "same text"
    why = getattr(writer.model, "why_rows_vary", None) or "which is a defect where steps do not depend on their length"
    shorter = min(len(ours), len(theirs))
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), shorter)
    said = f"but the texts differ from token {at} on ({why})"
    raw_logits_decided = greedy and params.repetition_penalty == 1 and not sample.text.rules.banned
    if raw_logits_decided and at < shorter:
        gap = logit_gap(writer, theirs[:at], ours[at : at + 1] + theirs[at : at + 1])
        said += f", where the two logits are {gap:.3g} apart"
    return said


def logit_gap(writer: Writer, common: list[int], two: list[int]) -> float:
    """How far apart plain decoding's logits of two candidate tokens lie after the prompt and the common text."""
    model, tokens = writer.model, [*writer.prompt, *common]
    with torch.inference_mode():
        cache = model.new_cache(len(tokens))
        ids = torch.tensor([tokens], device=model.device)
        model.prefill(ids[:, :-1], cache)
        logits = model(ids[:, -1:], cache, len(tokens) - 1)[0, -1, two].float()
    return (logits.max() - logits.min()).item()
