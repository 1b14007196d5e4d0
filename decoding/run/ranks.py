"""Several processes that share a model, started by torchrun: SPMD, as in gpt-fast.

Every rank runs the same command and the same loop on its shard of the weights (``model.parallel``), and only rank 0
prints. Options, prompt, measured costs, draft lengths, target distributions, random draws, acceptances and Ctrl-C are
those of rank 0, broadcast where they enter the loop. All other decisions depend on integers and on whether a logit is
finite, and each logit is computed by one rank. So no two ranks diverge, however their hardware rounds.
"""

import math
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

from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.run import chooser
from decoding.run.costs import CostTable, measure_costs
from decoding.run.options import Request
from decoding.run.writer import Writer
from decoding.verify import Verify
from model import Decoder, InputError
from model.parallel import Shard, exchange, split
from weights.cli.command_line import run_command
from weights.cli.prompt import read_prompt
from weights.load import load_model, model_fingerprint
from weights.memory import check_fits, estimate

INTERRUPTED = Event()  # by Ctrl-C


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank. A tensor is overwritten."""
    if isinstance(value, Tensor):
        return exchange(dist.broadcast, value, 0)
    return exchange(dist.broadcast_object_list, [value], 0)[0]


def decide_as_rank_0(policy: Policy, randomness: Randomness, verify: Verify) -> tuple[Randomness, Verify]:
    """Replace the decisions of policy, randomness and rule on every rank by those of rank 0.

    Returns randomness and rule; the policy is changed in place. Ctrl-C on rank 0 ends the text on all ranks.
    """

    def shared(decide: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: from_rank_0(decide(*arguments))

    def verify_probs_of_rank_0(probs: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        if from_rank_0(INTERRUPTED.is_set()):
            raise KeyboardInterrupt
        return verify(from_rank_0(probs), *more)

    for name in ("draft_length", "keep_drafting", "choose"):
        setattr(policy, name, shared(getattr(policy, name)))
    for name in ("draw", "draw_each", "accept"):
        setattr(randomness, name, shared(getattr(randomness, name)))
    return randomness, verify_probs_of_rank_0


def costs_of_rank_0(way: chooser.Drafting, setting: chooser.Setting) -> CostTable:
    """``chooser.costs_of``, measured on rank 0 at every start, since kept costs differ between machines."""
    how = {"context": setting.context, "patience": math.inf}
    return from_rank_0(measure_costs(setting.model, way.model, way.plan, setting.params, setting.coupling, **how))


def run_on_ranks(parse: Callable[[], Namespace], write: Callable[[Request, Decoder], int]) -> NoReturn:
    """The command line by the parts of ``generate.py``, on every rank; ends the process with its exit status."""
    if os.environ["RANK"] != "0":
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    os._exit(run_command(lambda: run(parse(), write)))  # at once: the interpreter would wait for the other ranks


def run(options: Namespace, write: Callable[[Request, Decoder], int]) -> int:
    """Meet the other ranks, check the request, load this rank's shard, and write."""
    if options.serve:
        raise InputError("--serve runs in one process, for now: start it without torchrun")
    on_gpus = (options.device or "cuda").startswith("cuda") and torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0 and options.prompt_file is not None:
        options.prompt, options.prompt_file = read_prompt(options.prompt, options.prompt_file), None
    options = Namespace(**from_rank_0(vars(options)))
    if on_gpus:
        options.device = f"cuda:{os.environ['LOCAL_RANK']}"
    if rank:
        options.html = None
    try:
        request = Request(options)
        shard, needs = Shard(request.config, rank, size), request.needs()
        low_bits = request.draft.kind == "lowbit" or (needs["plan"] and needs["plan"].has_low_bits)
        if low_bits and request.draft.kind != "auto":
            raise InputError("several processes draft without low bits: give --draft lookup or exit, or another --plan")
        whole, part = (estimate(config, **{**needs, "plan": None}) for config in (shard.config, shard.local))
        sharers = 1 if on_gpus else int(os.environ["LOCAL_WORLD_SIZE"])
        # Every rank has all logits, which are in the workspace of the whole model.
        fits = check_fits(replace(part, workspace=whole.workspace), request.device, sharers)
        found = fits, (needs, request.ids, options.dry_run or model_fingerprint(request.folder))
    except InputError as error:
        found = str(error), None
    ranks = exchange(dist.all_gather_object, [None] * size, found)
    for number, (line, files) in enumerate(ranks):
        if files is None or files != ranks[0][1]:
            raise InputError(f"process {number}: {'it has other files than process 0' if files else line}")
    if options.dry_run:
        print("\n".join(f"process {number} of {size}: {line}" for number, (line, _) in enumerate(ranks)))
        return 0
    model = split(load_model(request.folder, request.dtype, request.device, shard), shard)
    signal.signal(signal.SIGINT, lambda *_: INTERRUPTED.set())
    Writer.decide, chooser.costs_of = staticmethod(decide_as_rank_0), costs_of_rank_0
    return write(request, model)
