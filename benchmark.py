"""Measure decoding speed: every way of drafting beside plain decoding and transformers, in one run.

``python benchmark.py --quick`` takes a minute or two. Contenders take turns on each prompt, so that a slow
spell of the machine hits all alike; what counts are the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from decoding.costs import CostTable, measure_costs, predicted_speedup
from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.policies import BreakEven, FixedLength, Policy
from decoding.randomness import SeededRandomness
from decoding.rounds import Round, Statistics
from decoding.sampling import Sampler
from decoding.speculate import speculate
from decoding.stopping import StopRules
from model import Decoder, InputError, KVCache, LayerPlan
from model.fast import accelerate
from search.prompts import PROMPTS
from weights.device import pick_device
from weights.files import write_json
from weights.load import DTYPES, load_model
from weights.names import model_folder
from weights.plan_file import read_plan
from weights.tokenizer import Tokenizer

GAMMA = 4
LONGEST_VERIFICATION = 16
WARM_UP_TOKENS = 8
BANDWIDTH_BYTES = 1 << 28


@dataclass
class Result:
    """What one contender did: seconds and tokens of each run, keyed by (kind of prompt, prompt)."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    texts: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)
    looked_at: int = 0  # drafted tokens that verification came to: the accepted ones and each first rejected one

    @property
    def kept_share(self) -> float:
        """The chance that a drafted token is kept once it is looked at: what the formula calls α."""
        return self.statistics.accepted / self.looked_at if self.looked_at else 0.0

    def add(self, round: Round) -> None:
        self.statistics.add(round)
        self.looked_at += round.accepted + (round.accepted < len(round.drafted))


# (prompt, how many tokens to write) -> the tokens, and the rounds they came in where there are any
Write = Callable[[list[int], int], tuple[list[int], list[Round]]]


def our_contender(
    model: Decoder, make_drafter: Callable[[KVCache], Drafter], make_policy: Callable[[], Policy]
) -> Write:
    """Greedy decoding by our loop, the prompt's prefill included, end-of-text ignored."""

    def write(prompt: list[int], count: int) -> tuple[list[int], list[Round]]:
        cache = model.new_cache(len(prompt) + count)
        with torch.inference_mode():
            model.prefill(torch.tensor([prompt[:-1]], device=model.device), cache)
        drafter, randomness = make_drafter(cache), SeededRandomness(0, model.device)
        rounds = list(speculate(model, cache, prompt, drafter, make_policy(), Sampler(), StopRules(count), randomness))
        return [token for round in rounds for token in round.emitted], rounds

    return write


def transformers_contender(folder: Path, model: Decoder, **options: object) -> Write:
    """Greedy ``generate`` of transformers on the same checkpoint, dtype and device."""
    try:
        import transformers
    except ImportError:
        raise InputError("--against transformers needs that package: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device)
    theirs.generation_config.eos_token_id = None  # end-of-text is ignored, as in our contenders

    def write(prompt: list[int], count: int) -> tuple[list[int], list[Round]]:
        ids = torch.tensor([prompt], device=model.device)
        written = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            **options,
        )
        return written[0, len(prompt) :].tolist(), []

    return write


def contenders(folder: Path, model: Decoder, costs: dict[str, CostTable], against: str | None) -> dict[str, Write]:
    """Every way of decoding that this model and machine allow, by name."""
    layers = model.num_layers
    plans = {f"exit {layer}": LayerPlan.early_exit(layers, layer) for layer in (layers // 2, layers * 4 // 5)}
    if (folder / "plan.json").exists():
        plans["plan.json"] = read_plan(folder / "plan.json", layers).plan
    found = {
        "plain": our_contender(model, lambda cache: NoDraft(model.vocab_size, model.device), lambda: FixedLength(0)),
        "lookup": our_contender(
            model, lambda cache: PromptLookup(model.vocab_size, model.device), lambda: FixedLength(GAMMA)
        ),
    }
    for name, plan in plans.items():
        found[name] = our_contender(
            model, lambda cache, plan=plan: ModelDrafter(model, cache, plan), lambda: FixedLength(GAMMA)
        )
        costs[name] = measure_costs(model, model, plan, longest=GAMMA)
    found["auto"] = our_contender(
        model, lambda cache: PromptLookup(model.vocab_size, model.device), lambda: BreakEven(costs["lookup"])
    )
    if against == "transformers":
        found["transformers"] = transformers_contender(folder, model)
        found["transformers, prompt lookup"] = transformers_contender(folder, model, prompt_lookup_num_tokens=GAMMA)
    return found


def run(
    found: dict[str, Write], prompts: list[tuple[str, str, list[int]]], count: int, repeats: int, console: Console
) -> dict[str, Result]:
    """Every contender on every prompt, in turns, after one warm-up each."""
    results = {name: Result() for name in found}
    for write in found.values():
        write(prompts[0][2], WARM_UP_TOKENS)
    turns = [(repeat, prompt) for repeat in range(repeats) for prompt in prompts]
    for _, (kind, text, ids) in track(turns, "measuring", console=console, transient=True):
        for name, write in found.items():
            began = time.perf_counter()
            tokens, rounds = write(ids, count)
            results[name].seconds.setdefault((kind, text), []).append(time.perf_counter() - began)
            results[name].texts[kind, text] = tokens
            for round in rounds:
                results[name].add(round)
    return results


def speedups(result: Result, plain: Result, kind: str | None = None) -> list[float]:
    """Plain's median time over this one's, prompt by prompt."""
    return [
        statistics.median(plain.seconds[key]) / statistics.median(times)
        for key, times in result.seconds.items()
        if kind is None or key[0] == kind
    ]


def speed_table(results: dict[str, Result], count: int, costs: dict[str, CostTable]) -> Table:
    """Medians over the prompts; speed-ups also by kind of prompt, and as predicted from acceptance and costs."""
    plain = results["plain"]
    kinds = list(dict.fromkeys(kind for kind, _ in plain.seconds))
    table = Table(title=f"{count} greedy tokens a prompt, prefill included")
    for heading in ("decoder", "tokens/s", "speed-up", "predicted", "accepted", "a round", "equal", *kinds):
        table.add_column(heading, justify="left" if heading == "decoder" else "right")
    for name, result in results.items():
        rates = sorted(count / statistics.median(times) for times in result.seconds.values())
        equal = sum(result.texts[key] == plain.texts[key] for key in plain.texts)
        sums = result.statistics
        acceptance = sums.acceptance_rate
        predicted = ""
        if name in costs and costs[name].draft and acceptance is not None:  # a lookup does not always find a draft
            predicted = f"{predicted_speedup(result.kept_share, GAMMA, costs[name]):.2f}"
        table.add_row(
            name,
            f"{statistics.median(rates):.1f} ({rates[0]:.1f}-{rates[-1]:.1f})",
            f"{statistics.median(speedups(result, plain)):.2f}",
            predicted,
            "" if acceptance is None else f"{acceptance:.0%}",
            f"{sums.tokens_per_round:.2f}" if sums.rounds else "",
            f"{equal}/{len(plain.texts)}",
            *(f"{statistics.median(speedups(result, plain, kind)):.2f}" for kind in kinds),
        )
    return table


def cost_table(costs: dict[str, CostTable]) -> Table:
    """Costs in plain steps, as the loop pays them."""
    verification = costs["lookup"].verify
    table = Table(title="cost in plain decoding steps")
    table.add_column("what")
    table.add_column("cost", justify="right")
    for name, each in costs.items():
        if each.draft:
            table.add_row(f"draft step, {name}", f"{each.draft:.2f}")
    for tokens, cost in enumerate(verification, start=1):
        if tokens in (1, 2, 3, 4, 5, 6, 8, 12, 16):
            table.add_row(f"verifying {tokens} tokens", f"{cost:.2f}")
    return table


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory."""
    block = torch.ones(BANDWIDTH_BYTES // 4)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - began)
    return BANDWIDTH_BYTES / statistics.median(times[1:])


def floor(folder: Path, model: Decoder) -> str:
    """The fastest that plain decoding could be here: one reading of the weights a token."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if model.device.type != "cpu":
        return f"weights: {size / 1e6:.0f} MB"
    bandwidth = read_bandwidth()
    return (
        f"weights: {size / 1e6:.0f} MB; memory read at {bandwidth / 1e9:.0f} GB/s with {torch.get_num_threads()} "
        f"threads; so at most {bandwidth / size:.0f} plain tokens/s"
    )


def measure(options: argparse.Namespace) -> None:
    console = Console(stderr=True)
    if options.max_new_tokens < 2 * GAMMA:
        raise InputError(f"--max-new-tokens must be at least {2 * GAMMA} to measure anything")
    if options.repeats < 1:
        raise InputError(f"--repeats must be at least 1, found {options.repeats}")
    if options.json and not options.json.parent.is_dir():
        raise InputError(f"--json: the folder {options.json.parent} does not exist")
    folder, device = model_folder(options.model), pick_device(options.device)
    tokenizer = Tokenizer(folder)
    model = accelerate(load_model(folder, DTYPES.get(options.dtype), device))
    chat = tokenizer.chat_template is not None
    prompts = [
        (kind, text, tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text))
        for kind, texts in PROMPTS.items()
        for text in (texts[:1] if options.quick else texts)
    ]
    costs = {"lookup": measure_costs(model, None, None, longest=LONGEST_VERIFICATION - 1)}
    found = contenders(folder, model, costs, options.against)
    results = run(found, prompts, options.max_new_tokens, 1 if options.quick else options.repeats, console)
    shown = Console(width=None if sys.stdout.isatty() else 150)
    shown.print(speed_table(results, options.max_new_tokens, costs))
    shown.print(cost_table(costs))
    shown.print(floor(folder, model))
    if options.json:
        medians = {
            name: {f"{kind}: {text}": statistics.median(times) for (kind, text), times in result.seconds.items()}
            for name, result in results.items()
        }
        costs_found = {name: asdict(table) for name, table in costs.items()}
        try:
            write_json(options.json, {"tokens": options.max_new_tokens, "seconds": medians, "costs": costs_found})
        except OSError as error:
            raise InputError(f"{options.json} cannot be written: {error.strerror}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--quick", action="store_true", help="one prompt of each kind, one repeat")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--against", choices=["transformers"], help="measure this library too, if it is installed")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured")
    options = parser.parse_args(arguments)
    try:
        measure(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
