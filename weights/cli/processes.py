"""Processes that torchrun started to share a model: how they meet, and how they end together.

Whatever goes wrong, in whichever of them, is told in one line, once: a process that would complain first asks the store
where all have met, which counts complaints. The store is torchrun's, and outlives them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from model import InputError
from model.leader import ParallelDecoder
from model.parallel import exchange
from weights.cli.device import pick_device

ENDED = "a process that shares the model has ended, or torchrun was told to end: all of them end"
LEAD = 0.3  # seconds


class Processes:
    """This process and those that share a model with it: alone unless torchrun started several."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1) -> None:
        """Numbers and counts: among all, and among those on this machine."""
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, local_size
        self.store: dist.Store | None = None
        self.decoder: ParallelDecoder | None = None  # the leader's, once there is one
        self.told = False  # whether the followers know what they are to do

    @classmethod
    def started(cls) -> Processes:
        """As torchrun says in the environment."""
        names = ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)
        return cls(*(int(os.environ.get(*name)) for name in names))

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def leads(self) -> bool:
        """Whether this is the first process: the one that is given the work, and speaks."""
        return self.rank == 0

    def meet(self, arguments: Sequence[str]) -> None:
        """Connect. Raises InputError where another process was given other arguments."""
        self.store, rank, size = next(dist.rendezvous("env://"))
        self.watch()
        backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "cpu:gloo"
        exchange(dist.init_process_group, backends, store=self.store, rank=rank, world_size=size)
        for other, given in enumerate(self.gather(list(arguments))):
            if given != list(arguments):
                raise InputError(
                    f"processes {min(other, rank)} and {max(other, rank)} were given different options: start all of "
                    "them with the same command"
                )

    def watch(self) -> None:
        """End at once on SIGTERM, by which torchrun ends the others of a process that died; Ctrl-C is the leader's.

        In a thread: the main one may wait for what a dead process owes it.
        """
        reader, writer = os.pipe()  # Python writes the number of each signal into it
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, self.interrupt if self.leads else signal.SIG_IGN)

        def wait() -> None:
            while os.read(reader, 1)[0] != signal.SIGTERM:
                pass
            if self.first_to_complain():
                print(f"\nerror: {ENDED}", file=sys.stderr, flush=True)  # perhaps within a text
            os._exit(2)

        threading.Thread(target=wait, daemon=True).start()

    def interrupt(self, *_: object) -> None:
        """Ctrl-C: once, though both the terminal and torchrun may send it."""
        if self.decoder is not None:
            self.decoder.interrupt()
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt

    def first_to_complain(self) -> bool:
        """Whether no process has said yet why all end. The leader is let go first: it ends the line of its text."""
        if not self.leads:
            time.sleep(LEAD)
        try:
            return self.store is None or self.store.add("complaints", 1) == 1
        except RuntimeError:  # the store went with the process that kept it
            return True

    def tell(self, demand: Any) -> None:
        """The leader's word to its followers, who wait for it: what they are to hold, or None that there is nothing."""
        self.told = True
        exchange(dist.broadcast_object_list, [demand], 0)

    def hear(self) -> Any:
        """What the leader tells."""
        heard = [None]
        exchange(dist.broadcast_object_list, heard, 0)
        return heard[0]

    def dismiss(self) -> None:
        """Let the followers go, wherever they wait."""
        if self.decoder is not None:
            self.decoder.end()
        elif not self.told:
            self.tell(None)

    def gather(self, value: Any) -> list[Any]:
        """The value of every process."""
        values = [None] * self.size
        exchange(dist.all_gather_object, values, value)
        return values

    def pick_device(self, name: str | None) -> torch.device:
        """``weights.cli.device.pick_device``; where several processes use GPUs, each has one of its own."""
        if not self.several or (name or "cuda").split(":")[0] != "cuda" or not torch.cuda.is_available():
            return pick_device(name)
        if self.local_rank >= torch.cuda.device_count():
            raise InputError(f"{torch.cuda.device_count()} GPUs are too few: lower torchrun's --nproc-per-node")
        torch.cuda.set_device(self.local_rank)  # before anything is put on another
        return pick_device(f"cuda:{self.local_rank}")


ALONE = Processes()
