"""Measure the speed of decoding on this machine: every way of drafting, other libraries, and single steps.

``python -m benchmark --quick`` takes about a minute on two idle cores, and another minute for each ``--against``.
Contenders take turns, so that a busy moment of the machine slows all alike. Only ratios can be compared.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything that takes long to import
    from weights.cli.start import start

    start()

import argparse
import os
import platform
import random
import sys
from datetime import datetime, timezone
from functools import partial
from importlib import metadata, util
from pathlib import Path

from rich.console import Console

from benchmark.contenders import Bench, Prompt, model_drafts
from benchmark.libraries import LIBRARIES, library_contenders
from benchmark.off_grid import off_grid_folder
from benchmark.sections import SECTIONS
from decoding.corpus.templates import story_prompt
from decoding.run.chooser import GAMMA, Setting
from decoding.run.cost_file import machine
from decoding.sampling import SamplingParams
from model import InputError
from model.fast import accelerate
from search.prompts import PROMPTS
from weights.cli.command_line import OneLineParser, run_command, say
from weights.cli.device import pick_device
from weights.cli.files import check_place, write_json
from weights.cli.prompt import encode_prompt
from weights.cli.table import table
from weights.load import DTYPES, load_model, model_folder, read_config, stored_dtype
from weights.memory import check_fits, estimate
from weights.tokenizer import Tokenizer

PACKAGES = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}  # --against -> the package it needs
COMPARED, DRAWN = ("speed", "first-token"), ("speed", "costs", "context")  # sections of --against, of --plot
STORIES = 24


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    names = partial(str.split, sep=",")
    parser = OneLineParser(prog="python -m benchmark", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    add("--draft-model", metavar="DIR", help="also draft with this model, of the same vocabulary")
    add("--exit-layer", type=int, nargs="+", metavar="N", help="exits to draft with (default: middle and late ones)")
    libraries = "a library to measure: transformers, llama.cpp=FILE.gguf (several: a comma, or the option again)"
    add("--against", type=names, action="extend", default=[], metavar="LIBRARY", help=libraries)
    sections = f"of {', '.join(SECTIONS)} (default: all but the last)"
    add("--only", type=names, action="extend", metavar="SECTION", help=sections)
    add("--quick", action="store_true", help="fewer prompts, tokens and repeats: about a minute")
    add("--repeats", type=int, metavar="N", help="of every text (default: 3, quick: 1)")
    add("--max-new-tokens", type=int, metavar="N", help="tokens of a text (default: 96, quick: 32)")
    off_grid = "measure a copy of the model with noise in its weights, which no rounding restores; made once"
    add("--off-grid", action="store_true", help=off_grid)
    add("--temperature", type=float, default=0.0, metavar="T", help="of the speed section; above 0 texts race")
    add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    add("--dtype", choices=[*DTYPES, "auto"], default="auto", help="default: the checkpoint's")
    add("--json", type=Path, metavar="FILE", help="also write all measurements")
    add("--plot", type=Path, metavar="FILE", help="also draw them, as .svg or .png")
    options = parser.parse_args(arguments)
    options.against = dict(name.partition("=")[::2] for name in options.against)  # library -> its file, or ""
    options.only = options.only or list(SECTIONS)[:-1]
    options.only += ["costs"] if "speed" in options.only else []  # a prediction needs the costs
    if options.repeats is None:
        options.repeats = 1 if options.quick else 3
    if options.max_new_tokens is None:
        options.max_new_tokens = 32 if options.quick else 96
    return options


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError for wrong options, before anything is loaded."""
    if options.max_new_tokens < 2 * GAMMA:
        raise InputError(f"--max-new-tokens must be at least {2 * GAMMA} to measure anything")
    if options.repeats < 1:
        raise InputError(f"--repeats must be at least 1, found {options.repeats}")
    for option, given, known in (("--against", options.against, LIBRARIES), ("--only", options.only, SECTIONS)):
        for name in given:
            if name not in known:
                raise InputError(f"{option} {name!r:.80} is unknown: give {', '.join(known)}")
    for option, given, sections in (("--against", options.against, COMPARED), ("--plot", options.plot, DRAWN)):
        if given and not set(sections) & set(options.only):
            raise InputError(f"{option} concerns the sections {', '.join(sections)} only: add one of them to --only")
    for name, file in options.against.items():
        if util.find_spec(name.replace(".", "_")) is None:
            raise InputError(f"--against {name} needs a package that is not installed: pip install {PACKAGES[name]}")
        if name == "llama.cpp" and not os.path.isfile(file):
            raise InputError(
                f"--against llama.cpp={file:.80} names no file: write a GGUF file of the model with llama.cpp's "
                "convert_hf_to_gguf.py and give llama.cpp=FILE.gguf"
            )
    for path in filter(None, (options.json, options.plot)):
        check_place(path)
    if options.plot and options.plot.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {options.plot} must end in .svg or .png")


def prepare(options: argparse.Namespace) -> Bench:
    """Loaded model with prompts, ways to draft and libraries. Raises InputError when memory is too small."""
    folder, device = model_folder(options.model), pick_device(options.device)
    folder = off_grid_folder(folder) if options.off_grid else folder
    tokenizer, config = Tokenizer(folder), read_config(folder)
    draft = read_config(model_folder(options.draft_model)) if options.draft_model else None
    texts = {kind: PROMPTS[kind][: 1 if options.quick else None] for kind in PROMPTS}
    texts["stories"] = [story_prompt(random.Random(seed)) for seed in range(4 if options.quick else STORIES)]
    prompts = [Prompt(kind, text, encode_prompt(tokenizer, text)) for kind in texts for text in texts[kind]]
    longest = max(len(prompt.ids) for prompt in prompts)
    positions = longest + options.max_new_tokens
    if positions > config.max_positions:
        raise InputError(
            f"a prompt of {longest} tokens and {options.max_new_tokens} more exceed the model's context of "
            f"{config.max_positions}: lower --max-new-tokens"
        )
    dtype = DTYPES.get(options.dtype) or stored_dtype(folder)
    check_fits(estimate(config, dtype, positions, prompt=longest, draft=draft, fast_on=device), device)
    model = accelerate(load_model(folder, dtype, device))
    params = SamplingParams(options.temperature)
    coupling = "race" if options.temperature else "ratio"
    bench = Bench(options, Setting(folder, model, tokenizer, params, positions, coupling), prompts)
    if options.exit_layer is None:
        shares = (1 / 2, 4 / 5) if options.quick else (1 / 2, 2 / 3, 4 / 5)
        options.exit_layer = sorted({int(config.num_layers * share) for share in shares} - {0})
    bench.drafts = model_drafts(bench.setting, options)
    bench.libraries = library_contenders(bench)
    if why := getattr(model, "why_rows_vary", None):
        say(f"texts of drafts may differ from plain decoding's by rounding: {why}")
    return bench


def benchmark(options: argparse.Namespace) -> None:
    """Measure the sections, print their tables, and write the files asked for."""
    check_options(options)
    bench = prepare(options)
    packages = ["torch", *(PACKAGES[name] for name in options.against)]
    about = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(bench.setting.model.device),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
        "dtype": str(bench.setting.model.dtype).removeprefix("torch."),
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    out, report = Console(width=None if sys.stdout.isatty() else 170, highlight=False), {}
    out.print(f"{bench.setting.folder.name} in {about['dtype']}; {about['machine']}", markup=False)
    for name, section in SECTIONS.items():
        if name in options.only:
            report[name] = section(bench)
            out.print("", section.__doc__.splitlines()[0], table(report[name]), sep="\n")
    if options.json:
        write_json(options.json, {"about": about} | report)
    if options.plot:
        from benchmark.picture import picture  # loads matplotlib
        from weights.cli.picture import write_picture

        write_picture(lambda: picture(report), options.plot)


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: benchmark(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
