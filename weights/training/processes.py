"""The processes that train together under ``torchrun``, and the one thing they exchange: gradients."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from model import InputError


@dataclass(frozen=True)
class Group:
    """This process's number, how many there are, and its number on this machine. Alone it needs no set-up."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def join(cls, device: str | None) -> Group:
        """Meet the processes that torchrun started, each on a GPU of its own unless ``device`` is cpu.

        Raises InputError when there are fewer GPUs than processes.
        """
        rank, size, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if size <= 1:
            return cls()
        if device == "cpu" or not torch.cuda.is_available():
            dist.init_process_group("gloo")
        elif local_rank >= torch.cuda.device_count():
            raise InputError(f"{torch.cuda.device_count()} GPUs are too few: lower torchrun's --nproc-per-node")
        else:
            torch.cuda.set_device(local_rank)
            dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
        return cls(rank, size, local_rank)

    @property
    def leads(self) -> bool:
        """Whether this is the first process: the one that writes and speaks."""
        return self.rank == 0

    def place(self, device: torch.device) -> torch.device:
        """Where this process trains: its own GPU, if it shares the machine with others."""
        return torch.device("cuda", self.local_rank) if device.type == "cuda" and self.size > 1 else device

    def average(self, gradients: list[Tensor], losses: list[float]) -> list[float]:
        """Replace each gradient by its mean over the processes, in one exchange; returns the mean losses."""
        if self.size == 1:
            return losses
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), gradients[0].new_tensor(losses)])
        dist.all_reduce(flat)
        flat /= self.size
        *means, kept = flat.split([*(gradient.numel() for gradient in gradients), len(losses)])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        return kept.tolist()

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """The first process runs the block alone; then the others do, and find the files it has written.

        Raises InputError in the others when the first process has not come through.
        """
        if self.size > 1 and not self.leads:
            try:
                dist.barrier()
            except RuntimeError:  # the connection is gone
                raise InputError("the first process could not begin, and has said why") from None
        yield
        if self.size > 1 and self.leads:
            dist.barrier()


def end(status: int) -> NoReturn:
    """End this process, and at once where it is one of several.

    An interpreter that ends by itself takes the threads of their connection down while they run, and may abort.
    """
    if dist.is_available() and dist.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    sys.exit(status)
