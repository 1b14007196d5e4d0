"""One study, one process or several: each worker holds the model and the texts, and they share the journal."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import optuna
import torch

from decoding.costs import SublayerCosts
from decoding.sampling import SamplingParams
from model import Decoder, InputError
from model.fast import accelerate
from search.acceptance import Calibration, Text
from search.study import Evaluator, finished, join_study, optimise
from weights.load import load_model

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """All that a worker needs to know."""

    folder: Path
    dtype: torch.dtype
    device: torch.device
    texts: list[Text]
    params: SamplingParams
    coupling: str
    costs: SublayerCosts
    journal: Path
    sampler: str
    seed: int
    trials: int
    threads: int


def quiet_optuna() -> None:
    """Optuna's own lines would break the progress bar; what fails in a trial is raised anyway."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def run_alone(study: optuna.Study, model: Decoder, job: Job, on_trial: Callable[[], None]) -> None:
    """Work in this process, until the study has its trials."""
    evaluator = Evaluator(Calibration(model, job.texts, job.params, coupling=job.coupling), job.costs)
    optimise(study, evaluator, job.costs, model.num_layers, job.trials, on_trial)


def run_workers(study: optuna.Study, job: Job, workers: int, on_trial: Callable[[], None]) -> None:
    """Have ``workers`` new processes work on the study, and wait. Raises InputError when one of them ends early."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work, args=(job, number), daemon=True) for number in range(workers)]
    for process in processes:
        process.start()
    seen = len(finished(study))
    try:
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(POLL_SECONDS / workers)
            done = len(finished(study))
            for _ in range(done - seen):
                on_trial()
            seen = done
    finally:
        for process in processes:
            process.terminate()
            process.join()
    if len(finished(study)) < job.trials:
        raise InputError(
            "a worker of the search ended early (what it said is above): continue with --resume and fewer --workers "
            "if memory ran out"
        )


def _work(job: Job, number: int) -> None:
    with suppress(KeyboardInterrupt):  # the parent process says what there is to say
        quiet_optuna()
        torch.set_num_threads(job.threads)
        study = join_study(job.journal, job.sampler, job.seed + 1000 * number)
        run_alone(study, accelerate(load_model(job.folder, job.dtype, job.device)), job, lambda: None)
