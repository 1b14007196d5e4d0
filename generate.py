"""Write text with a Llama or Gemma-2 checkpoint, speculatively or not: ``python generate.py "PROMPT"``."""

from __future__ import annotations

import argparse
import io
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when torch is loaded. By default its threads spin for long while they wait for each other: on a busy machine
# they so take the core from the one they wait for, and decoding was four times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch

from decoding.banned import BannedWords
from decoding.cost_file import kept_costs
from decoding.costs import CostTable, measure_costs
from decoding.drafters import Drafter, ModelDrafter, NoDraft, PromptLookup
from decoding.plan_file import DraftPlan, read_plan
from decoding.policies import AdaptiveExit, BreakEven, ConfidenceGate, FixedLength, Policy
from decoding.randomness import SeededRandomness
from decoding.rounds import Round, Statistics
from decoding.sampling import Sampler, SamplingParams
from decoding.show.labels import Labels
from decoding.show.page import Heading, Recording, render_page
from decoding.show.streaming import TextStream
from decoding.show.trace import LiveTrace, TraceConsole
from decoding.speculate import speculate
from decoding.stopping import StopRules
from model import Decoder, InputError, LayerPlan, parse_config
from model.clock import now
from model.fast import accelerate
from model.fast.graphs import GraphedDecoder
from weights.command_line import OneLineParser
from weights.device import pick_device
from weights.draft_model import load_draft_model
from weights.files import atomic_path, check_place, check_utf8, read_json
from weights.load import DTYPES, load_model, stored_dtype
from weights.memory import Memory, check_fits, estimate
from weights.names import model_folder
from weights.tokenizer import Tokenizer

DRAFTS = ("auto", "none", "lookup", "skip", "exit", "model")
DEFAULT_GAMMA = 4
WARM_UP_TOKENS = 4  # written and thrown away before --compare times anything
Reader = Callable[[Round, float], None]  # takes a round as it comes in, and the seconds decoding has taken so far


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="generate.py", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="the prompt, or give --prompt-file")
    parser.add_argument("--prompt-file", metavar="F", help="read the prompt from a file (-: standard input)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="default: if the model has a template")
    parser.add_argument("--system", metavar="S", help="system message of the chat")
    draft = parser.add_argument_group("drafting")
    draft.add_argument("--draft", choices=DRAFTS, default="auto")
    draft.add_argument("--plan", metavar="FILE", help="which sublayers --draft skip leaves out")
    draft.add_argument("--exit-layer", type=int, metavar="E", help="layers that --draft exit runs (default: half)")
    draft.add_argument("--draft-model", metavar="DIR", help="the model of --draft model")
    draft.add_argument("--gamma", type=int, metavar="N", help="tokens drafted a round, at most")
    draft.add_argument("--adaptive", action=argparse.BooleanOptionalAction, help="Draft & Verify's adaptive exit")
    draft.add_argument("--min-target-confidence", type=float, metavar="X", help="draft only while the target is sure")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    sampling.add_argument("--seed", type=int, help="same seed, draft and --gamma: same text")
    sampling.add_argument("--num-samples", type=int, default=1, metavar="N")
    sampling.add_argument("--stop", action="append", default=[], metavar="STR", help="end the text before STR")
    sampling.add_argument("--ban", action="append", default=[], metavar="WORD", help="never write WORD")
    machine = parser.add_argument_group("machine and output")
    machine.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    machine.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto", help="default: the checkpoint's")
    machine.add_argument("--dry-run", action="store_true", help="say what memory it would take, and load nothing")
    machine.add_argument("--compare", action="store_true", help="also decode plainly; print speed-up and equality")
    machine.add_argument("--trace", action="store_true", help="show drafted tokens, and which were accepted, in colour")
    machine.add_argument("--html", metavar="FILE", help="write a page that replays the run round by round")
    machine.add_argument("--json", action="store_true", help="one JSON object a sample on standard output")
    return parser.parse_args(arguments)


@dataclass
class Sample:
    """One text: what was written, how, and in what time (decoding only; the prompt's prefill is not in it)."""

    stream: TextStream
    statistics: Statistics
    finish: str
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.statistics.tokens / self.seconds if self.seconds else 0.0


class Generator:
    """A loaded model, a prompt in its cache, and a way to draft: writes texts."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Everything that can be refused is refused here, before a token is written."""
        self.options, self.params = options, sampling_params(options)
        self.text, device = read_prompt(options), pick_device(options.device)
        self.folder = model_folder(options.model)
        self.tokenizer = Tokenizer(self.folder)
        self.stop = StopRules(options.max_new_tokens, self.tokenizer.eos_ids, options.stop)
        self.prompt = encode_prompt(self.tokenizer, self.text, options)
        self.capacity = reach(self.folder, self.prompt, options.max_new_tokens)
        check_fits(needed_memory(self.folder, options, device, self.capacity, len(self.prompt)), device)
        self.model = accelerate(load_model(self.folder, DTYPES.get(options.dtype), device))
        self.seed = secrets.randbelow(2**32) if options.seed is None else options.seed % 2**64
        self.cache = self.model.new_cache(self.capacity)
        self.drafter, self.new_policy, self.how = build_drafting(self)
        self.labels = Labels(
            self.tokenizer.token_bytes, {token: name for name, token in self.tokenizer.vocabulary.special.items()}
        )
        with torch.inference_mode():
            self.model.prefill(torch.tensor([self.prompt[:-1]], dtype=torch.int64, device=device), self.cache)

    def write(
        self,
        drafter: Drafter,
        policy: Policy,
        stop: StopRules,
        randomness: SeededRandomness,
        show: Callable[[str], None],
        readers: Sequence[Reader] = (),
        details: bool = False,
    ) -> Sample:
        """Write one text, handing its pieces to ``show`` and its rounds to ``readers``, with details if asked for.

        Ctrl-C ends it early, with finish "interrupted". What ``show`` and the readers take is not decoding time.
        """
        banned = BannedWords(self.options.ban, self.model.vocab_size) if self.options.ban else None
        sampler = Sampler(self.params, (banned.allowed,) if banned else ())
        stream = TextStream(self.prompt, self.tokenizer.token_bytes, stop, banned)
        sample = Sample(stream, Statistics(), "interrupted", 0.0)
        rounds = speculate(
            self.model,
            self.cache,
            self.prompt,
            drafter,
            policy,
            sampler,
            stop,
            randomness,
            token_bytes=self.tokenizer.token_bytes,
            banned=banned,
            details=details,
        )
        try:
            with closing(rounds):
                began = now(self.model.device)  # once the prompt's prefill is done
                for round in rounds:
                    sample.seconds += time.perf_counter() - began
                    sample.statistics.add(round)
                    sample.finish = round.finish or sample.finish
                    show(stream.push(round))
                    for read in readers:
                        read(round, sample.seconds)
                    began = time.perf_counter()
        except KeyboardInterrupt:
            show(stream.flush())
        except InputError:
            show(stream.flush() + "\n")
            raise
        return sample

    def warm_up(self) -> None:
        """Write a few tokens, with the draft and without, to be thrown away before anything is timed."""
        policy, randomness = self.new_policy(), SeededRandomness(self.seed, self.model.device)
        stop = StopRules(max(WARM_UP_TOKENS, policy.gamma + 2))  # a draft of full length too, and one token after it
        self.write(self.drafter, policy, stop, randomness, lambda _: None)
        self.write_plainly(stop)

    def write_plainly(self, stop: StopRules) -> Sample:
        """The same request without a draft, silently: what --compare measures against."""
        plain, randomness = (
            NoDraft(self.model.vocab_size, self.model.device),
            SeededRandomness(self.seed, self.model.device),
        )
        sample = self.write(plain, FixedLength(0), stop, randomness, lambda _: None)
        if sample.finish == "interrupted":
            raise KeyboardInterrupt
        return sample


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The sampling options as a value. Raises InputError for one outside its range."""
    return SamplingParams(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty)


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError for a value out of range, and for an option that the chosen draft would ignore."""
    for name, values in (("--system", [options.system or ""]), ("--stop", options.stop), ("--ban", options.ban)):
        for value in values:
            check_utf8(name, value)
    sampling_params(options)
    StopRules(options.max_new_tokens, stop_strings=options.stop)
    BannedWords(options.ban, vocab_size=0)
    if options.num_samples < 1:
        raise InputError(f"--num-samples must be at least 1, found {options.num_samples}")
    policy = FixedLength(options.gamma or 0)
    if options.min_target_confidence is not None:
        ConfidenceGate(policy, options.min_target_confidence)
    drafting = [kind for kind in DRAFTS if kind != "none"]
    useful_with = {
        "plan": ["skip", "auto"],
        "exit_layer": ["exit"],
        "draft_model": ["model"],
        "gamma": drafting,
        "adaptive": drafting,
        "min_target_confidence": drafting,
    }
    for name, kinds in useful_with.items():
        if getattr(options, name) is not None and options.draft not in kinds:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} has no effect with --draft {options.draft}: give --draft {kinds[0]}")
    if options.draft == "model" and options.draft_model is None:
        raise InputError("--draft model needs --draft-model DIR")
    if options.html is not None:
        check_place(Path(options.html))


def reach(folder: Path, prompt: list[int], max_new_tokens: int) -> int:
    """Prompt and output in tokens, at most. Raises InputError when the prompt does not fit the model."""
    config = parse_config(read_json(folder / "config.json"))
    if len(prompt) >= config.max_positions:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, the model's context {config.max_positions}: shorten the prompt"
        )
    if not prompt or max(prompt) >= config.vocab_size:
        raise InputError(f"{folder}: the tokenizer does not belong to this model: it gives ids that the model lacks")
    return min(len(prompt) + max_new_tokens, config.max_positions)


def needed_memory(
    folder: Path, options: argparse.Namespace, device: torch.device, positions: int | None, prompt: int
) -> Memory:
    """The estimate for ``positions`` tokens (None: the model's whole context) of which ``prompt`` are given."""
    config = parse_config(read_json(folder / "config.json"))
    draft = None
    if options.draft == "model" and options.draft_model is not None:
        draft = parse_config(read_json(model_folder(options.draft_model) / "config.json"))
    positions = config.max_positions if positions is None else positions
    dtype = DTYPES.get(options.dtype) or stored_dtype(folder)
    return estimate(config, dtype, positions, prompt=prompt, draft=draft, fast_on=device)


def dry_run(options: argparse.Namespace) -> int:
    """Print what memory the request would take; with no prompt, at the model's whole context."""
    device, folder = pick_device(options.device), model_folder(options.model)
    positions, prompt = None, 1
    if options.prompt is not None or options.prompt_file is not None:
        ids = encode_prompt(Tokenizer(folder), read_prompt(options), options)
        positions, prompt = reach(folder, ids, options.max_new_tokens), len(ids)
    print(check_fits(needed_memory(folder, options, device, positions, prompt), device))
    return 0


def read_prompt(options: argparse.Namespace) -> str:
    """The prompt's text. Raises InputError when it is missing, given twice, empty or not readable as UTF-8."""
    if (options.prompt is None) == (options.prompt_file is None):
        raise InputError("give one prompt: as an argument, or with --prompt-file")
    text = options.prompt
    if text is None:
        try:
            text = sys.stdin.read() if options.prompt_file == "-" else Path(options.prompt_file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{options.prompt_file} cannot be read as UTF-8 text: {error}") from None
    check_utf8("prompt", text)
    if not text.strip():
        raise InputError("the prompt is empty: give it at least one character")
    return text


def encode_prompt(tokenizer: Tokenizer, text: str, options: argparse.Namespace) -> list[int]:
    """Token ids of the prompt, as a chat turn or as plain text. Raises InputError for --system without a chat."""
    chat = options.chat if options.chat is not None else tokenizer.chat_template is not None
    if not chat:
        if options.system is not None:
            raise InputError("--system needs a chat: leave out --no-chat, or use a model with a chat template")
        return tokenizer.encode(text)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return tokenizer.encode_chat([*system, {"role": "user", "content": text}])


def build_drafting(generator: Generator) -> tuple[Drafter, Callable[[], Policy], str]:
    """The drafter, a maker of fresh policies, and a few words that say what was chosen."""
    options, model = generator.options, generator.model
    kind, chosen = options.draft, None
    if kind in ("skip", "auto"):
        chosen = find_plan(generator)
        off = chosen is not None and chosen.gamma == 0 and options.gamma is None
        if kind == "auto":
            kind = "lookup" if chosen is None or off else "skip"
        elif off:
            return NoDraft(model.vocab_size, model.device), lambda: FixedLength(0), "plain: by the plan, no draft pays"
    if kind == "none":
        return NoDraft(model.vocab_size, model.device), lambda: FixedLength(0), "plain"
    if kind == "lookup":
        drafter: Drafter = PromptLookup(model.vocab_size, model.device)
        return drafter, policy_maker(generator, None, None, None), "prompt lookup"
    if kind == "model":
        folder = model_folder(options.draft_model)
        draft_model = load_draft_model(folder, model, generator.tokenizer.vocabulary, generator.capacity)
        cache = draft_model.new_cache(generator.capacity)
        with torch.inference_mode():
            draft_model.prefill(torch.tensor([generator.prompt[:-1]], dtype=torch.int64, device=model.device), cache)
        drafter = ModelDrafter(draft_model, cache, keep_raw=options.html is not None)
        return drafter, policy_maker(generator, draft_model, None, chosen), f"draft model {folder.name}"
    if chosen is not None:
        plan = chosen.plan
        how = f"skipping {len(plan.skipped_attention)} attention and {len(plan.skipped_mlp)} MLP sublayers"
    else:
        exit_layer = max(1, model.num_layers // 2) if options.exit_layer is None else options.exit_layer
        plan = LayerPlan.early_exit(model.num_layers, exit_layer)
        how = f"exit at layer {exit_layer} of {model.num_layers}"
    drafter = ModelDrafter(model, generator.cache, plan, keep_raw=options.html is not None)
    return drafter, policy_maker(generator, model, plan, chosen), how


def find_plan(generator: Generator) -> DraftPlan | None:
    """The plan of --plan, else the model folder's own. Raises InputError when --draft skip has neither."""
    own_plan = generator.folder / "plan.json"
    if generator.options.plan is None and not own_plan.exists():
        if generator.options.draft == "skip":
            raise InputError(f"--draft skip needs --plan FILE: {generator.folder} has no plan.json of its own")
        return None
    path = own_plan if generator.options.plan is None else Path(generator.options.plan)
    return read_plan(path, generator.model.num_layers, generator.folder)


def policy_maker(
    generator: Generator, draft_model: Decoder | None, plan: LayerPlan | None, chosen: DraftPlan | None
) -> Callable[[], Policy]:
    """How long to draft, from the options: --adaptive, else --gamma, else break-even (auto), else the plan's."""
    options = generator.options
    chosen = chosen or DraftPlan(LayerPlan.full(generator.model.num_layers))
    gamma = chosen.gamma if options.gamma is None else options.gamma
    costs: CostTable | None = None

    def measure() -> CostTable:
        print("[measuring once what drafts cost on this machine]", file=sys.stderr)
        return measure_costs(generator.model, draft_model, plan, generator.params)

    if options.draft == "auto" and not options.adaptive and options.gamma is None:
        costs = kept_costs(
            generator.folder,
            generator.model,
            plan,
            generator.params,
            measure,
        )

    def make() -> Policy:
        if costs is not None:
            policy: Policy = BreakEven(costs)
        elif options.adaptive:
            start = chosen.threshold or (0.5 if options.temperature else 0.8)
            policy = AdaptiveExit(start, longest=8 if gamma is None else gamma)
        elif options.adaptive is None and options.gamma is None:
            policy = chosen.new_policy(DEFAULT_GAMMA)
        else:
            policy = FixedLength(DEFAULT_GAMMA if gamma is None else gamma)
        gate = options.min_target_confidence
        return policy if gate is None else ConfidenceGate(policy, gate)

    make()  # refuse wrong values now
    return make


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the text
    try:
        return run(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(options: argparse.Namespace) -> int:
    """Everything after the arguments are parsed; returns the exit status."""
    check_options(options)
    if options.dry_run:
        return dry_run(options)
    generator = Generator(options)
    if options.compare:
        generator.warm_up()
    results: list[dict[str, Any]] = []
    recordings: list[Recording] = []
    try:
        write_samples(generator, results, recordings)
    finally:  # what is complete is printed, whatever ends the rest
        if options.json:
            for result in results:
                print(json.dumps(result, ensure_ascii=False))
        if options.html is not None and recordings:
            write_page(generator, recordings)
    return 130 if results[-1]["finish_reason"] == "interrupted" else 0


def write_samples(generator: Generator, results: list[dict[str, Any]], recordings: list[Recording]) -> None:
    """Stream every sample with its line of statistics, adding each to ``results`` once it is written.

    ``recordings`` takes the rounds of every sample as they come in, the one that is broken off included.
    """
    options = generator.options
    out = sys.stderr if options.json else sys.stdout
    randomness = SeededRandomness(generator.seed, generator.model.device)

    def show(piece: str) -> None:
        print(piece, end="", file=out, flush=True)

    for number in range(options.num_samples):
        if number:
            print("-" * 20, file=out)
        policy = generator.new_policy()
        recordings.append(Recording(policy))
        with ExitStack() as views:
            pieces, readers = show, [recordings[-1].add]
            if options.trace:
                trace = views.enter_context(LiveTrace(TraceConsole(file=out), generator.labels, policy))
                pieces, readers = lambda _: None, [*readers, trace.add]
            details = options.html is not None
            sample = generator.write(
                generator.drafter, policy, generator.stop, randomness, pieces, readers, details=details
            )
        if not options.trace:
            print(file=out)
        print(describe(sample, generator), file=sys.stderr)
        results.append(as_json(sample))
        if sample.finish == "interrupted":
            break
        if options.compare and number == 0:
            print(compare(sample, generator), file=sys.stderr)


def write_page(generator: Generator, recordings: list[Recording]) -> None:
    """Write the page of --html. Raises InputError when the file cannot be written after all."""
    path, drafter = Path(generator.options.html), generator.drafter
    sampling = sampling_in_words(generator.params, generator.seed)
    facts = [("Model", generator.folder.name), ("Draft", generator.how), ("Sampling", sampling)]
    plan = drafter.plan if isinstance(drafter, ModelDrafter) else None
    heading = Heading(generator.text, facts, plan, greedy=generator.params.temperature == 0)
    page = render_page(heading, recordings, generator.labels)
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    print(f"[the run round by round: {path}]", file=sys.stderr)


def sampling_in_words(params: SamplingParams, seed: int) -> str:
    """The parameters that are in force, and the seed unless decoding is greedy."""
    filters = {"top-k": (params.top_k, 0), "top-p": (params.top_p, 1), "min-p": (params.min_p, 0)}
    in_force = {name: value for name, (value, off) in filters.items() if value != off} if params.temperature else {}
    if params.repetition_penalty != 1:
        in_force["repetition penalty"] = params.repetition_penalty
    words = [f"temperature {params.temperature:g}" if params.temperature else "greedy"]
    words += [f"{name} {value:g}" for name, value in in_force.items()]
    return ", ".join([*words, f"seed {seed}"] if params.temperature else words)


def describe(sample: Sample, generator: Generator) -> str:
    """The line of statistics."""
    s = sample.statistics
    line = f"[{s.tokens} tokens in {sample.seconds:.2f} s: {sample.tokens_per_second:.1f} tokens/s; {generator.how}"
    if s.acceptance_rate is not None:
        line += f": {s.acceptance_rate:.0%} of {s.drafted} drafted tokens accepted"
    line += f", {s.tokens_per_round:.2f} tokens a round"
    if isinstance(generator.model, GraphedDecoder) and generator.model.trouble:
        line += f"; without CUDA graphs ({generator.model.trouble})"
    return line + (f"; seed {generator.seed}]" if generator.params.temperature else "]")


def as_json(sample: Sample) -> dict[str, Any]:
    """The object that --json prints."""
    s = sample.statistics
    return {
        "text": sample.stream.text,
        "tokens": sample.stream.tokens,
        "prompt_tokens": sample.stream.transcript.prompt_length,
        "finish_reason": sample.finish,
        "seconds": sample.seconds,
        "tokens_per_second": sample.tokens_per_second,
        "rounds": s.rounds,
        "drafted": s.drafted,
        "accepted": s.accepted,
        "acceptance_rate": s.acceptance_rate,
        "tokens_per_round": s.tokens_per_round,
        "accepted_histogram": s.histogram,
    }


def compare(sample: Sample, generator: Generator) -> str:
    """Decode the same request plainly and say how much faster speculation was and, when greedy, if texts agree."""
    plain = generator.write_plainly(generator.stop)
    line = (
        f"[plain decoding: {plain.statistics.tokens} tokens, {plain.tokens_per_second:.1f} tokens/s; "
        f"speed-up {sample.tokens_per_second / plain.tokens_per_second:.2f}x"
    )
    if generator.params.temperature:
        return line + "]"
    ours, theirs = sample.stream.tokens, plain.stream.tokens
    if ours == theirs:
        return line + "; greedy texts are equal]"
    if generator.params.repetition_penalty != 1 or generator.options.ban:
        return line + "; greedy texts differ]"  # what decided was not the raw logits
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    gap = logit_gap(generator, theirs[:at], ours[at : at + 1] + theirs[at : at + 1])
    return line + f"; greedy texts differ from token {at} on, where the two logits are {gap:.3g} apart]"


def logit_gap(generator: Generator, common: list[int], two: list[int]) -> float:
    """How far apart plain decoding's logits of two candidate tokens lie after the common text."""
    model, tokens = generator.model, [*generator.prompt, *common]
    with torch.inference_mode():
        cache = model.new_cache(len(tokens))
        ids = torch.tensor([tokens], device=model.device)
        model.prefill(ids[:, :-1], cache)
        logits = model(ids[:, -1:], cache, len(tokens) - 1)[0, -1, two].float()
    return (logits.max() - logits.min()).item()


if __name__ == "__main__":
    sys.exit(main())
