"""Statistics of a written text: as a line, and as the JSON object of --json."""

from typing import Any

from decoding.run.writer import Sample
from decoding.sampling import SamplingParams


def describe(sample: Sample, draft: str, repeat_with: str) -> str:
    """The line of statistics; ``draft`` names the draft, ``repeat_with`` the options that repeat a sampled text."""
    s = sample.statistics
    line = f"[{s.tokens} tokens in {sample.seconds:.2f} s: {sample.tokens_per_second:.1f} tokens/s; {draft}"
    if s.acceptance_rate is not None:
        line += f": {s.acceptance_rate:.0%} of {s.drafted} drafted tokens accepted"
    line += f", {s.tokens_per_round:.2f} tokens a round"
    if sample.trouble:
        line += f"; without CUDA graphs ({sample.trouble})"
    return line + (f"; {repeat_with}]" if repeat_with else "]")


def as_json(sample: Sample, repeat_with: str) -> dict[str, Any]:
    """The object that --json prints."""
    names = ("rounds", "drafted", "accepted", "acceptance_rate", "tokens_per_round")
    return {
        "text": sample.text.written,
        "tokens": sample.text.generated,
        "prompt_tokens": sample.text.prompt_length,
        "finish_reason": sample.finish,
        "seconds": sample.seconds,
        "tokens_per_second": sample.tokens_per_second,
        **{name: getattr(sample.statistics, name) for name in names},
        "accepted_histogram": sample.statistics.histogram,
        "repeat_with": repeat_with,
    }


def sampling_in_words(params: SamplingParams, repeat_with: str) -> str:
    """The sampling parameters that have an effect, and the options that repeat a sampled text."""
    filters = {"top-k": (params.top_k, 0), "top-p": (params.top_p, 1), "min-p": (params.min_p, 0)}
    in_force = {name: value for name, (value, off) in filters.items() if value != off} if params.temperature else {}
    if params.repetition_penalty != 1:
        in_force["repetition penalty"] = params.repetition_penalty
    words = [f"temperature {params.temperature:g}" if params.temperature else "greedy"]
    words += [f"{name} {value:g}" for name, value in in_force.items()]
    return ", ".join([*words, repeat_with] if repeat_with else words)
