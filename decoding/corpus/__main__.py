"""A chat model writes a corpus to train on: ``python -m decoding.corpus --model DIR --tokens N --out FILE``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from decoding.corpus.author import Author, UserTurn
from decoding.corpus.batch import BATCH
from decoding.corpus.quality import worth_learning
from decoding.corpus.text_file import KINDS, TextFile
from decoding.sampling import SamplingParams
from model import InputError
from model.fast import accelerate
from model.layers import wide_dtype
from weights.cli.command_line import OneLineParser, run_command
from weights.cli.device import keep_freed_memory, pick_device
from weights.load import DTYPES, load_model, read_config, stored_dtype
from weights.memory import LOGIT_COPIES, Memory, cache_bytes, free_bytes, layer_bytes, weight_bytes
from weights.names import model_folder
from weights.tokenizer import Tokenizer

PROMPT_TOKENS = 256  # of a prompt with its template: a generous guess, for the memory estimate only
FRUITLESS_ROWS = 256  # after so many rows without a new text, no new one is to be expected


class Bar:
    """A progress bar on standard error: tokens of the file, those being written included, and their rate."""

    def __init__(self, total: int, done: int) -> None:
        self.progress = Progress(
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens, {task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.task = self.progress.add_task("", total=total, completed=done, rate=0.0)
        self.written, self.began = 0, time.perf_counter()

    def advance(self, count: int) -> None:
        """So many tokens were written, of which none may stay: the file has the last word."""
        self.written += count
        self.progress.update(self.task, advance=count, rate=self.written / (time.perf_counter() - self.began))

    def settle(self, tokens: int) -> None:
        """So many tokens are in the file."""
        self.progress.update(self.task, completed=tokens)


def write_file(author: Author, file: TextFile, options: argparse.Namespace, bar: Bar) -> None:
    """Add batches of texts to ``file`` until its responses have ``options.tokens`` tokens.

    What a batch is made of depends on the seed and on what the file holds, nothing else. So a killed run goes
    on as if nothing had been, and no batch is like an earlier one: that one found fewer lines in the file.
    Raises InputError when the model writes nothing new any more.
    """
    fruitless = 0  # rows since the last new text
    while (missing := options.tokens - file.total_tokens) > 0:
        if fruitless >= FRUITLESS_ROWS:
            raise InputError(
                f"the last {fruitless} texts were all empty, unusable or in {file.path} already: raise --temperature "
                "or --top-k"
            )
        kinds = KINDS if options.kind == "both" else (options.kind,)
        kind = min(kinds, key=lambda kind: file.tokens[kind])
        rows, lines = min(options.batch, 1 + missing // options.max_new_tokens), file.lines
        file.append(author.write(kind, rows, random.Random(f"{options.seed} {lines} {fruitless}")))
        bar.settle(file.total_tokens)
        fruitless = 0 if file.lines > lines else fruitless + rows


def check_fits(folder: Path, options: argparse.Namespace, device: torch.device) -> None:
    """Raises InputError when the batch needs more memory than is free on the device."""
    config = read_config(folder)
    dtype = DTYPES.get(options.dtype) or stored_dtype(folder)
    positions = min(PROMPT_TOKENS + options.max_new_tokens, config.max_positions)
    prefill = layer_bytes(config, dtype, min(PROMPT_TOKENS, positions), 0)
    logits = config.vocab_size * LOGIT_COPIES * wide_dtype(dtype).itemsize
    memory = Memory(
        weights=weight_bytes(config, dtype),
        cache=options.batch * cache_bytes(config, dtype, positions),
        workspace=options.batch * max(prefill, logits),
        positions=positions,
    )
    free = free_bytes(device)
    if memory.total > free:
        raise InputError(f"a batch of {options.batch} does not fit on {device}: {memory.describe(free)}; lower --batch")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m decoding.corpus", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="tokens of responses wanted in the file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".jsonl; an earlier one is continued")
    parser.add_argument(
        "--judge-again",
        type=Path,
        metavar="FILE",
        help="begin with the good texts of an earlier file (default: none)",
    )
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="both", help="children's stories, or its own chats")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: greedy")
    parser.add_argument("--top-k", type=int, default=80, metavar="K", help="0: off")
    parser.add_argument("--max-new-tokens", type=int, default=320, metavar="N", help="of a response")
    parser.add_argument("--batch", type=int, default=BATCH, metavar="B", help="texts at a time")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed: same texts")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto", help="default: the checkpoint's")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Everything after the arguments are parsed. What can be refused is refused before the weights are loaded."""
    for name in ("tokens", "batch", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, found {getattr(options, name)}")
    params = SamplingParams(options.temperature, options.top_k)
    folder, device = model_folder(options.model), pick_device(options.device)
    tokenizer = Tokenizer(folder)
    if options.kind != "story":
        UserTurn.of(tokenizer)
    check_fits(folder, options, device)
    file = TextFile(options.out, lambda text: len(tokenizer.vocabulary.encode(text, parse_special=False)))
    keep_freed_memory()
    model = accelerate(load_model(folder, DTYPES.get(options.dtype), device))
    if options.judge_again and not file.lines:
        file.take(options.judge_again, worth_learning)
    bar = Bar(options.tokens, file.total_tokens)
    author = Author(model, tokenizer, params, options.max_new_tokens, bar.advance)
    with bar.progress:
        write_file(author, file, options, bar)
    print(f"{file.path}: {file.lines} texts, {file.total_tokens} tokens", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    interrupted = "interrupted: the file holds whole texts; run the same command again to continue"
    return run_command(lambda: run(parse_arguments(arguments)), interrupted)


if __name__ == "__main__":
    sys.exit(main())
