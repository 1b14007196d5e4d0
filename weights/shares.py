"""A model that several processes share: what each is to hold, checked and loaded, and who is given the work.

The leader, the first process, does the work of the command line; the others follow it (``model.leader``). It tells them
what they are to hold, so that they read no prompt and parse no options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model import Decoder, InputError, ModelConfig
from model.fast import accelerate
from model.leader import ParallelDecoder, follow
from model.parallel import Share
from weights.cli.command_line import run_command
from weights.cli.processes import Processes
from weights.fingerprint import model_fingerprint
from weights.load import load_model, read_config
from weights.memory import check_fits, estimate


@dataclass(frozen=True)
class Demand:
    """What every process is to hold a share of: ``needs`` are what ``estimate`` asks for besides the config.

    ``fingerprint``: that of the leader's model; ``load``: whether memory is not all that is asked about.
    """

    folder: Path
    device: str
    needs: dict[str, Any]
    fingerprint: str
    load: bool

    def check(self, processes: Processes) -> str:
        """The line that says what this process would hold and what is free. Raises InputError where it cannot."""
        try:
            device, share = processes.pick_device(self.device), self.share(processes)
            if self.load and model_fingerprint(self.folder) != self.fingerprint:
                raise InputError(f"{self.folder} is another model than in process 0: give all the same files")
            needs = self.needs if share.leads else {**self.needs, "draft": None}
            memory = estimate(share.config, **needs, share=share)
            line = check_fits(memory, device, processes.local_size if device.type == "cpu" else 1)
        except InputError as error:
            raise InputError(f"process {processes.rank}: {error}") from None
        return f"process {processes.rank} of {processes.size}: {line}"

    def share(self, processes: Processes) -> Share:
        """What of the model is this process's. Raises InputError where heads do not divide."""
        return Share(read_config(self.folder), processes.rank, processes.size)


def check_memory(
    processes: Processes, folder: Path, config: ModelConfig, device: torch.device, needs: dict[str, Any], load: bool
) -> str:
    """``check_fits`` of a model on its device, or of each process's share of it: a line each.

    Several processes then wait to ``load``, or end.
    """
    if not processes.several:
        return check_fits(estimate(config, **needs, fast_on=device), device)
    Share(config, processes.rank, processes.size)  # raises where heads do not divide
    demand = Demand(folder, device.type, needs, model_fingerprint(folder) if load else "", load)
    processes.tell(demand)
    return "\n".join(processes.gather(demand.check(processes)))


def load_ready(
    processes: Processes, folder: Path, dtype: torch.dtype, device: torch.device, compiled: bool = True
) -> Decoder:
    """The model of a folder, prepared to decode: alone by ``model.fast``, else split, with the readable blocks."""
    if not processes.several:
        return accelerate(load_model(folder, dtype, device), compiled)
    share = Share(read_config(folder), processes.rank, processes.size)
    processes.decoder = ParallelDecoder(load_model(folder, dtype, device, share), share)
    return processes.decoder


def run_together(work: Callable[[Processes], int], arguments: Sequence[str] | None) -> int:
    """``run_command``, for a command line that torchrun may have started several times to share one model.

    ``arguments``: those of the command line (None: this process's), which must be everyone's. Returns the exit status;
    where something failed, the other processes end too, and this one exits here.
    """
    processes = Processes.started()
    if not processes.several:
        return run_command(lambda: work(processes))
    given = sys.argv[1:] if arguments is None else arguments
    status = run_command(lambda: take_part(work, processes, given), complains=processes.first_to_complain)
    if status in (0, 130):
        dist.destroy_process_group()
        return status
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # the interpreter would first wait for what other processes owe


def take_part(work: Callable[[Processes], int], processes: Processes, arguments: Sequence[str]) -> int:
    """Do the leader's work, and let the followers go afterwards; or follow."""
    processes.meet(arguments)
    if not processes.leads:
        return hold_share(processes)
    try:
        return work(processes)
    finally:
        with suppress(InputError):
            processes.dismiss()


def hold_share(processes: Processes) -> int:
    """A follower's life; returns its exit status."""
    demand = processes.hear()
    if demand is None:
        return 0
    processes.gather(demand.check(processes))
    if demand.load:
        share = demand.share(processes)
        follow(load_model(demand.folder, demand.needs["dtype"], processes.pick_device(demand.device), share), share)
    return 0
