"""Measure the speed of decoding on this machine, with every draft and beside other libraries.

``python -m benchmark --quick`` takes some minutes on two idle cores. Contenders take turns, so that
a busy moment of the machine slows all alike. Only ratios can be compared.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import argparse
import random
import sys
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console

from app.chooser import load_setting
from app.command_line import run_command, say
from app.device import machine, pick_device
from app.files import check_place, read_json, write_json
from app.parsers import DEVICE, DTYPE, FLAG, MODEL, TEMPERATURE, Groups, parser_of, within
from app.picture import write_picture
from app.prompt import encode_prompt
from app.table import Row, table
from app.writer import GAMMA
from benchmark.contenders import LIBRARIES, Bench, find_drafts, library_contenders
from benchmark.off_grid import off_grid_folder
from benchmark.picture import PANELS, picture
from benchmark.sections import SECTIONS
from benchmark.shapes import NAMED, measure_shape, plot_shapes
from decoding.sampling import SamplingParams
from model import InputError
from search.texts import PROMPTS
from training.corpus.stories import story_request
from weights.load import DTYPES, model_folder, shown_name

STORIES = 24  # prompts of the kind "stories"


OPTIONS: Groups = {
    "": {
        "--model": MODEL,
        "--shape": {
            "action": "append",
            "metavar": "NAME",
            "help": "measure random weights of this shape instead, repeatable: a config.json, or"
            f" {', '.join(read_json(NAMED))}",
        },
        "--draft-model": {
            "metavar": "DIR",
            "help": "also draft with this model, of the same vocabulary",
        },
        "--exit-layer": {
            "type": int,
            "nargs": "+",
            "default": (),
            "metavar": "N",
            "help": "layers of the early exits to draft with (default: a middle and a late one)",
        },
        "--against": {
            "type": partial(str.split, sep=","),
            "default": [],
            "metavar": "LIBRARY",
            "help": f"libraries to measure too, with commas: {', '.join(LIBRARIES)}=FILE.gguf (of a"
            " shape: llama.cpp alone)",
        },
        "--only": {
            "choices": SECTIONS,
            "nargs": "+",
            "default": ("costs", "speed", "first-token", "floor"),
            "help": "sections to measure (default: all but structured and together)",
        },
        "--prompts": {
            "choices": [*PROMPTS, "stories"],
            "nargs": "+",
            "default": tuple(PROMPTS),
            "help": "kinds of prompts (default: all but stories, which are requests as the corpus"
            " writer makes them)",
        },
        "--quick": {**FLAG, "help": "one prompt of each kind, and no long ones"},
        "--max-new-tokens": {
            "type": within(int, 2 * GAMMA),
            "default": 64,
            "metavar": "N",
            "help": "tokens of a text",
        },
        "--off-grid": {
            **FLAG,
            "help": "measure a copy of the model with noise in its weights, so that rounding to"
            " four bits changes them; the copy is made once",
        },
        "--temperature": {
            **TEMPERATURE,
            "help": "0: greedy; above 0: sampled, verified by the race",
        },
        "--device": DEVICE,
        "--dtype": {**DTYPE, "choices": [*DTYPES, "auto"]},
        "--json": {"type": Path, "metavar": "FILE", "help": "also write all measurements"},
        "--plot": {
            "type": Path,
            "metavar": "FILE",
            "help": "also draw the sections speed and together, as .svg or .png",
        },
    },
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line. Raises InputError for values out of range."""
    parser = parser_of(OPTIONS, prog="python -m benchmark", description=__doc__.splitlines()[0])
    options = parser.parse_args(arguments)
    # library -> its file, or ""
    options.against = dict(name.partition("=")[::2] for name in options.against)
    options.only = set(options.only)
    if "speed" in options.only:
        options.only.add("costs")  # measured before the texts, and shown
    for path in filter(None, (options.json, options.plot)):
        check_place(path)
    if not options.against.keys() <= LIBRARIES.keys():
        raise InputError(f"--against takes {', '.join(LIBRARIES)}=FILE.gguf")
    if options.against and options.temperature:
        raise InputError("--against measures greedy texts: leave out --temperature")
    if options.plot and (
        options.plot.suffix not in (".svg", ".png")
        or not (options.shape or PANELS.keys() & options.only)
    ):
        raise InputError(
            f"--plot needs a name that ends in .svg or .png, and the section {' or '.join(PANELS)}"
        )
    return options


def prepare(options: argparse.Namespace) -> Bench:
    """Loaded model with prompts, ways to draft and libraries. Raises InputError for texts beyond
    the context.
    """
    folder = model_folder(options.model)
    if options.off_grid:
        folder = off_grid_folder(folder)
    device = pick_device(options.device)
    params = SamplingParams(options.temperature)
    setting = load_setting(folder, device, options.dtype, params, "race")
    stories = [story_request(random.Random(seed))[0] for seed in range(STORIES)]
    texts = {**PROMPTS, "stories": stories}
    prompts = [
        (kind, encode_prompt(setting.tokenizer, text))
        for kind in options.prompts
        for text in texts[kind][: 1 if options.quick else None]
    ]
    context = setting.positions
    setting.positions = max(len(ids) for _, ids in prompts) + options.max_new_tokens
    if setting.positions > context:
        raise InputError(
            f"the longest text exceeds the context of {context}: lower --max-new-tokens"
        )
    named = options.exit_layer, options.draft_model
    libraries = library_contenders(setting, options.against, *named)
    drafts = find_drafts(setting, *named)
    if why := setting.model.why_rows_vary:
        say(f"texts of drafts may differ from plain decoding's by rounding: {why}")
    return Bench(
        setting,
        prompts,
        drafts,
        libraries,
        options.max_new_tokens,
        options.exit_layer,
        options.quick,
    )


def benchmark(options: argparse.Namespace) -> None:
    """Measure the sections, or the shapes, print their tables, and write the files asked for."""
    device = pick_device(options.device)
    out = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    report = measure_shapes(options, device, out) if options.shape else measure(options, out)
    about = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": {name: metadata.version(LIBRARIES[name]) for name in options.against},
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    if options.json:
        write_json(options.json, {"about": about} | report)
    if options.plot:
        draw = plot_shapes if options.shape else picture
        write_picture(lambda: draw(report), options.plot)


def measure(options: argparse.Namespace, out: Console) -> dict[str, list[Row]]:
    """Tables of the sections asked for, each printed when it is measured."""
    bench = prepare(options)
    model = bench.setting.model
    report = {}
    about = f"{shown_name(bench.setting.folder)} in {model.dtype}; {machine(model.device)}"
    out.print(about, markup=False)
    for name, section in SECTIONS.items():
        if name in options.only:
            report[name] = section(bench)
            out.print("", section.__doc__.splitlines()[0], table(report[name]), sep="\n")
    return report


def measure_shapes(
    options: argparse.Namespace, device: torch.device, out: Console
) -> dict[str, list[Row]]:
    """Rows of the shapes, each printed when it is measured, one value per line."""
    dtype = DTYPES.get(options.dtype, torch.bfloat16)
    rows = []
    for shape in options.shape:
        rows.append(measure_shape(shape, dtype, device, "llama.cpp" in options.against))
        shown = [{"of the shape": name, "value": value} for name, value in rows[-1].items()]
        out.print(table(shown, f"{shape} in {dtype}; {machine(device)}"))
    return {"shapes": rows}


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: benchmark(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
