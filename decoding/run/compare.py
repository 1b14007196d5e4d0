"""Comparison of speculation with plain decoding of the same request: speed-up, and equality of the texts."""

from __future__ import annotations

import torch

from decoding.run.writer import Sample, Writer
from decoding.sampling import SamplingParams
from decoding.verify import Coupling

FEW_TOKENS, SHORT = 48, 0.5  # a text of fewer tokens, or written in fewer seconds, tells nothing about speed


def comparison(
    writer: Writer, sample: Sample, params: SamplingParams, coupling: Coupling, *, exact: bool = True
) -> str:
    """The speed-up over plain decoding of the sample's request, and whether the two texts are equal.

    They must be in greedy decoding and under the race. Under the ratio rule they have the same law, unless the drafter
    may misstate its q (``exact`` is False: a class of the user's).
    """
    plain = writer.write_plainly(sample.text.rules, params, coupling)
    ratio = sample.tokens_per_second / plain.tokens_per_second
    line = f"{ratio:.2f} times plain decoding ({plain.tokens_per_second:.1f} tokens/s), "
    if params.temperature and coupling.name == "ratio":
        line += "another text of the same law" + (", if the drafter states its q truly" if not exact else "")
    else:
        line += agreement(writer, sample, plain, params)
    tokens = min(sample.statistics.tokens, plain.statistics.tokens)
    seconds = min(sample.seconds, plain.seconds)
    if tokens < FEW_TOKENS or seconds < SHORT:
        line += f"; too short to mean anything ({tokens} tokens, {seconds:.2f} s): let it write more"
    return f"[{line}]"


def agreement(writer: Writer, sample: Sample, plain: Sample, params: SamplingParams) -> str:
    """Equality of the two texts, or their first difference and its cause; in greedy decoding also the logits' gap."""
    ours, theirs = sample.text.generated, plain.text.generated
    if ours == theirs:
        return "same text"
    why = getattr(writer.model, "why_rows_vary", None) or "which is a defect where steps do not depend on their length"
    shorter = min(len(ours), len(theirs))
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), shorter)
    said = f"but the texts differ from token {at} on ({why})"
    raw_logits_decided = params.temperature == 0 and params.repetition_penalty == 1 and not sample.text.rules.banned
    if raw_logits_decided and at < shorter:
        gap = logit_gap(writer, theirs[:at], ours[at : at + 1] + theirs[at : at + 1])
        said += f", where the two logits are {gap:.3g} apart"
    return said


def logit_gap(writer: Writer, common: list[int], two: list[int]) -> float:
    """Difference of plain decoding's logits of two candidate tokens after the prompt and the common text."""
    model, tokens = writer.model, [*writer.prompt, *common]
    with torch.inference_mode():
        cache = model.new_cache(len(tokens))
        ids = torch.tensor([tokens], device=model.device)
        model.prefill(ids[:, :-1], cache)
        logits = model(ids[:, -1:], cache, len(tokens) - 1)[0, -1, two].float()
    return (logits.max() - logits.min()).item()
