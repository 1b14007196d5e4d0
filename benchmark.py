"""Measure what decoding costs on this machine: every way of drafting, other libraries, and the steps they are made of.

``python benchmark.py --quick`` takes about a minute on two idle cores, and as much again for each ``--against``.
Whatever is compared takes turns, so that a slow spell of the machine hits all alike; what counts are the ratios.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from importlib import metadata, util
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # read when torch is loaded; see generate.py

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from decoding.costs import CONTEXT, CostTable, draft_step, filled_cache, measure_costs, verification
from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.policies import AdaptiveExit, BreakEven, FixedLength, Policy
from decoding.randomness import SeededRandomness
from decoding.rounds import Round, Statistics
from decoding.sampling import Sampler, SamplingParams
from decoding.speculate import speculate
from decoding.stopping import StopRules
from model import Decoder, InputError, KVCache, LayerPlan, parse_config
from model.decoder import PREFILL_CHUNK
from model.fast import accelerate
from search.prompts import PROMPTS
from search.texts import encode_prompts
from weights.command_line import OneLineParser
from weights.cost_file import kept_costs, machine
from weights.device import pick_device
from weights.draft_model import load_draft_model
from weights.files import atomic_path, check_place, one_line, read_json, write_json
from weights.load import DTYPES, load_model, stored_dtype
from weights.memory import ROUND_TOKENS, check_fits, estimate, held_bytes, in_words, parameter_count, peak_bytes
from weights.names import model_folder
from weights.plan_file import read_plan
from weights.tokenizer import Tokenizer

SECTIONS = ("speed", "costs", "context", "first-token", "memory", "floor")
DRAWN = ("speed", "costs", "context")
LIBRARIES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}  # --against -> the module it needs
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}
GAMMA = 4
LONGEST_VERIFICATION = 16
CONFIDENT = 0.8  # the adaptive exit's first threshold in greedy decoding
WARM_UP_TOKENS = 8
START = 16  # tokens on which two libraries should agree, before rounding leads their texts apart
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
PROMPT_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BANDWIDTH_BYTES = 1 << 28
GREEDY = Sampler()
FILTERED = Sampler(SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01))  # each filter takes memory

Prompt = tuple[str, str, list[int]]  # kind, text, token ids
Key = tuple[str, str]  # kind and text of a prompt
Report = dict[str, Any]  # what --json writes; the tables and the picture are made from it


# The clock


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of ``count`` measurements, the fastest and the slowest of them."""

    median: float
    fastest: float
    slowest: float
    count: int

    @staticmethod
    def of(seconds: list[float]) -> Timing:
        return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def row(self, name: str, unit: Timing, **more: object) -> Report:
        """A row of the report: what was timed, and the ratio to another time."""
        return {"name": name, **asdict(self), "ratio": self.median / unit.median, **more}


def now(device: torch.device) -> float:
    """Seconds, read once everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def take_turns(steps: list[Callable[[], object]], repeats: int, device: torch.device) -> list[Timing]:
    """Each step once as warm-up, then ``repeats`` times all of them, one after another."""
    for step in steps:
        step()
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, times in zip(steps, seconds, strict=True):
            began = now(device)
            step()
            times.append(now(device) - began)
    return [Timing.of(times) for times in seconds]


# Contenders: ways to write a greedy text of a given length, end-of-text ignored


@dataclass(frozen=True)
class Written:
    """A text's tokens, and, where the contender is ours, its rounds and the seconds that reading the prompt took."""

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    prefill: float = 0.0


@dataclass(frozen=True)
class Contender:
    """``write(prompt, count)`` writes so many tokens; ``costs`` names the cost table that predicts its speed."""

    write: Callable[[list[int], int], Written]
    costs: str | None = None


@dataclass(frozen=True)
class ModelDraft:
    """What drafts: the target itself under a layer plan, or a model of its own (then without a plan)."""

    model: Decoder
    plan: LayerPlan | None = None
    policy: Callable[[], Policy] = lambda: FixedLength(GAMMA)
    threshold: float = CONFIDENT


MakeDrafter = Callable[[Tensor, KVCache], Drafter]  # for a prompt, [1, n], and the target's cache, which holds it


def our_contender(
    model: Decoder,
    make: MakeDrafter,
    policy: Callable[[], Policy],
    costs: str | None = None,
    sampler: Sampler = GREEDY,
) -> Contender:
    """Our loop, the prompt's prefill included."""

    @torch.inference_mode()
    def write(prompt: list[int], count: int) -> Written:
        began = now(model.device)
        cache = model.new_cache(len(prompt) + count)
        ids = torch.tensor([prompt[:-1]], dtype=torch.int64, device=model.device)
        model.prefill(ids, cache)
        drafter, randomness = make(ids, cache), SeededRandomness(0, model.device)
        prefill = now(model.device) - began
        rounds = list(speculate(model, cache, prompt, drafter, policy(), sampler, StopRules(count), randomness))
        return Written([token for round in rounds for token in round.emitted], rounds, prefill)

    return Contender(write, costs)


def drafting(target: Decoder, draft: ModelDraft) -> MakeDrafter:
    """How to make the drafter of a model draft; a model of its own reads the prompt too."""

    def make(prompt: Tensor, cache: KVCache) -> Drafter:
        if draft.model is target:
            return ModelDrafter(target, cache, draft.plan)
        own = draft.model.new_cache(cache.capacity)
        draft.model.prefill(prompt, own)
        return ModelDrafter(draft.model, own)

    return make


def our_contenders(folder: Path, model: Decoder, drafts: dict[str, ModelDraft]) -> dict[str, Contender]:
    """Plain decoding, lookup, each model draft as it is and with adaptive exit, and what generate.py's auto chooses."""

    def lookup(prompt: Tensor, cache: KVCache) -> Drafter:
        return PromptLookup(model.vocab_size, model.device)

    def no_draft(prompt: Tensor, cache: KVCache) -> Drafter:
        return NoDraft(model.vocab_size, model.device)

    found = {
        "plain": our_contender(model, no_draft, lambda: FixedLength(0)),
        "lookup": our_contender(model, lookup, lambda: FixedLength(GAMMA), "lookup"),
    }
    for name, draft in drafts.items():
        make, start = drafting(model, draft), draft.threshold
        found[name] = our_contender(model, make, draft.policy, name)
        found[f"{name}, adaptive"] = our_contender(model, make, lambda start=start: AdaptiveExit(start), name)
    own = drafts.get("plan.json")
    draft_model, plan = (own.model, own.plan) if own else (None, None)
    costs = kept_costs(folder, model, plan, lambda: measure_costs(model, draft_model, plan))
    make, name = (drafting(model, own), "plan.json") if own else (lookup, "lookup")
    return found | {"auto": our_contender(model, make, lambda: BreakEven(costs), name)}


def find_drafts(folder: Path, model: Decoder, draft_model: Decoder | None, *, quick: bool) -> dict[str, ModelDraft]:
    """Early exits at two or three layers, the folder's own plan and the draft model, if there are any, by name."""
    layers = model.num_layers
    exits = [layers // 2, exit_layer(layers)] if quick else [layers // 2, layers * 2 // 3, exit_layer(layers)]
    drafts = {f"exit {at}": ModelDraft(model, LayerPlan.early_exit(layers, at)) for at in exits if at}
    if (folder / "plan.json").exists():
        own = read_plan(folder / "plan.json", layers, folder)
        start = CONFIDENT if own.threshold is None else own.threshold
        drafts["plan.json"] = ModelDraft(model, own.plan, lambda: own.new_policy(GAMMA), start)
    if draft_model is not None:
        drafts["model"] = ModelDraft(draft_model)
    return drafts


def exit_layer(layers: int) -> int:
    """The deepest exit measured, and the one that transformers is given too."""
    return max(1, layers * 4 // 5)


def transformers_contenders(folder: Path, model: Decoder, draft_folder: Path | None) -> dict[str, Contender]:
    """``generate`` of transformers on the same checkpoint, dtype and device, by each of its ways to draft."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def load(folder: Path) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device)
        loaded.generation_config.eos_token_id = None  # end-of-text is ignored, as in our contenders
        loaded.generation_config.num_assistant_tokens = GAMMA
        return loaded

    theirs = load(folder)

    def contender(**options: object) -> Contender:
        def write(prompt: list[int], count: int) -> Written:
            ids = torch.tensor([prompt], device=model.device)
            seen = torch.ones_like(ids)
            written = theirs.generate(ids, attention_mask=seen, max_new_tokens=count, do_sample=False, **options)
            return Written(written[0, len(prompt) :].tolist())

        return Contender(write)

    exit_at = exit_layer(model.num_layers)
    found = {
        "transformers": contender(),
        "transformers, lookup": contender(prompt_lookup_num_tokens=GAMMA),
        f"transformers, exit {exit_at}": contender(assistant_early_exit=exit_at),
    }
    if draft_folder is not None:
        found["transformers, model"] = contender(assistant_model=load(draft_folder))
    return found


def llama_cpp_contender(folder: Path, model: Decoder, longest: int) -> Contender:
    """Plain decoding of llama.cpp with the same weights in the same dtype, for texts up to ``longest`` tokens."""
    from weights.gguf_export import open_in_llama_cpp

    theirs = open_in_llama_cpp(folder, model.dtype, model.device, longest)

    def write(prompt: list[int], count: int) -> Written:
        theirs.reset()  # or a prompt that it has just read would cost nothing
        return Written(list(islice(theirs.generate(prompt, temp=0.0), count)))

    return Contender(write)


def other_contenders(bench: Bench) -> dict[str, Contender]:
    """The libraries of --against, less what they cannot do with this model: that goes into the notes."""
    found: dict[str, Contender] = {}
    if "transformers" in bench.options.against:
        found |= transformers_contenders(bench.folder, bench.model, bench.draft_folder)
    if "llama.cpp" in bench.options.against:
        try:
            found["llama.cpp"] = llama_cpp_contender(bench.folder, bench.model, bench.longest_text)
        except InputError as error:
            bench.notes.append(f"llama.cpp: not possible with this model: {one_line(error)}")
    for name, contender in list(found.items()):
        try:
            contender.write(bench.prompts[0][2], WARM_UP_TOKENS)
        except Exception as error:  # a library may fail in any way on a model that it does not know well
            bench.notes.append(f"{name}: not possible with this model: {one_line(error)}")
            del found[name]
    return found


# The sections


@dataclass
class Bench:
    """Everything a section needs: the target, what drafts, the prompts, the options; and notes for the reader."""

    options: argparse.Namespace
    folder: Path
    model: Decoder
    prompts: list[Prompt]
    draft_folder: Path | None = None
    drafts: dict[str, ModelDraft] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def longest_text(self) -> int:
        return max(len(ids) for _, _, ids in self.prompts) + self.options.max_new_tokens

    @property
    def step_repeats(self) -> int:
        """How often single steps are timed; they are short."""
        return 5 if self.options.quick else 15

    def some(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """All of the lengths, or three of the shorter ones in a quick run."""
        return lengths[:5:2] if self.options.quick else lengths


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
    contenders = our_contenders(bench.folder, model, bench.drafts) | other_contenders(bench)
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
    with distribution, draw and reading the host, takes beyond it: it should stay below a twentieth of a plain step.
    """
    model, drafts = bench.model, bench.drafts
    longest = max([LONGEST_VERIFICATION, *(draft.policy().gamma + 1 for draft in drafts.values())])
    cache = filled_cache(model, longest)
    steps = [verification(model, count, cache) for count in range(1, longest + 1)]
    for draft in drafts.values():
        own = cache if draft.model is model else filled_cache(draft.model, longest)
        steps += [draft_step(draft.model, own, draft.plan), kept_part(draft, own)]
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


def kept_part(draft: ModelDraft, cache: KVCache) -> Callable[[], Tensor]:
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
        tensor.zero_()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)

    def step(length: int) -> None:
        cache.lengths = [length] * model.num_layers
        model(token, cache, length)[0, -1].argmax().item()

    times = take_turns([partial(step, length) for length in lengths], bench.step_repeats, model.device)
    return [took.row(f"after {n} tokens", times[0], tokens=n) for n, took in zip(lengths, times, strict=True)]


def measure_first_token(bench: Bench) -> list[Report]:
    """From an empty cache to the first token, for prompts of several lengths."""
    model = bench.model
    lengths = [length for length in bench.some(PROMPT_LENGTHS) if length <= model.max_positions]

    def read(length: int) -> None:
        prompt, cache = torch.zeros(1, length, dtype=torch.int64, device=model.device), model.new_cache(length)
        model.prefill(prompt[:, :-1], cache)
        model(prompt[:, -1:], cache, length - 1)[0, -1].argmax().item()

    times = take_turns([partial(read, length) for length in lengths], bench.options.repeats, model.device)
    return [took.row(f"prompt of {n} tokens", times[0], tokens=n) for n, took in zip(lengths, times, strict=True)]


def measure_memory(bench: Bench) -> list[Report]:
    """What the model holds, and what decoding takes at most beyond that, beside the estimate from the config.

    Measured are bytes of tensors: on CUDA the allocator's peak, on the CPU the most that torch's profiler sees
    allocated at once. Scratch memory of kernels is in neither.
    """
    model = bench.model
    positions = min(PREFILL_CHUNK + PREFILL_CHUNK // 2, model.max_positions)
    prompt = [0] * max(1, positions - 2 * ROUND_TOKENS)
    drafter = drafting(model, ModelDraft(model, LayerPlan.full(model.num_layers)))
    contender = our_contender(model, drafter, lambda: FixedLength(ROUND_TOKENS - 1), sampler=FILTERED)
    needed = estimate(model.config, model.dtype, positions, prompt=len(prompt), fast_on=model.device)
    measured = peak_bytes(lambda: contender.write(prompt, positions - len(prompt)), model.device)
    decoding = f"cache and workspace, a prompt of {len(prompt)} tokens and {positions - len(prompt)} more"
    return [
        {"part": "weights", "measured": held_bytes(model), "estimated": needed.weights},
        {"part": decoding, "measured": measured, "estimated": needed.cache + needed.workspace},
    ]


def measure_floor(bench: Bench) -> Report:
    """The fastest that plain decoding could be: every weight read once a token (of an untied embedding one row)."""
    config, device = bench.model.config, bench.model.device
    read = parameter_count(config) - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    weights, block = read * bench.model.dtype.itemsize, torch.ones(BANDWIDTH_BYTES // 4, device=device)
    bandwidth = BANDWIDTH_BYTES / take_turns([block.sum], 7, device)[0].fastest
    return {"weight_bytes": weights, "bytes_per_second": bandwidth, "seconds_per_token": weights / bandwidth}


def measure(bench: Bench) -> Report:
    """The chosen sections, by name."""
    chosen = bench.options.only
    report: Report = {}
    if {"speed", "costs"} & set(chosen):  # a prediction needs the costs
        report["costs"] = measure_steps(bench)
    if "speed" in chosen:
        report["speed"] = measure_speed(bench, cost_tables(report["costs"]))
    others = {"context": measure_context, "first-token": measure_first_token, "floor": measure_floor}
    return report | {name: section(bench) for name, section in others.items() if name in chosen}


# What is shown of it


def tables(report: Report) -> list[Table | str]:
    """Everything measured, as it is printed."""
    shown: list[Table | str] = []
    if "speed" in report:
        tokens = report["about"]["tokens"]
        shown += [f"\n{tokens} greedy tokens a prompt, prefill included", speed_table(report["speed"])]
    costs = report.get("costs", {"verify": [], "draft": [], "kept": []})
    for title, unit, rows in (
        (f"steps after {CONTEXT} tokens", "plain steps", costs["verify"] + costs["draft"] + costs["kept"]),
        ("a plain step as the text grows", "ratio", report.get("context")),
        ("time to first token", "ratio", report.get("first-token")),
    ):
        if rows:
            shown += [f"\n{title}", time_table(rows, unit)]
    if "memory" in report:
        rows = [[row["part"], in_words(row["measured"]), in_words(row["estimated"])] for row in report["memory"]]
        shown += ["\nmemory", table_of(["", "measured", "estimated"], rows)]
    if floor := report.get("floor"):
        shown.append(
            f"\nfloor: {in_words(floor['weight_bytes'])} of weights a token, read at "
            f"{floor['bytes_per_second'] / 1e9:.0f} GB/s, take {floor['seconds_per_token'] * 1e3:.2f} ms: "
            f"at most {1 / floor['seconds_per_token']:.0f} plain tokens/s"
        )
    return [*shown, *report["notes"]]


def table_of(headings: list[str], rows: list[list[str]]) -> Table:
    """The first column to the left, numbers to the right."""
    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def time_table(rows: list[Report], unit: str) -> Table:
    """Named times with their range and ratio; a draft step's also with its excess over what it keeps."""
    lines = []
    for row in rows:
        median, fastest, slowest = (f"{row[which] * 1e3:.2f}" for which in ("median", "fastest", "slowest"))
        excess = f" (excess {row['excess']:.2f})" if "excess" in row else ""
        lines.append([row["name"] + excess, f"{median} ({fastest}-{slowest})", number(row["ratio"])])
    return table_of(["", "ms", unit], lines)


def speed_table(rows: list[Report]) -> Table:
    """Medians over the prompts; speed-ups also by kind of prompt. "equal" counts whole texts, then beginnings."""
    kinds = list(rows[0]["speed_up_by_kind"])
    headings = ["decoder", "tokens/s", "speed-up", "predicted", "accepted", "a round", "equal", f"first {START}"]
    lines = []
    for row in rows:
        rate, acceptance, of = row["tokens_per_second"], row["acceptance_rate"], row["texts"]
        lines.append(
            [
                row["name"],
                f"{rate['median']:.1f} ({rate['lowest']:.1f}-{rate['highest']:.1f})",
                number(row["speed_up"]["median"]),
                number(row["predicted"] and row["predicted"]["median"]),
                "" if acceptance is None else f"{acceptance:.0%}",
                number(row["tokens_per_round"]),
                f"{row['equal']}/{of}",
                f"{row['equal_start']}/{of}",
                *(number(row["speed_up_by_kind"][kind]) for kind in kinds),
            ]
        )
    return table_of([*headings, *kinds], lines)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(report: Report, path: Path) -> None:
    """A picture of what has one: speed-ups above, costs of verification and of a growing text below."""
    from matplotlib.figure import Figure

    below = [name for name in ("costs", "context") if name in report]
    layout = [[name] * max(1, len(below)) for name in ("speed",) if name in report] + ([below] if below else [])
    figure = Figure(figsize=(11, 4.2 * len(layout)), layout="constrained")
    panels = {"speed": draw_speed, "costs": draw_verification, "context": draw_context}
    for name, axes in figure.subplot_mosaic(layout).items():
        panels[name](axes, report[name])
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=150)


def draw_speed(axes: Any, rows: list[Report]) -> None:
    """A group of bars for each contender, one for each kind of prompt; over them their median and the prediction."""
    kinds = list(rows[0]["speed_up_by_kind"])
    width = 0.8 / len(kinds)
    for place, kind in enumerate(kinds):
        where = [at + (place + 0.5) * width - 0.4 for at in range(len(rows))]
        axes.bar(where, [row["speed_up_by_kind"][kind] for row in rows], width, label=kind)
    middle = [row["speed_up"]["median"] for row in rows]
    axes.hlines(middle, [at - 0.42 for at in range(len(rows))], [at + 0.42 for at in range(len(rows))], "black")
    known = [at for at, row in enumerate(rows) if row["predicted"]]
    predicted = [rows[at]["predicted"]["median"] for at in known]
    axes.scatter(known, predicted, marker="D", facecolor="white", edgecolor="black", zorder=3, label="predicted")
    axes.axhline(1, color="grey", linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(rows)), [row["name"] for row in rows], rotation=25, ha="right", rotation_mode="anchor")
    axes.set(title="speed-up over plain decoding, by kind of prompt (line: median of all)", ylabel="times as fast")
    axes.legend(ncols=4, fontsize="small")


def draw_verification(axes: Any, costs: Report) -> None:
    """The cost of verifying one to sixteen tokens."""
    axes.plot([row["tokens"] for row in costs["verify"]], [row["ratio"] for row in costs["verify"]], marker="o")
    axes.set(title="verifying n tokens at once", xlabel="n", ylabel="plain steps", ylim=(0, None))


def draw_context(axes: Any, rows: list[Report]) -> None:
    """The time of a plain step over the tokens before it, with its range."""
    tokens, middle = [row["tokens"] for row in rows], [row["median"] * 1e3 for row in rows]
    axes.plot(tokens, middle, marker="o")
    axes.fill_between(tokens, [row["fastest"] * 1e3 for row in rows], [row["slowest"] * 1e3 for row in rows], alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.set(title="a plain step as the text grows", xlabel="tokens before it", ylabel="ms", ylim=(0, None))


# The command line


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = OneLineParser(prog="benchmark.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--draft-model", metavar="DIR", help="draft with this model too, of the same vocabulary")
    parser.add_argument(
        "--against",
        type=names,
        action="extend",
        default=[],
        metavar="LIBRARY",
        help=f"measure it too: {', '.join(LIBRARIES)} (for several: a comma, or the option again)",
    )
    parser.add_argument(
        "--only", type=names, action="extend", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="about a minute: fewer prompts, tokens and repeats")
    parser.add_argument("--repeats", type=int, metavar="N", help="of every text (default: 3, quick: 1)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens of a text (default: 96, quick: 32)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto", help="default: the checkpoint's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it, as .svg or .png")
    options = parser.parse_args(arguments)
    options.only = options.only or list(SECTIONS)
    if options.repeats is None:
        options.repeats = 1 if options.quick else 3
    if options.max_new_tokens is None:
        options.max_new_tokens = 32 if options.quick else 96
    return options


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError for what can be known to be wrong before anything is loaded."""
    if options.max_new_tokens < 2 * GAMMA:
        raise InputError(f"--max-new-tokens must be at least {2 * GAMMA} to measure anything")
    if options.repeats < 1:
        raise InputError(f"--repeats must be at least 1, found {options.repeats}")
    for option, named, known in (("--against", options.against, LIBRARIES), ("--only", options.only, SECTIONS)):
        for name in named:
            if name not in known:
                raise InputError(f"{option} {name!r:.80} is unknown: give {', '.join(known)}")
    if options.against and "speed" not in options.only:
        raise InputError("--against is measured in the section speed only: add --only speed")
    for name in options.against:
        if util.find_spec(LIBRARIES[name]) is None:
            raise InputError(f"--against {name} needs a package that is not installed: pip install {PACKAGES[name]}")
    for path in filter(None, (options.json, options.plot)):
        check_place(path)
    if options.plot and options.plot.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {options.plot} must end in .svg or .png")
    if options.plot and not set(DRAWN) & set(options.only):
        raise InputError(f"--plot draws {', '.join(DRAWN)}: add one of them with --only")


def prepare(options: argparse.Namespace) -> tuple[Bench, Report]:
    """Load what is needed; the second result is the section memory, measured while the target is alone."""
    folder, device = model_folder(options.model), pick_device(options.device)
    draft_folder = model_folder(options.draft_model) if options.draft_model else None
    tokenizer, config = Tokenizer(folder), parse_config(read_json(folder / "config.json"))
    draft_config = parse_config(read_json(draft_folder / "config.json")) if draft_folder else None
    prompts = [
        (kind, text, list(*encode_prompts([text], tokenizer)))
        for kind, texts in PROMPTS.items()
        for text in (texts[:1] if options.quick else texts)
    ]
    prompt = max(len(ids) for _, _, ids in prompts)
    positions = prompt + options.max_new_tokens
    if positions > config.max_positions:
        raise InputError(
            f"a prompt of {prompt} tokens and {options.max_new_tokens} more exceed the model's context of "
            f"{config.max_positions}: lower --max-new-tokens"
        )
    dtype = DTYPES.get(options.dtype) or stored_dtype(folder)
    check_fits(estimate(config, dtype, positions, prompt=prompt, draft=draft_config, fast_on=device), device)
    bench = Bench(options, folder, accelerate(load_model(folder, dtype, device)), prompts, draft_folder)
    memory = {"memory": measure_memory(bench)} if "memory" in options.only else {}
    draft_model = None
    if draft_folder:
        draft_model = load_draft_model(draft_folder, bench.model, tokenizer.vocabulary, positions)
    bench.drafts = find_drafts(folder, bench.model, draft_model, quick=options.quick)
    return bench, memory


def describe(bench: Bench) -> Report:
    """With what was measured: machine, date, versions, sizes."""
    processor = platform.processor() or platform.machine()
    if (path := Path("/proc/cpuinfo")).exists():
        named = re.search(r"model name\s*: (.*)", path.read_text())
        processor = named[1] if named else processor
    packages = ["torch", *(PACKAGES[name] for name in bench.options.against)]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{processor}, {machine(bench.model.device)}",
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
        "model": bench.folder.name,
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "device": str(bench.model.device),
        "tokens": bench.options.max_new_tokens,
        "repeats": bench.options.repeats,
        "gamma": GAMMA,
    }


def benchmark(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    check_options(options)
    bench, memory = prepare(options)
    about = describe(bench)
    report = {"about": about} | measure(bench) | memory | {"notes": bench.notes}
    shown = Console(width=None if sys.stdout.isatty() else 170)
    for part in (f"{about['model']} in {about['dtype']}; {about['machine']}", *tables(report)):
        shown.print(part, highlight=False)
    for path, write in (
        (options.json, lambda: write_json(options.json, report)),
        (options.plot, lambda: draw(report, options.plot)),
    ):
        if path:
            try:
                write()
            except OSError as error:
                raise InputError(f"{path} cannot be written: {error.strerror}") from None


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        benchmark(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
