"""Several processes that share a model, started by torchrun: SPMD, as in gpt-fast.

Every rank runs the same command and the same loop on its shard of the weights (``model.parallel``),
and only rank 0 prints. Options, prompt, draft lengths, target distributions, random draws,
acceptances and Ctrl-C are those of rank 0, broadcast where they enter the loop. All other decisions
depend on integers and on whether a logit is finite, and each logit is computed by one rank. So no
two ranks diverge, however their hardware rounds.
"""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from app.command_line import run_command
from app.files import explaining
from app.prompt import read_prompt
from app.request import Request
from app.session import Session
from app.writer import Decisions
from model import InputError, Shard, exchange, split
from weights.load import load_model, model_fingerprint
from weights.memory import check_fits, estimate

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
DECISIONS = {"draft_length", "keep_drafting", "choose", "draw", "draw_each", "accept"}
INTERRUPTED = Event()  # by Ctrl-C


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank. A tensor is overwritten."""
    if isinstance(value, Tensor):
        return exchange(dist.broadcast, value, 0)
    return exchange(dist.broadcast_object_list, [value], 0)[0]


class OfRank0:
    """Policy, or source of randomness, whose ``DECISIONS`` are those of rank 0."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return (lambda *given: from_rank_0(found(*given))) if name in DECISIONS else found


def decide_as_rank_0(decisions: Decisions) -> Decisions:
    """Policy, randomness and rule whose decisions on every rank are those of rank 0.

    Ctrl-C on rank 0 ends the text on all ranks.
    """
    policy, randomness, verify = decisions

    def verify_probs_of_rank_0(probs: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        if from_rank_0(INTERRUPTED.is_set()):
            raise KeyboardInterrupt
        return verify(from_rank_0(probs), *more)

    return OfRank0(policy), OfRank0(randomness), verify_probs_of_rank_0


def run_on_ranks(parse: Callable[[], Namespace], write: Callable[[Session], None]) -> NoReturn:
    """The command line of ``generate.py`` on every rank; ends the process with its status."""
    if (rank := os.environ.get("RANK", "0")).isdecimal() and int(rank):
        # Until the process ends.
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # At once: the interpreter would wait for the other ranks.
    os._exit(run_command(lambda: run(parse(), write)))


def run(options: Namespace, write: Callable[[Session], None]) -> None:
    """Meet the other ranks, check the request, load this rank's shard, and write."""
    if options.serve or options.interactive or options.svg:
        raise InputError(
            "--serve, --interactive and --svg run in one process: start without torchrun"
        )
    on_gpus = (options.device or "cuda").startswith("cuda") and torch.cuda.is_available()
    with explaining(
        f"{', '.join(ENVIRONMENT)} must be as torchrun sets them",
        (KeyError, ValueError, RuntimeError),
    ):
        rank, size, local_rank, sharers = (int(os.environ[name]) for name in ENVIRONMENT)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    if rank == 0 and options.prompt_file is not None:
        options.prompt = read_prompt(options.prompt, options.prompt_file)
        options.prompt_file = None
    options = Namespace(**from_rank_0(vars(options)))
    if on_gpus:
        options.device = f"cuda:{local_rank}"
    if rank:
        options.html = None
    facts = None
    try:
        request = Request(options)
        shard = Shard(request.config, rank, size)
        said = check_shard_fits(request, shard, 1 if on_gpus else sharers)
        facts = request.needs(), request.ids, options.dry_run or model_fingerprint(request.folder)
    except InputError as error:
        said = str(error)
    lines = lines_of_ranks(said, facts)
    if options.dry_run:
        for number, each in enumerate(lines):
            print(f"process {number} of {size}: {each}")
        return
    model = split(load_model(request.folder, request.dtype, request.device, shard), shard)
    signal.signal(signal.SIGINT, lambda *_: INTERRUPTED.set())
    write(Session(request, model, decide_as_rank_0))


def check_shard_fits(request: Request, shard: Shard, sharers: int) -> str:
    """Line of the memory that this rank takes. Raises InputError where it is too small, and for a
    draft in low bits.
    """
    needs = request.needs()
    plan = needs.pop("plan")
    if plan and plan.has_low_bits:
        raise InputError(
            "several processes draft without low bits: give --draft lookup or exit, or another"
            " --plan"
        )
    whole = estimate(shard.config, **needs)
    part = estimate(shard.local, **needs)
    # Every rank has all logits, which are in the workspace of the whole model.
    return check_fits(replace(part, workspace=whole.workspace), request.device, sharers)


def lines_of_ranks(said: str, facts: Any) -> list[str]:
    """Line of each rank. Raises InputError, on all ranks, where one's ``facts`` are None, since
    what it ``said`` is an error, and where they are not those of rank 0.
    """
    found = exchange(dist.all_gather_object, [None] * dist.get_world_size(), (said, facts))
    for number, (line, theirs) in enumerate(found):
        if theirs is None:
            raise InputError(f"process {number}: {line}")
        if theirs != found[0][1]:
            raise InputError(f"process {number}: its model or prompt differs from process 0's")
    return [line for line, _ in found]
