"""Measure the speed of decoding on this machine, with every draft and beside other libraries.

``python -m benchmark --quick`` takes some minutes on two idle cores. Only ratios can be compared.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import argparse
import random
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console

from app.command_line import say
from app.device import machine, pick_device
from app.files import check_place, read_json, write_json
from app.options import Options
from app.parsers import DEVICE, DTYPE, FLAG, MODEL, TEMPERATURE, Groups, run_script, within
from app.picture import write_picture
from app.session import Session
from app.table import Row, table
from benchmark.libraries import PACKAGES, library_ways
from benchmark.off_grid import off_grid_folder
from benchmark.picture import picture
from benchmark.sections import LENGTHS, SECTIONS, Bench
from benchmark.shapes import NAMED, measure_shape
from benchmark.ways import Case, find_drafts
from model import InputError
from search.texts import PROMPTS
from training.corpus.stories import story_request
from weights.load import DTYPES, model_folder

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
            "help": f"libraries to measure too, with commas: {', '.join(PACKAGES)}=FILE.gguf",
        },
        "--only": {
            "choices": SECTIONS,
            "nargs": "+",
            "default": ("costs", "speed", "first-token"),
            "help": "sections to measure (default: all but structured and together)",
        },
        "--prompts": {
            "choices": [*PROMPTS, "stories"],
            "nargs": "+",
            "default": tuple(PROMPTS),
            "help": "kinds of prompts (default: all but stories, which are requests as the corpus"
            " writer makes them)",
        },
        "--quick": {**FLAG, "help": "one prompt of each kind, one turn, and no long prompts"},
        "--max-new-tokens": {
            "type": within(int, 2),
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
        "--plot": {"type": Path, "metavar": "FILE", "help": "also draw them, as .svg or .png"},
    },
}


def benchmark(options: argparse.Namespace) -> None:
    """Measure the sections, or the shapes, print their tables, and write the files asked for.

    Raises InputError.
    """
    against = dict(name.partition("=")[::2] for name in options.against)  # library -> file, or ""
    for path in filter(None, (options.json, options.plot)):
        check_place(path)
    if options.plot and options.plot.suffix not in (".svg", ".png"):
        raise InputError("--plot needs a name that ends in .svg or .png")
    if not against.keys() <= PACKAGES.keys():
        raise InputError(f"--against takes {', '.join(PACKAGES)}=FILE.gguf")
    if against and (options.temperature or options.shape):
        raise InputError("--against measures greedy texts: leave out --temperature and --shape")
    device = pick_device(options.device)
    about = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": {name: metadata.version(PACKAGES[name]) for name in against},
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    out = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    report: dict[str, list[Row]] = {}
    found = measured_shapes(options, device) if options.shape else measured(options, against)
    for name, title, rows in found:
        report.setdefault(name, []).extend(rows)
        # of a shape a line for each value, which are too many for columns
        lines = [{"of the shape": key, "value": rows[0][key]} for key in rows[0]]
        shown = table(lines if options.shape else rows)
        out.print("", f"{title} ({about['machine']})", shown, sep="\n", markup=False)
    if options.json:
        write_json(options.json, {"about": about} | report)
    if options.plot:
        write_picture(partial(picture, report), options.plot)


def measured(
    options: argparse.Namespace, against: dict[str, str]
) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield the name, the title and the rows of each section asked for."""
    bench = prepare(options, against)
    for name, section in SECTIONS.items():
        if name in options.only:
            yield name, f"{bench.session.name}: {section.__doc__.splitlines()[0]}", section(bench)


def measured_shapes(
    options: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield "shapes", a title and the row of each shape."""
    dtype = DTYPES.get(options.dtype, torch.bfloat16)
    for shape in options.shape:
        yield "shapes", f"{shape} in {dtype}", [measure_shape(shape, dtype, device)]


def prepare(options: argparse.Namespace, against: dict[str, str]) -> Bench:
    """Return a loaded model with prompts, drafts and libraries. Raises InputError for texts beyond
    the context.
    """
    folder = model_folder(options.model)
    if options.off_grid:
        folder = off_grid_folder(folder)
    names = ("device", "dtype", "max_new_tokens", "temperature")
    given = {name: getattr(options, name) for name in names}
    session = Session(Options(model=str(folder), draft="none", seed=0, **given))
    stories = [story_request(random.Random(seed))[0] for seed in range(STORIES)]
    prompts = [
        (kind, session.encode(text))
        for kind in options.prompts
        for text in {**PROMPTS, "stories": stories}[kind][: 1 if options.quick else None]
    ]
    cases = [
        Case(kind, ids, options.max_new_tokens, number)
        for number, (kind, ids) in enumerate(prompts)
    ]
    longest = max(len(case.ids) + case.count for case in cases)
    if longest > session.context:
        raise InputError(
            f"the longest text exceeds the context of {session.context}: lower --max-new-tokens"
        )
    drafting = (options.exit_layer, options.draft_model)
    libraries = library_ways(session, against, max(longest, *LENGTHS), *drafting)
    if why := session.model.abilities.why_rows_vary:
        say(f"texts of drafts may differ from plain decoding's by rounding: {why}")
    return Bench(session, cases, find_drafts(session, *drafting), libraries, options.quick)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    return run_script(benchmark, OPTIONS, "python -m benchmark", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
