"""Measure the speed of decoding on this machine, with every draft and beside other libraries.

``python -m benchmark --quick`` takes some minutes on two idle cores. Only ratios can be compared.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from app.common.device import machine, pick_device
from app.common.files import check_place, read_json, write_json
from app.common.parsers import (
    DEVICE,
    FLAG,
    MODEL,
    TEMPERATURE,
    Groups,
    picture_file,
    script,
    within,
)
from app.common.picture import write_picture
from app.common.table import Row, table
from app.options import Options
from app.session import Session
from benchmark import rounds, sections, shapes, ways
from benchmark.off_grid import off_grid_folder
from benchmark.picture import picture
from decoding.verify import RULES
from model.errors import InputError, explaining
from model.plan import LayerPlan
from search.texts import PROMPTS
from training.corpus.stories import story_request
from weights.load import DTYPES, model_folder

STORIES = 24  # prompts of the kind "stories"
TEXTS = "texts of a model (not with --shape and --rounds)"
AGAINST = "transformers, or llama.cpp=FILE.gguf (pip install llama-cpp-python)"

OPTIONS: Groups = {
    "": {
        "--shape": {
            "action": "append",
            "default": [],
            "metavar": "NAME",
            "help": "measure random weights of this shape instead, repeatable: a config.json, or"
            f" {', '.join(read_json(shapes.NAMED))}",
        },
        "--rounds": {
            "action": "append",
            "default": [],
            "metavar": "NAME",
            "help": "measure whole rounds of a shape at given acceptance rates, repeatable",
        },
        "--device": DEVICE,
        "--dtype": {
            "default": "auto",
            "choices": [*DTYPES, "auto"],
            "help": "number format (default: the checkpoint's; of a shape bfloat16)",
        },
        "--json": {"type": Path, "metavar": "FILE", "help": "also write all measurements"},
        "--plot": {
            "type": picture_file,
            "metavar": "FILE",
            "help": "also draw them, as .svg or .png",
        },
    },
    TEXTS: {
        "--model": MODEL,
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
            "help": f"libraries to measure too, with commas: {AGAINST}",
        },
        "--only": {
            "choices": [name for name in sections.SECTIONS if name != "context"],
            "nargs": "+",
            "default": (),
            "help": f"sections to measure (default: {', '.join(sections.DEFAULT)})",
        },
        "--context": {
            "type": within(int, 1),
            "nargs": "+",
            "default": [],
            "metavar": "N",
            "help": "measure texts after N tokens of this project's documents and a request, beside"
            " them only what --only names",
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
        "--temperature": {**TEMPERATURE, "type": float},
        "--coupling": {
            "choices": [*RULES],
            "help": "rule of verification of sampled texts (default: race)",
        },
    },
}


def benchmark(options: argparse.Namespace) -> None:
    """Measure the sections, or the shapes, print their tables, and write the files asked for.

    Raises InputError.
    """
    for path in filter(None, (options.json, options.plot)):
        check_place(path)
    if options.against and options.temperature:
        raise InputError("--against measures greedy texts: leave out --temperature")
    named = [*options.shape, *options.rounds]
    for shape in named:
        shapes.config_of(shape)  # which refuses an unknown name
    wanted = (
        []
        if named
        else [*options.only, *(["context"] if options.context else [])] or sections.DEFAULT
    )
    unused = [
        name
        for name, settings in OPTIONS[TEXTS].items()
        if getattr(options, name[2:].replace("-", "_")) != settings.get("default")
        and not {*wanted} & {*sections.USED_BY.get(name, wanted)}
    ]
    if unused:
        why = "--shape and --rounds measure random weights" if named else "other sections use these"
        raise InputError(f"{why}: leave out {', '.join(unused)}")
    device = pick_device(options.device)
    about = machine(device)
    out = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    report: dict[str, list[Row]] = {}
    try:
        for section, title, rows in measured(options, wanted, device):
            report[section] = report.get(section, []) + rows
            out.print("", f"{title} ({about})", table(rows), sep="\n", markup=False)
    finally:  # also after Ctrl-C
        if options.json and report:
            given = {name: str(value) for name, value in vars(options).items()}
            write_json(options.json, {"about": {"machine": about, "options": given}} | report)
        if options.plot and report:
            write_picture(lambda: picture(report), options.plot)


def measured(
    options: argparse.Namespace, wanted: Sequence[str], device: torch.device
) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield the name, the title and the rows of each shape asked for, or of the ``wanted`` sections
    without any.
    """
    dtype = DTYPES.get(options.dtype, torch.bfloat16)
    for shape in options.shape:
        yield "shapes", f"{shape} in {dtype}", shapes.measure_shape(shape, dtype, device)
    for shape in options.rounds:
        yield "rounds", f"{shape} in {dtype}", rounds.measure_rounds(shape, dtype, device)
    if not wanted:
        return
    bench = prepare(options)
    for name, (title, measure) in sections.SECTIONS.items():
        if name in wanted:
            yield name, f"{bench.session.name}: {title}", measure(bench)


def prepare(options: argparse.Namespace) -> sections.Bench:
    """Return a session with prompts, drafts and libraries.

    Raises InputError, also for a model that cannot be loaded.
    """
    folder = model_folder(options.model)
    if options.off_grid:
        folder = off_grid_folder(folder)
    session = Session(
        Options(
            model=str(folder),
            draft="none",
            seed=0,
            coupling=options.coupling,
            device=options.device,
            dtype=options.dtype,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
        )
    )
    session.copies_at_once = True
    prompts = {
        **PROMPTS,
        "stories": [story_request(random.Random(seed))[0] for seed in range(STORIES)],
    }
    cases = [
        ways.Case(session.encode(text), options.max_new_tokens, number, kind)
        for kind in options.prompts
        for number, text in enumerate(prompts[kind][: 1 if options.quick else None])
    ]
    layers = session.config.num_layers
    exits = options.exit_layer or (max(1, layers // 2), max(1, layers * 4 // 5))
    for layer in exits:
        LayerPlan.early_exit(layers, layer)  # which refuses one that the model does not have
    libraries, their_drafts = load_libraries(options, session, exits)
    return sections.Bench(
        session,
        cases,
        ways.find_drafts(session, exits, options.draft_model),
        libraries,
        their_drafts,
        turns=1 if options.quick else sections.TURNS,
        lengths=sections.LENGTHS[: sections.QUICK_LENGTHS if options.quick else None],
        contexts=options.context,
    )


def load_libraries(
    options: argparse.Namespace, session: Session, exits: Sequence[int]
) -> tuple[dict[str, ways.Way], dict[str, ways.Way]]:
    """Return the plain way of each library asked for, and the ways with drafts of theirs. Raises
    InputError for a library that is unknown or missing, or cannot load the model.
    """
    plain: dict[str, ways.Way] = {}
    drafts: dict[str, ways.Way] = {}
    for library in options.against:
        name, _, file = library.partition("=")
        with explaining(f"--against {library} cannot be loaded", (Exception,)):  # it may raise any
            match name:
                case "transformers":
                    plain[name], drafts = ways.transformers_ways(
                        session, exits, options.draft_model
                    )
                case "llama.cpp":
                    plain[name] = ways.llama_cpp_way(session, file)
                case _:
                    raise InputError(f"--against {library}: give {AGAINST}")
    return plain, drafts


main = script(benchmark, OPTIONS, "python -m benchmark", __doc__)


if __name__ == "__main__":
    sys.exit(main())
