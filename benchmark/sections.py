"""The sections: speed beside other ways to decode, and the steps, contexts and memory that it is made of."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmark import Report
from benchmark.contenders import WARM_UP_TOKENS, Bench, Contender, Prompt, Written, our_contender, our_contenders
from benchmark.libraries import LIBRARIES
from decoding.rounds import Round, Statistics
from decoding.run.chooser import Drafting, planned
from decoding.run.costs import CONTEXT, CostTable, draft_steps, filled_cache, verification
from decoding.run.plan_file import DraftPlan
from decoding.run.writer import Writer
from decoding.sampling import SamplingParams
from model import KVCache, LayerPlan
from model.clock import now, take_turns
from model.decoder import PREFILL_CHUNK
from weights.memory import LONGEST_DRAFT, estimate, held_bytes, parameter_count, peak_bytes

LONGEST_VERIFICATION = 16
START = 16  # tokens on which two libraries should agree, before rounding leads their texts apart
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
BANDWIDTH_BYTES = 1 << 28
MORE_ON_GPU = 16  # times as many: it reads the others in 60 µs
FILTERED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)  # each filter takes memory

Key = tuple[str, str]  # kind and text of a prompt


@dataclass
class Result:
    """What one contender did: seconds of each run, and the text with its rounds, which are the same in all."""

    seconds: dict[Key, list[float]] = field(default_factory=dict)
    prefill: dict[Key, list[float]] = field(default_factory=dict)
    texts: dict[Key, list[int]] = field(default_factory=dict)
    rounds: dict[Key, list[Round]] = field(default_factory=dict)

    def add(self, key: Key, seconds: float, written: Written) -> None:
        self.seconds.setdefault(key, []).append(seconds)
        self.prefill.setdefault(key, []).append(written.prefill)
        self.texts[key], self.rounds[key] = written.tokens, written.rounds

    @property
    def statistics(self) -> Statistics:
        sums = Statistics()
        for rounds in self.rounds.values():
            for round in rounds:
                sums.add(round)
        return sums


def run(
    contenders: dict[str, Contender], prompts: list[Prompt], count: int, repeats: int, device: torch.device
) -> dict[str, Result]:
    """Every contender on every prompt, in turns, after one warm-up each."""
    results = {name: Result() for name in contenders}
    for contender in contenders.values():
        contender.write(prompts[0][2], WARM_UP_TOKENS)
    turns = [prompt for _ in range(repeats) for prompt in prompts]
    for kind, text, ids in track(turns, "measuring", console=Console(stderr=True), transient=True):
        for name, contender in contenders.items():
            began = now(device)
            written = contender.write(ids, count)
            results[name].add((kind, text), now(device) - began, written)
    return results


def speedups(result: Result, plain: Result, kind: str | None = None) -> list[float]:
    """Plain's median time over this one's, prompt by prompt."""
    return [
        statistics.median(plain.seconds[key]) / statistics.median(times)
        for key, times in result.seconds.items()
        if kind is None or key[0] == kind
    ]


def predicted_speedups(result: Result, plain: Result, costs: CostTable) -> list[float]:
    """The same from acceptance and costs, prompt by prompt.

    The rounds tell which draft lengths k occurred and how many rounds acceptance made of the text. Each is charged
    k draft steps and the verification of k + 1 tokens (as in arXiv 2211.17192, theorem 3.8), in plain steps of this
    text, and reading the prompt is charged what it took.
    """
    predicted = []
    for key, rounds in result.rounds.items():
        total = statistics.median(plain.seconds[key])
        step = (total - statistics.median(plain.prefill[key])) / len(plain.texts[key])
        steps = sum(len(round.drafted) * costs.draft + costs.verify[len(round.drafted)] for round in rounds)
        predicted.append(total / (statistics.median(result.prefill[key]) + step * steps))
    return predicted


def measure_speed(bench: Bench, costs: dict[str, CostTable]) -> list[Report]:
    """One row for each contender: tokens a second, speed-up over plain decoding, agreement with its texts."""
    model, count = bench.model, bench.options.max_new_tokens
    contenders = our_contenders(bench.setting, bench.drafts) | bench.others
    results = run(contenders, bench.prompts, count, bench.options.repeats, model.device)
    plain = results["plain"]
    kinds = list(dict.fromkeys(kind for kind, _ in plain.seconds))
    rows = []
    for name, result in results.items():
        table, sums = costs.get(contenders[name].costs or ""), result.statistics
        predicted = predicted_speedups(result, plain, table) if table else []
        row = {
            "name": name,
            "tokens_per_second": spread([count / statistics.median(times) for times in result.seconds.values()]),
            "speed_up": spread(speedups(result, plain)),
            "speed_up_by_kind": {kind: statistics.median(speedups(result, plain, kind)) for kind in kinds},
            "predicted": spread(predicted) if predicted else None,
            "acceptance_rate": sums.acceptance_rate,
            "tokens_per_round": sums.tokens_per_round or None,
            "texts": len(plain.texts),
            "equal": sum(result.texts[key] == text for key, text in plain.texts.items()),
            "equal_start": sum(result.texts[key][:START] == text[:START] for key, text in plain.texts.items()),
            "seconds": {f"{kind}: {text}": times for (kind, text), times in result.seconds.items()},
        }
        rows.append(row)
    return rows


def spread(values: list[float]) -> Report:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def measure_steps(bench: Bench) -> Report:
    """Verifications of 1 to 16 tokens, and for each model draft its step and what that step keeps, all in turns.

    "kept" is the forward pass alone, the sublayers that the plan keeps and the head; "excess" is what the whole step,
    with distribution, draw and synchronisation, takes beyond it: it should stay below a twentieth of a plain step.
    """
    model, drafts = bench.model, bench.drafts
    longest = max([LONGEST_VERIFICATION, *(draft.new_policy().gamma + 1 for draft in drafts.values())])
    cache = filled_cache(model, longest)
    steps = [verification(model, count, cache) for count in range(1, longest + 1)]
    for draft in drafts.values():
        own = cache if draft.model is model else filled_cache(draft.model, longest)
        steps += [draft_steps(draft.model, own, draft.plan, count=1), kept_part(draft, own)]
    timings = take_turns(steps, bench.step_repeats, model.device)
    plain, verify, rest = timings[0], timings[:longest], timings[longest:]
    report: Report = {
        "verify": [took.row(f"verifying {n} tokens", plain, tokens=n) for n, took in enumerate(verify, start=1)],
        "draft": [],
        "kept": [],
    }
    for name, step, kept in zip(drafts, rest[::2], rest[1::2], strict=True):
        excess = (step.median - kept.median) / plain.median
        report["draft"].append(step.row(f"draft step, {name}", plain, draft=name, excess=excess))
        report["kept"].append(kept.row(f"its sublayers and head, {name}", plain, draft=name))
    return report


def kept_part(draft: Drafting, cache: KVCache) -> Callable[[], Tensor]:
    """The forward pass of a draft step."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=draft.model.device)
    return lambda: draft.model(token, cache, CONTEXT, draft.plan)


def cost_tables(steps: Report) -> dict[str, CostTable]:
    """The cost table of each model draft, and of lookup, whose drafts cost nothing."""
    verify = tuple(row["ratio"] for row in steps["verify"])
    drafts = {row["draft"]: CostTable(row["ratio"], verify) for row in steps["draft"]}
    return {"lookup": CostTable(0.0, verify)} | drafts


def measure_context(bench: Bench) -> list[Report]:
    """A plain step with more and more tokens before it. They are zeros, which take as long to read as others."""
    model = bench.model
    lengths = [length for length in bench.some(CONTEXTS) if length < model.max_positions]
    cache = model.new_cache(max(lengths, default=0) + 1)
    for tensor in [*cache.keys, *cache.values]:
        tensor.zero_()  # pages that nobody has written to are one page of zeros, quickly read
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)

    def step(length: int) -> None:
        cache.lengths = [length] * model.num_layers
        model(token, cache, length)[0, -1].argmax().item()

    times = take_turns([partial(step, length) for length in lengths], bench.step_repeats, model.device)
    return [took.row(f"after {n} tokens", times[0], tokens=n) for n, took in zip(lengths, times, strict=True)]


def measure_first_token(bench: Bench) -> list[Report]:
    """From an empty cache to the first token, for prompts of several lengths, by us and by the libraries of --against.

    A ratio is to our shortest prompt, a library's to our prompt of the same length.
    """
    model, lengths = bench.model, bench.prompt_lengths

    def read(length: int) -> None:
        prompt, cache = torch.zeros(1, length, dtype=torch.int64, device=model.device), model.new_cache(length)
        model.prefill(prompt[:, :-1], cache)
        model(prompt[:, -1:], cache, length - 1)[0, -1].argmax().item()

    others = [name for name in LIBRARIES if name in bench.others]
    steps = [partial(read, length) for length in lengths]
    steps += [partial(bench.others[name].write, [0] * length, 1) for name in others for length in lengths]
    times = iter(take_turns(steps, bench.options.repeats, model.device))
    ours = [next(times) for _ in lengths]
    rows = [took.row(f"prompt of {n} tokens", ours[0], tokens=n) for n, took in zip(lengths, ours, strict=True)]
    for name in others:
        rows += [next(times).row(f"{name}, {n} tokens", own, tokens=n) for n, own in zip(lengths, ours, strict=True)]
    return rows


def measure_memory(bench: Bench) -> list[Report]:
    """What the model holds, and what decoding takes at most beyond that, beside the estimate from the config.

    Measured are bytes of tensors: on CUDA the allocator's peak, on the CPU the most that torch's profiler sees
    allocated at once. Scratch memory of kernels is in neither.
    """
    model = bench.model
    positions = min(PREFILL_CHUNK + PREFILL_CHUNK // 2, model.max_positions)
    prompt = [0] * max(1, positions - 2 * (LONGEST_DRAFT + 1))
    drafting = planned(model, DraftPlan(LayerPlan.full(model.num_layers), LONGEST_DRAFT))

    def decode() -> None:
        our_contender(Writer(model, positions), drafting, params=FILTERED).write(prompt, positions - len(prompt))

    needed = estimate(model.config, model.dtype, positions, prompt=len(prompt), fast_on=model.device)
    measured = peak_bytes(decode, model.device)
    decoding = f"cache and workspace, a prompt of {len(prompt)} tokens and {positions - len(prompt)} more"
    return [
        {"part": "weights", "measured": held_bytes(model), "estimated": needed.weights},
        {"part": decoding, "measured": measured, "estimated": needed.cache + needed.workspace},
    ]


def measure_floor(bench: Bench) -> Report:
    """The fastest that plain decoding could be: every weight read once a token (of an untied embedding one row)."""
    config, device = bench.model.config, bench.model.device
    read = parameter_count(config) - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    weights, size = read * bench.model.dtype.itemsize, BANDWIDTH_BYTES * (1 if device.type == "cpu" else MORE_ON_GPU)
    block = torch.ones(size // 4, device=device)
    bandwidth = size / take_turns([block.sum], 7, device)[0].fastest
    return {"weight_bytes": weights, "bytes_per_second": bandwidth, "seconds_per_token": weights / bandwidth}
