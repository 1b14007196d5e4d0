"""Write a corpus to train on with a chat model: ``python -m decoding.corpus --model DIR --tokens N --out FILE``."""

from __future__ import annotations

if __name__ == "__main__":  # before anything that takes long to import
    from weights.cli.start import start

    start()

import argparse
import random
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from decoding.corpus.author import Author, user_turn
from decoding.corpus.quality import worth_learning
from decoding.corpus.text_file import KINDS, TextFile, read_texts
from decoding.sampling import SamplingParams
from model import InputError
from model.fast import accelerate
from weights.cli.command_line import OneLineParser, run_command
from weights.cli.device import keep_freed_memory, pick_device
from weights.load import DTYPES, load_model, model_folder
from weights.tokenizer import Tokenizer

FRUITLESS_ROWS = 256  # rows without a new text, after which the command ends


def write_file(author: Author, file: TextFile, options: argparse.Namespace) -> None:
    """Add batches of texts to ``file`` until its responses have ``options.tokens`` tokens, under a progress bar.

    A batch depends on the seed and on the contents of the file only, so that a run that was killed continues to the
    same file. Raises InputError when the model writes nothing new any more.
    """
    columns = BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=options.tokens, completed=file.tokens.total())
        fruitless = 0  # rows since the last new text
        while (missing := options.tokens - file.tokens.total()) > 0:
            if fruitless >= FRUITLESS_ROWS:
                raise InputError(
                    f"the last {fruitless} texts were all empty, unusable or in {file.path} already: raise "
                    "--temperature or --top-k"
                )
            kinds = KINDS if options.kind == "both" else (options.kind,)
            kind = min(kinds, key=lambda kind: file.tokens[kind])
            rows, texts = min(options.batch, 1 + missing // options.max_new_tokens), len(file.texts)
            file.add(author.write(kind, rows, random.Random(f"{options.seed} {texts} {fruitless}")))
            fruitless = 0 if len(file.texts) > texts else fruitless + rows
            progress.update(bar, completed=file.tokens.total())


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m decoding.corpus", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    add("--tokens", type=int, required=True, metavar="N", help="tokens of responses wanted in the file")
    add("--out", type=Path, required=True, metavar="FILE", help=".jsonl; an earlier one is continued")
    add("--judge-again", type=Path, metavar="FILE", help="begin with the good texts of an earlier file (default: none)")
    add("--kind", choices=[*KINDS, "both"], default="both", help="children's stories, or chats")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: greedy")
    add("--top-k", type=int, default=80, metavar="K", help="0: off")
    add("--max-new-tokens", type=int, default=320, metavar="N", help="of a response")
    add("--batch", type=int, default=128, metavar="B", help="texts at a time; fewer take less memory")
    add("--seed", type=int, default=0, metavar="S", help="same seed: same texts")
    add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    add("--dtype", choices=[*DTYPES, "auto"], default="auto", help="default: the checkpoint's")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Check the options, load the model, and write the file."""
    for name in ("tokens", "batch", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, found {getattr(options, name)}")
    params = SamplingParams(options.temperature, options.top_k)
    folder, device = model_folder(options.model), pick_device(options.device)
    tokenizer = Tokenizer(folder)
    if options.kind != "story":
        user_turn(tokenizer)
    file = TextFile(options.out, lambda text: len(tokenizer.vocabulary.encode(text)))
    if options.judge_again and not file.texts:
        file.add(filter(None, map(worth_learning, read_texts(options.judge_again))))
    keep_freed_memory()
    model = accelerate(load_model(folder, DTYPES.get(options.dtype), device))
    write_file(Author(model, tokenizer, params, options.max_new_tokens), file, options)
    print(f"{file.path}: {len(file.texts)} texts, {file.tokens.total()} tokens", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    interrupted = "interrupted: the file holds whole texts; run the same command again to continue"
    return run_command(lambda: run(parse_arguments(arguments)), interrupted)


if __name__ == "__main__":
    sys.exit(main())
