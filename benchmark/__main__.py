"""Measure what decoding costs on this machine: every way of drafting, other libraries, and the steps they are made of.

``python -m benchmark --quick`` takes about a minute on two idle cores, and as much again for each ``--against``.
Whatever is compared takes turns, so that a busy moment of the machine slows all alike; what counts are the ratios.
"""

from __future__ import annotations

import argparse
import platform
import sys
from datetime import datetime, timezone
from importlib import metadata, util
from pathlib import Path

from rich.console import Console

from benchmark import Report
from benchmark.contenders import Bench, find_drafts
from benchmark.libraries import LIBRARIES, PACKAGES, llama_cpp_features, other_contenders
from benchmark.report import DRAWN, draw, tables
from benchmark.sections import (
    cost_tables,
    measure_context,
    measure_first_token,
    measure_floor,
    measure_memory,
    measure_speed,
    measure_steps,
)
from benchmark.stories import measure_stories
from decoding.run.chooser import GAMMA, Setting
from decoding.run.cost_file import machine
from decoding.sampling import SamplingParams
from model import InputError
from model.fast import accelerate
from search.prompts import PROMPTS
from weights.cli.command_line import OneLineParser, run_command
from weights.cli.device import pick_device
from weights.cli.files import check_place, is_file, write_json
from weights.cli.prompt import encode_prompt
from weights.load import DTYPES, load_model, read_config, stored_dtype
from weights.memory import check_fits, estimate
from weights.names import model_folder
from weights.tokenizer import Tokenizer

SECTIONS = ("speed", "costs", "context", "first-token", "memory", "floor", "stories")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = OneLineParser(prog="python -m benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--draft-model", metavar="DIR", help="draft with this model too, of the same vocabulary")
    parser.add_argument(
        "--exit-layer",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="draft by leaving after these layers (default: the middle and later ones)",
    )
    parser.add_argument(
        "--against",
        type=names,
        action="extend",
        default=[],
        metavar="LIBRARY",
        help="measure it too: transformers, llama.cpp=FILE.gguf (for several: a comma, or the option again)",
    )
    parser.add_argument(
        "--only",
        type=names,
        action="extend",
        metavar="SECTION",
        help=f"of {', '.join(SECTIONS)} (default: all but the last)",
    )
    parser.add_argument("--quick", action="store_true", help="about a minute: fewer prompts, tokens and repeats")
    parser.add_argument("--repeats", type=int, metavar="N", help="of every text (default: 3, quick: 1)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens of a text (default: 96, quick: 32)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto", help="default: the checkpoint's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it, as .svg or .png")
    options = parser.parse_args(arguments)
    options.against = dict(name.partition("=")[::2] for name in options.against)  # library -> its file, or ""
    options.only = options.only or list(SECTIONS[:-1])
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
    if options.against and not {"speed", "first-token"} & set(options.only):
        raise InputError("--against is measured in the sections speed and first-token only: add one with --only")
    for name in options.against:
        if util.find_spec(LIBRARIES[name]) is None:
            raise InputError(f"--against {name} needs a package that is not installed: pip install {PACKAGES[name]}")
    if options.against.get("transformers"):
        raise InputError("--against transformers takes no file: it reads the folder of --model")
    file = options.against.get("llama.cpp")
    if file is not None and not is_file(Path(file)):
        given = f"{file!r:.80} is no file" if file else "none is given"
        raise InputError(
            f"--against llama.cpp needs a GGUF file of the model, and {given}: write one with llama.cpp's "
            "convert_hf_to_gguf.py and give llama.cpp=FILE.gguf"
        )
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
    tokenizer, config = Tokenizer(folder), read_config(folder)
    draft_config = read_config(draft_folder) if draft_folder else None
    prompts = [
        (kind, text, encode_prompt(tokenizer, text))
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
    model = accelerate(load_model(folder, dtype, device))
    bench = Bench(options, Setting(folder, model, tokenizer, SamplingParams(), positions), prompts)
    memory = {"memory": measure_memory(bench)} if "memory" in options.only else {}
    bench.drafts = find_drafts(bench.setting, options)
    return bench, memory


def measure(bench: Bench) -> Report:
    """The chosen sections, by name."""
    chosen = bench.options.only
    report: Report = {}
    if {"speed", "costs"} & set(chosen):  # a prediction needs the costs
        report["costs"] = measure_steps(bench)
    bench.others = other_contenders(bench)
    if "speed" in chosen:
        report["speed"] = measure_speed(bench, cost_tables(report["costs"]))
    others = {
        "context": measure_context,
        "first-token": measure_first_token,
        "floor": measure_floor,
        "stories": measure_stories,
    }
    return report | {name: section(bench) for name, section in others.items() if name in chosen}


def describe(bench: Bench) -> Report:
    """With what was measured: machine, date, versions, sizes."""
    packages = ["torch", *(PACKAGES[name] for name in bench.options.against)]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(bench.model.device),
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
    if why := getattr(bench.model, "why_rows_vary", None):
        bench.notes.append(f"texts of drafts may differ from plain's by rounding: {why}")
    report = {"about": about} | measure(bench) | memory | {"notes": bench.notes}
    heading = f"{about['model']} in {about['dtype']}; {about['machine']}"
    if "llama.cpp" in bench.others:
        about["llama.cpp"] = f"{options.against['llama.cpp']}; {llama_cpp_features()}"
        heading += f"\nllama.cpp: {about['llama.cpp']}"
    shown = Console(width=None if sys.stdout.isatty() else 170)
    for part in (heading, *tables(report)):
        shown.print(part, highlight=False, markup=False)
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
    return run_command(lambda: benchmark(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
