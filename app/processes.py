"""Several processes that share a model, started by torchrun: SPMD, as in gpt-fast.

Every rank runs the same command and the same loop on its shard of the weights (``model.parallel``).
Rank 0 broadcasts options, prompt and seed once. After each round the ranks compare its tokens, and
learn of Ctrl-C on rank 0 and of its clock; only rank 0 prints. Every rank has all logits, each
computed by one rank, and the same seconds, so the ranks take the same steps.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from app.common.command_line import run_command
from app.options import Options
from app.prompt import read_prompt
from app.sample import Sample, Slot
from app.session import Session
from decoding.model_port import Model
from decoding.rounds import Round
from decoding.speculate import Observer
from model.errors import InputError, explaining
from model.parallel import Shard, exchange, split
from weights.load import load_model, model_fingerprint

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    return exchange(dist.all_gather_object, [None] * dist.get_world_size(), value)


@contextmanager
def sharing_errors() -> Iterator[None]:
    """Return a context that raises an InputError of any rank on all."""
    own = None
    try:
        yield
    except InputError as error:
        own = error
    for rank, error in enumerate(gathered(own)):
        if error:
            raise InputError(f"process {rank}: {error}")


class SharedSession(Session):
    """Session of one rank, on its shard of the model."""

    def __init__(self, options: Options, rank: int, size: int) -> None:
        super().__init__(options)
        self.interrupted = Event()  # by Ctrl-C
        shard = Shard(self.config, rank, size)
        self.local_config = shard.local
        super().check_memory(self.encode(options.prompt))
        self.model = split(load_model(self.folder, self.dtype, self.device, shard), shard)

    def check_memory(self, ids: Sequence[int] = ()) -> str:
        """Return nothing: the memory of the shard was checked before it was loaded."""
        return ""

    def rounds(
        self,
        sample: Sample,
        slot: Slot | None = None,
        target: Model | None = None,
        observer: Observer | None = None,
    ) -> Iterator[Round]:
        """Write as ``Session.rounds`` does; raises InputError where the ranks differ, and
        KeyboardInterrupt on all ranks after Ctrl-C on rank 0.
        """
        for round in super().rounds(sample, slot, target, observer):
            found = gathered((round.emitted, sample.seconds, self.interrupted.is_set()))
            if any(tokens != round.emitted for tokens, *_ in found):
                raise InputError("the processes disagree: run all on the same kind of hardware")
            _, seconds, is_interrupted = found[0]
            # All ranks take rank 0's seconds: a draft that times rounds must decide alike on all.
            sample.timeline[-1] = round, seconds
            yield round
            if is_interrupted:
                raise KeyboardInterrupt


def run_on_ranks(parse: Callable[[], Options], write: Callable[[Session], None]) -> NoReturn:
    """Run the command line of ``generate.py`` on every rank; ends the process with its status."""
    if (rank := os.environ.get("RANK", "0")).isdecimal() and int(rank):
        # Until the process ends.
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # At once: the interpreter would wait for the other ranks.
    os._exit(run_command(lambda: run(parse(), write)))


def run(options: Options, write: Callable[[Session], None]) -> None:
    """Meet the other ranks, agree on the options, load this rank's shard, and write."""
    if options.serve is not None or options.interactive or options.dry_run:
        raise InputError(
            "--serve, --interactive and --dry-run run in one process: start without torchrun"
        )
    on_gpus = (options.device or "cuda").startswith("cuda") and torch.cuda.is_available()
    with explaining(
        f"{', '.join(ENVIRONMENT)} must be as torchrun sets them",
        (KeyError, ValueError, RuntimeError),
    ):
        rank, size, local_rank = (int(os.environ[name]) for name in ENVIRONMENT)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    with sharing_errors():
        if rank == 0:
            options = replace(options.seeded(), prompt=read_prompt(options), prompt_file=None)
    device = f"cuda:{local_rank}" if on_gpus else options.device
    options = replace(gathered(options)[0], no_compile=True, device=device)
    with sharing_errors():
        session = SharedSession(options, rank, size)
    fingerprint = model_fingerprint(session.folder)
    with sharing_errors():
        if fingerprint != gathered(fingerprint)[0]:
            raise InputError("its model differs from process 0's: give all the same")
    signal.signal(signal.SIGINT, lambda *_: session.interrupted.set())
    write(session)
