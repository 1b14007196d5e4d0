"""Find the layer plan that makes a model draft for itself fastest: ``python -m search --model DIR``.

The target writes a few texts; for any plan, one pass over them says which of its drafts would have been accepted, and
with the measured costs of this machine how fast decoding would be. Optuna searches the plans; the best ones are run
for real, on prompts held out, and the winner is written as a plan file that generate.py reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from decoding.run.acceptance import Calibration, Continuation
from decoding.run.chooser import plan_in_words
from decoding.run.cost_file import kept_sublayer_costs, machine
from decoding.run.costs import SublayerCosts
from decoding.run.plan_file import write_plan
from decoding.sampling import SamplingParams
from decoding.verify import COUPLINGS
from model import Decoder, InputError
from model.fast import accelerate
from search.compare import compare, comparison_table, remembering
from search.confirm import Confirmation, confirm, draft_plan, without_speculation
from search.costs import measure_sublayers
from search.plots import draw_plots
from search.study import (
    SAMPLERS,
    Candidate,
    Evaluator,
    candidates,
    costs_of,
    enqueue,
    finished,
    importance,
    open_study,
    optimise,
    quiet_optuna,
    starts,
)
from search.texts import read_prompts, split, written_texts
from weights.cli.command_line import OneLineParser, run_command, say
from weights.cli.device import pick_device
from weights.cli.files import check_place
from weights.cli.prompt import encode_prompt
from weights.fingerprint import model_fingerprint
from weights.load import DTYPES, load_model
from weights.names import model_folder
from weights.tokenizer import Tokenizer

CONFIRMED = 3  # plans that are run for real
SEARCHED, HELD_OUT = "searched", "held out"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m search", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--trials", type=int, default=200, metavar="N", help="plans that are tried")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the plan file (default: plan.json of the model)")
    parser.add_argument("--resume", action="store_true", help="continue the search of this plan file")
    parser.add_argument("--sampler", choices=list(SAMPLERS), default="tpe", help="what proposes the plans")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed: same search")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw what was found into this folder")
    parser.add_argument("--compare", type=int, metavar="K", help="only compare the samplers, over K seeds")
    text = parser.add_argument_group("calibration text")
    text.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help=".txt (a prompt a line) or .jsonl with prompt (default: our own)",
    )
    text.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="written after each prompt")
    text.add_argument("--coupling", choices=list(COUPLINGS), default="ratio", help="of draft and target when sampling")
    text.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    text.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    text.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off")
    text.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off")
    text.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="1: off")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto", help="default: the checkpoint's")
    return parser.parse_args(arguments)


def check_options(options: argparse.Namespace) -> SamplingParams:
    """The sampling parameters. Raises InputError for a value out of range and for a place that cannot be written."""
    for name in ("trials", "max_new_tokens", "compare"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, found {value}")
    if not 0 <= options.seed < 2**31:
        raise InputError(f"--seed must be from 0 to {2**31 - 1}, found {options.seed}")
    if options.plots is not None:
        try:
            options.plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--plots: {options.plots} is no folder and cannot be made: {error.strerror}") from None
        check_place(options.plots / "importance.svg")
    return SamplingParams(*(getattr(options, field.name) for field in fields(SamplingParams)))


@dataclass
class Setting:
    """A model on this machine with its texts and costs: what every search starts from."""

    folder: Path
    model: Decoder
    params: SamplingParams
    coupling: str
    eos_ids: frozenset[int]
    fingerprint: str
    texts: dict[str, list[Continuation]]
    costs: SublayerCosts

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a search to be continued."""
        texts = [[list(text.prompt), list(text.written)] for text in self.texts[SEARCHED]]
        return {
            "model": self.fingerprint,
            "dtype": str(self.model.dtype),
            "space": f"bits of {2 * self.model.num_layers} sublayers",
            "sampling": {**asdict(self.params), "coupling": self.coupling},
            "texts": texts,
        }


def prepare(options: argparse.Namespace, params: SamplingParams, folder: Path, prompts: list[str]) -> Setting:
    """Load the model; write the texts and measure the costs, unless an earlier run has kept them."""
    device, tokenizer = pick_device(options.device), Tokenizer(folder)
    fingerprint = model_fingerprint(folder)
    model = accelerate(load_model(folder, DTYPES.get(options.dtype), device))
    say("writing calibration text, or taking what was kept of it")
    texts = written_texts(
        model,
        [tuple(encode_prompt(tokenizer, prompt)) for prompt in prompts],
        params,
        max_new_tokens=options.max_new_tokens,
        eos_ids=tokenizer.eos_ids,
        seed=options.seed,
        folder=folder,
        fingerprint=fingerprint,
    )
    say("measuring what sublayers cost here, or taking what was kept of it")
    costs = kept_sublayer_costs(folder, model, params, lambda: measure_sublayers(model, params))
    searched, held_out = split(texts)
    return Setting(
        folder,
        model,
        params,
        options.coupling,
        tokenizer.eos_ids,
        fingerprint,
        {SEARCHED: searched, HELD_OUT: held_out},
        costs,
    )


@contextmanager
def progress(total: int, done: int = 0) -> Iterator[tuple[Progress, Any]]:
    """A bar on standard error with a word beside it."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar, bar.add_task("", total=total, completed=done)


def measured_importance(setting: Setting) -> dict[str, list[float]]:
    """``importance`` on the searched texts, under a progress bar."""
    calibration = Calibration(
        setting.model, setting.texts[SEARCHED], setting.params, depths=1, coupling=setting.coupling
    )
    with progress(2 * setting.model.num_layers) as (bar, task):
        bar.update(task, description="importance of each sublayer")
        return importance(calibration, lambda: bar.advance(task))


def search(options: argparse.Namespace, setting: Setting, study: optuna.Study) -> bool:
    """Try plans until there are enough, or until Ctrl-C: then returns False. Everything found is in the study."""
    try:
        if "importance" not in study.user_attrs:
            study.set_user_attr("importance", measured_importance(setting))
        enqueue(study, starts(study.user_attrs["importance"], setting.costs))
        with progress(options.trials, len(finished(study))) as (bar, task):

            def on_trial() -> None:
                best = candidates(study)[0].prediction
                bar.update(task, advance=1, description=describe(best))

            calibration = Calibration(setting.model, setting.texts[SEARCHED], setting.params, coupling=setting.coupling)
            evaluator = Evaluator(calibration, setting.costs)
            optimise(study, evaluator, setting.costs, setting.model.num_layers, options.trials, on_trial)
    except KeyboardInterrupt:
        return False
    return True


def describe(best: Any) -> str:
    threshold = f" until confidence < {best.threshold}" if best.threshold else ""
    return f"best {best.speedup:.3f}x: {best.acceptance_rate:.0%} of {best.gamma} tokens{threshold}"


def run_confirmation(options: argparse.Namespace, setting: Setting, found: list[Candidate]) -> list[Confirmation]:
    held_out = setting.texts[HELD_OUT]
    with progress(len(held_out)) as (bar, task):
        bar.update(task, description="running the best plans on held-out prompts")
        return confirm(
            setting.model,
            found[:CONFIRMED],
            held_out,
            setting.costs,
            setting.params,
            setting.eos_ids,
            options.max_new_tokens,
            options.seed,
            setting.coupling,
            lambda: bar.advance(task),
        )


def confirmation_table(confirmed: list[Confirmation]) -> Table:
    table = Table(title="held-out prompts: predicted, and measured beside plain decoding")
    for heading in ("plan", "γ", "threshold", "speed-up", "predicted", "accepted", "predicted", "tokens a round"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for one in confirmed:
        plan, prediction = one.candidate.plan, one.candidate.prediction
        table.add_row(
            plan_in_words(plan),
            str(prediction.gamma),
            f"{prediction.threshold}" if prediction.threshold else "none",
            f"{one.speedup:.2f}",
            f"{one.predicted.speedup:.2f}",
            f"{one.acceptance_rate:.1%}",
            f"{one.predicted.acceptance_rate:.1%}",
            f"{one.tokens_per_round:.2f}",
        )
    return table


def conclude(out: Path, setting: Setting, found: list[Candidate], confirmed: list[Confirmation]) -> str:
    """Write the plan file and return the line that says what came of it.

    Without a confirmation (it was interrupted) the prediction alone decides whether to speculate.
    """
    best = confirmed[0].candidate if confirmed else found[0]
    speedup = confirmed[0].speedup if confirmed else best.prediction.speedup
    pays = speedup > 1
    provenance = {
        "acceptance_rate": confirmed[0].acceptance_rate if confirmed else None,
        "predicted_acceptance_rate": best.prediction.acceptance_rate,
        "predicted_speedup": best.prediction.speedup,
        "predicted_speedup_held_out": confirmed[0].predicted.speedup if confirmed else None,
        "measured_speedup": confirmed[0].speedup if confirmed else None,
        "draft_cost": best.draft_cost,
        "sampling": {**asdict(setting.params), "coupling": setting.coupling},
        "dtype": str(setting.model.dtype).removeprefix("torch."),
        "machine": machine(setting.model.device),
        "date": date.today().isoformat(),
    }
    chosen = draft_plan(best) if pays else without_speculation(best.plan)
    write_plan(out, chosen, setting.fingerprint, provenance)
    how = "measured" if confirmed else "predicted, not run"
    if not pays:
        return f"no plan beats plain decoding (best {speedup:.2f}x, {how}); {out} turns self-speculation off"
    return f"{out}: {speedup:.2f}x plain decoding ({how}), drafting {best.prediction.gamma} tokens at most"


def run_comparison(options: argparse.Namespace, setting: Setting) -> None:
    """Print the table of --compare."""
    first = starts(measured_importance(setting), setting.costs)
    calibration = Calibration(setting.model, setting.texts[SEARCHED], setting.params, coupling=setting.coupling)
    evaluator = Evaluator(calibration, setting.costs)
    with progress((len(SAMPLERS) * options.compare + 1) * options.trials) as (bar, task):
        bar.update(task, description="a plan that comes up again costs nothing")
        evaluate = remembering(evaluator, lambda: bar.advance(task))
        best_start = max(evaluate(plan).speedup for plan in first)
        results = compare(evaluate, setting.costs, first, options.trials, range(options.compare))
    Console().print(comparison_table(results, best_start, options.trials))


def run(options: argparse.Namespace) -> int:
    """Everything after the arguments are parsed; returns the exit status. Refusals come before the long work."""
    quiet_optuna()
    params, folder = check_options(options), model_folder(options.model)
    prompts = read_prompts(options.calibration)
    out = options.out or folder / "plan.json"
    journal = out.with_suffix(".journal")
    if out == journal:
        raise InputError(f"--out {out}: the search keeps its trials under that name: end it in .json")
    for path in (out, journal):
        check_place(path)
    setting = prepare(options, params, folder, prompts)
    if options.compare is not None:
        run_comparison(options, setting)
        return 0
    study = open_study(journal, setting.identity, options.sampler, options.seed, resume=options.resume)
    searched = replace(setting, costs=costs_of(study, setting.costs))
    complete = search(options, searched, study)
    found = candidates(study)
    if not found:
        say("interrupted before the first plan was tried: no plan written")
        return 130
    confirmed: list[Confirmation] = []
    try:
        if complete:
            confirmed = run_confirmation(options, setting, found)
            Console(width=None if sys.stdout.isatty() else 120).print(confirmation_table(confirmed))
    except KeyboardInterrupt:
        complete = False
    say(conclude(out, setting, found, confirmed))
    if options.plots is not None:
        history = [trial.value for trial in finished(study)]
        draw_plots(options.plots, study.user_attrs["importance"], found, history, confirmed, searched.costs)
    return 0 if complete else 130


def main(arguments: list[str] | None = None) -> int:
    return run_command(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
