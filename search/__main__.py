"""Find the layer plan with which a model drafts for itself fastest.

``python -m search --model DIR``: the target writes a few texts, and the costs of its sublayers are
measured (``texts_and_costs``). A trial predicts the speed-up of one plan: a single pass of it over
the texts gives its acceptance, and the sublayers' costs add up to those of its draft steps
(``predict_plan``). Optuna proposes the plans (``optimise``). The best ones are judged on other
texts (``plans_to_confirm``) and decode held-out prompts beside plain decoding (``confirm``), and
the fastest is written (``write_best``).
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import argparse
import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from app.chooser import load_setting
from app.command_line import say
from app.device import machine, pick_device
from app.files import check_place
from app.parsers import DEVICE, DTYPE, FLAG, MODEL, TEMPERATURE, Groups, run_script, within
from app.picture import write_picture
from app.table import table
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import COUPLINGS, Coupling
from model.plan import LOW_BITS
from search.acceptance import Calibration
from search.confirm import confirm, plans_to_confirm, write_best
from search.prediction import plot_plans, predict_plan
from search.study import (
    SAMPLERS,
    open_study,
    optimise,
    predictions_of,
    space_of,
    texts_and_costs,
)
from search.texts import read_prompts, split_texts
from weights.importance import importance
from weights.load import DTYPES, model_fingerprint, model_folder

VERSION = 8  # of the journal
SEARCH_DEPTHS = 2  # of acceptance in the search; the best plans are judged with more


OPTIONS: Groups = {
    "": {
        "--model": MODEL,
        "--trials": {
            "type": within(int, 1),
            "default": 200,
            "metavar": "N",
            "help": "plans to try",
        },
        "--out": {
            "type": Path,
            "metavar": "FILE",
            "help": "the plan file (default: plan.json of the model)",
        },
        "--resume": {**FLAG, "help": "continue the search of this plan file"},
        "--sampler": {
            "choices": list(SAMPLERS),
            "default": "tpe",
            "help": "method that proposes plans",
        },
        "--seed": {
            "type": within(int, 0, 2**31 - 1),
            "default": 0,
            "metavar": "S",
            "help": "same seed: same search",
        },
        "--plots": {
            "type": Path,
            "metavar": "DIR",
            "help": "draw front.svg, all plans tried, into this folder",
        },
        "--bits": {
            "type": int,
            "nargs": "+",
            "choices": (0, *LOW_BITS),
            "default": (0, *LOW_BITS),
            "help": "bits that a sublayer may have besides the checkpoint's, 0: skipped"
            " (default: all)",
        },
        "--device": DEVICE,
        "--dtype": {**DTYPE, "choices": [*DTYPES, "auto"]},
    },
    "calibration text": {
        "--calibration": {
            "type": Path,
            "metavar": "FILE",
            "help": "a prompt per line (default: built-in prompts)",
        },
        "--max-new-tokens": {
            "type": within(int, 1),
            "default": 64,
            "metavar": "N",
            "help": "tokens written after each prompt",
        },
        "--coupling": {
            "choices": list(COUPLINGS),
            "default": "race",
            "help": "rule of verification of the sampled texts that the plan is for",
        },
        "--temperature": TEMPERATURE,
    },
}


def run(options: argparse.Namespace, resuming: str) -> int:
    """Run a search and write its plan; returns the exit status. Wrong input is refused before the
    long work. ``resuming`` is the line with the command that continues it.
    """
    folder = model_folder(options.model)
    out: Path = options.out or folder / "plan.json"
    check_place(out)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(options.calibration)

    params = SamplingParams(options.temperature)
    device = pick_device(options.device)
    setting = load_setting(folder, device, options.dtype, params, options.coupling)
    model = setting.model
    if model.fast_bits:  # rounds to low bits as ``generate.py`` does
        importance(model, setting.tokenizer, setting.folder)
    coupling = Coupling(options.coupling, options.seed)
    identity = {
        "model": model_fingerprint(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "bits": sorted({*options.bits}),
        "sampling": {**asdict(setting.params), "coupling": coupling.name},
        "prompts": [options.max_new_tokens, prompts],
        "version": VERSION,
    }
    journal = out.with_suffix(".journal")
    study = open_study(journal, identity, options.sampler, options.seed, resume=options.resume)
    texts, costs = texts_and_costs(study, identity, setting, coupling)
    searched, judged, held_out = split_texts(texts)

    objective = partial(predict_plan, Calibration(setting, searched, SEARCH_DEPTHS), costs)
    status = 0
    try:
        optimise(study, objective, space_of(model.num_layers, options.bits), options.trials)
    except KeyboardInterrupt:  # the study has all finished trials
        status = 130
        say(resuming)
    predictions = predictions_of(study)
    if not predictions:
        return status

    plans = plans_to_confirm(Calibration(setting, judged), costs, predictions)
    rules = Rules(options.max_new_tokens, setting.tokenizer.eos_ids)
    results = confirm(setting, held_out, plans, rules, coupling)
    title = "held-out prompts: measured beside plain decoding, and predicted"
    Console(width=None if sys.stdout.isatty() else 120).print(
        table([row for _, row in results], title)
    )
    say(write_best(out, identity, *results[0], machine(model.device)))
    if results[0][1]["speed-up"] > 1:
        place = "" if options.out is None else f" --plan {shlex.quote(str(out))}"
        model_name = shlex.quote(options.model)
        say(f'to use it: python generate.py "Your prompt" --model {model_name} --draft skip{place}')
    if options.plots is not None:
        write_picture(lambda: plot_plans(predictions, costs), options.plots / "front.svg")
    return status


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if "--resume" not in words:
        words = [*words, "--resume"]
    resuming = f"interrupted; to continue: {shlex.join(['python', '-m', 'search', *words])}"
    return run_script(
        lambda options: run(options, resuming),
        OPTIONS,
        "python -m search",
        __doc__,
        arguments,
        resuming,
    )


if __name__ == "__main__":
    sys.exit(main())
