"""Optuna search; objective: predicted speed-up. A plan's parameters are the bits of each sublayer and of the head.

The study is kept in a journal file, with the texts and costs of its predictions. Any number of processes may work on
it, on one machine or several that share the file, and a killed search continues from its last trial.
"""

import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import torch
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console
from rich.progress import track

from decoding.drafters import NoDraft, raw_probability
from decoding.run.acceptance import Calibration, Continuation
from decoding.run.calibration import calibration_texts
from decoding.run.chooser import Setting
from decoding.run.costs import REPEATS, CostTable, filled_cache, measure_costs, round_of
from decoding.run.prediction import GAMMAS, Prediction, predict
from decoding.sampling import SamplingParams
from decoding.verify import Coupling
from model import Decoder, InputError, LayerPlan
from model.clock import take_turns
from model.plan import FULL, LOW_BITS
from weights.cli.command_line import say
from weights.cli.files import explaining

SAMPLERS: dict[str, Callable[..., BaseSampler]] = {
    # One density per sublayer, since a search has too few trials for joint (multivariate) densities. Good trials are
    # the best tenth, up to 10. They are few, so the uniform prior gets a small weight.
    "tpe": partial(
        TPESampler,
        multivariate=False,
        prior_weight=0.2,
        gamma=lambda trials: min(max(3, trials // 10), 10),
        n_ei_candidates=64,
    ),
    "random": RandomSampler,
}
THRESHOLDS = (0.0, 0.3, 0.45, 0.6, 0.75, 0.9)  # confidence below which a draft ends; 0: never
BITS = (*LOW_BITS, FULL)  # of a sublayer that runs
PATIENCE = 1.0  # seconds per plan after which no further repeat begins
HELD_OUT = 4  # every fourth text is kept for the confirmation
LEAST_TOKENS = 32  # of all texts together: fewer say nothing about a plan
NAME = "layer plan"
HEAD = "head"

Space = Mapping[str, Sequence[int]]  # the bits that each parameter may have


class SublayerCosts(NamedTuple):
    """Costs of the parts of a draft step, for the draft steps of any layer plan, in rounds of plain decoding.

    ``parts``: a draft step that skips all sublayers (embedding, head, distribution, draw), one attention and one MLP,
    each in each of ``BITS``: ``3 · len(BITS)`` numbers. ``confidence``: reading the confidence of a drafted token;
    ``verify`` and ``per_extra_token`` as in CostTable.
    """

    parts: list[float]
    confidence: float
    verify: tuple[float, ...]
    per_extra_token: float

    def draft(self, plan: LayerPlan) -> float:
        """A draft step under ``plan``."""
        return float(np.dot(counts_of(plan), self.parts))

    def table(self, draft: float) -> CostTable:
        """The costs of a draft of which a step costs ``draft``."""
        return CostTable(draft, tuple(self.verify), per_extra_token=self.per_extra_token)


def counts_of(plan: LayerPlan) -> list[int]:
    """Numbers of heads, attentions and MLPs of each number of bits in a plan: ``3 · len(BITS)``."""
    return [parts.count(bits) for parts in ((plan.head,), plan.attention, plan.mlp) for bits in BITS]


def measured_plans(layers: int) -> Iterator[LayerPlan]:
    """Plans whose draft steps determine the costs of all sublayers, by their bits."""
    every = range(layers)
    for bits in BITS:
        for skipped in (((), ()), (every, every), (every[::2], ()), ((), every[1::2]), (every[::2], every[::2])):
            yield LayerPlan.skipping(layers, *skipped).in_bits(bits, bits)


@torch.inference_mode()
def measure_sublayers(model: Decoder, params: SamplingParams, coupling: str) -> SublayerCosts:
    """Costs with these sampling parameters and this rule of verification.

    The least-squares solution of: the cost of a plan's draft step is the sum of the costs of its parts.
    """
    how, plans = (params, coupling), list(measured_plans(model.num_layers))
    known, drafts = measure_costs(model, None, None, *how), []
    for plan in plans:
        model.prepare(plan)
        drafts.append(measure_costs(model, model, plan, *how, known=known, patience=PATIENCE).draft)
    parts = np.linalg.lstsq([counts_of(plan) for plan in plans], drafts, rcond=None)[0]
    none, drawn = NoDraft(model.vocab_size, model.device), Coupling(coupling, 0)
    plain = round_of(model, filled_cache(model, 1), none, 0, params, drawn, fresh=True)
    token = torch.tensor(0, device=model.device)
    logits = torch.zeros(model.vocab_size, dtype=model.dtype, device=model.device)
    one, reading = take_turns([plain, partial(raw_probability, logits, token)], REPEATS, model.device)
    return SublayerCosts(parts.clip(min=0).tolist(), min(reading) / min(one), known.verify, known.per_extra_token)


def predicted(
    calibration: Calibration,
    costs: SublayerCosts,
    plan: LayerPlan,
    gammas: Sequence[int] = GAMMAS,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Prediction:
    """Prediction for a plan on the texts of the calibration, at the best of these draft lengths and thresholds."""
    acceptance, table = calibration.acceptance(plan), costs.table(costs.draft(plan))
    return predict(acceptance, table, gammas, thresholds, confidence=costs.confidence)


def parameters(plan: LayerPlan) -> dict[str, int]:
    """Optuna's parameters of a plan."""
    attention = {f"attn {layer}": bits for layer, bits in enumerate(plan.attention)}
    return attention | {f"mlp {layer}": bits for layer, bits in enumerate(plan.mlp)} | {HEAD: plan.head}


def plan_of(params: Mapping[str, int]) -> LayerPlan:
    """Plan of Optuna's parameters: the inverse of ``parameters``."""
    layers = range(len(params) // 2)
    attention, mlp = (tuple(params[f"{kind} {layer}"] for layer in layers) for kind in ("attn", "mlp"))
    return LayerPlan(attention, mlp, params[HEAD])


def space_of(num_layers: int, bits: Collection[int]) -> Space:
    """Space of plans whose sublayers have the checkpoint's bits or any of ``bits`` (0: skipped; not for the head)."""
    choices = [FULL, *sorted(set(bits), reverse=True)]
    sublayers = dict.fromkeys(parameters(LayerPlan.full(num_layers)), choices)
    return {**sublayers, HEAD: [each for each in choices if each]}


def importances(calibration: Calibration) -> dict[str, float]:
    """Importance of each sublayer: the share of first drafted tokens that the target rejects when it alone is skipped.

    Keys are the names of ``parameters``.
    """
    full, lost = parameters(LayerPlan.full(calibration.model.num_layers)), {}
    for name in track(full.keys() - {HEAD}, "importance of each sublayer", console=Console(stderr=True)):
        found = calibration.acceptance(plan_of({**full, name: 0}))
        firsts = zip(found.accept[:, 0], found.lengths, strict=True)
        lost[name] = 1 - float(sum(row[:length].sum() for row, length in firsts) / found.lengths.sum())
    return lost


def starts(lost: Mapping[str, float], space: Space) -> list[LayerPlan]:
    """Plans of the space to try first: all sublayers in each number of bits, early exits, the least important skipped.

    The latter two in the checkpoint's bits and in the fewest. ``lost`` are the importances.
    """
    layers, order = len(lost) // 2, sorted(lost, key=lambda name: (lost[name], name))
    full = LayerPlan.full(layers)
    counts = [max(1, round(share * len(order))) for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)]
    plans = [plan_of({**parameters(full), **dict.fromkeys(order[:count], 0)}) for count in counts]
    plans += [LayerPlan.early_exit(layers, max(1, round(share * layers))) for share in (0.25, 0.4, 0.5, 0.75, 0.9)]
    low = sorted({*space[HEAD]} - {FULL})
    rounded = [full.in_bits(bits, head=low[-1]) for bits in low]
    rounded += [plan.in_bits(low[0], head=low[-1]) for plan in plans if low]
    allowed = [plan for plan in [*rounded, *plans] if all(n in space[name] for name, n in parameters(plan).items())]
    return [plan for plan in dict.fromkeys(allowed) if plan != full]


def open_study(path: Path, identity: Mapping[str, Any], sampler: str, seed: int, *, resume: bool) -> optuna.Study:
    """Study in the journal ``path``; a new one has no trials.

    ``identity`` is a JSON object of model, prompts, sampling parameters, bits and version. Raises InputError when there
    are trials but not to ``resume``, or of another identity, and when the file is no journal.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the log would break the progress bar
    warnings.filterwarnings("ignore", category=FutureWarning)
    wrong = f"{path} is not a search's journal: remove it or give another --out"
    with explaining(wrong, (ValueError, KeyError, TypeError, AssertionError)):
        storage = JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(study_name=NAME, storage=storage, direction="maximize", load_if_exists=True)
        count, found = len(study.get_trials(deepcopy=False)), study.user_attrs.get("identity", {})
    if count and not resume:
        raise InputError(f"{path} holds an earlier search: give --resume to continue it, or another --out")
    if count and found != identity:
        differ = ", ".join(key for key in identity if found.get(key) != identity[key])
        raise InputError(f"{path} holds another search (other {differ}): give another --out, or remove it")
    study.sampler = SAMPLERS[sampler](seed=seed + count)  # does not repeat the draws of earlier trials
    return study


def split(texts: Sequence[Continuation]) -> tuple[list[Continuation], list[Continuation]]:
    """Texts to search with, and held-out texts: every fourth. Raises InputError for too few or too short texts."""
    if len(texts) < HELD_OUT or sum(len(text.written) for text in texts) < LEAST_TOKENS:
        raise InputError(
            f"a search needs at least {HELD_OUT} prompts that fit the model's context, and {LEAST_TOKENS} tokens after "
            "them in all: give more prompts or a larger --max-new-tokens"
        )
    return [text for at, text in enumerate(texts, 1) if at % HELD_OUT], [*texts[HELD_OUT - 1 :: HELD_OUT]]


def begin(study: optuna.Study, identity: dict[str, Any], setting: Setting, seed: int) -> None:
    """Store calibration texts, costs and the first plans in a new study.

    Stores nothing when another process has begun the study meanwhile: all predictions use the same texts and costs.
    """
    model, params = setting.model, setting.params
    say("writing calibration texts, and measuring the costs of sublayers")
    count, prompts = identity["prompts"]
    texts = calibration_texts(model, setting.tokenizer, params, seed, prompts, count)
    lost = importances(Calibration(model, split(texts)[0], params, setting.coupling, depths=1))
    costs = measure_sublayers(model, params, setting.coupling)
    if not study.get_trials(deepcopy=False):
        stored = {"identity": identity, "texts": [asdict(text) for text in texts], "costs": costs._asdict()}
        for name, value in stored.items():
            study.set_user_attr(name, value)
        for plan in starts(lost, space_of(model.num_layers, identity["bits"])):
            study.enqueue_trial(parameters(plan))


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials of a study, by all processes."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def optimise(study: optuna.Study, objective: Callable[[LayerPlan], Prediction], space: Space, trials: int) -> None:
    """Run trials until the study has ``trials`` finished ones, including those of other processes.

    A plan that was tried before keeps its value and is not evaluated again; a random neighbour of it comes next.
    Each further process may finish one trial more.
    """

    def run(trial: Trial) -> float:
        params = {name: trial.suggest_categorical(name, choices) for name, choices in space.items()}
        plan, known = plan_of(params), tried(study)
        prediction = known.get(plan) or objective(plan)
        if plan in known:
            rng = random.Random(trial.number)
            name = rng.choice(list(space))
            study.enqueue_trial({**params, name: rng.choice(space[name])}, skip_if_exists=True)
        trial.set_user_attr("prediction", asdict(prediction))
        return prediction.speedup

    if (missing := trials - len(finished(study))) > 0:
        enough = MaxTrialsCallback(trials, states=(TrialState.COMPLETE,))
        study.optimize(run, missing, callbacks=[enough], show_progress_bar=True)


def tried(study: optuna.Study) -> dict[LayerPlan, Prediction]:
    """All tried plans with their predictions, the best first."""
    best_first = sorted(finished(study), key=lambda trial: (-trial.value, trial.number))
    return {plan_of(trial.params): Prediction(**trial.user_attrs["prediction"]) for trial in best_first}
