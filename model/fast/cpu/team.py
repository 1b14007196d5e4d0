"""Threads of a step: the calling thread and its helpers claim small pieces of work.

Beside another program a thread may lose its core for milliseconds, and a loop of OpenMP waits for
every thread at its end, a hundred times per step. Here the caller waits for pieces that a helper
has claimed, never for a helper that has not begun: without any it does all pieces itself. Who does
a piece does not change its bits.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from model.fast.cpu.dot import I64
from model.fast.cpu.elements import address, compiled

# Words of the board, those that all threads write on cache lines of their own. CLAIMS counts the
# regions so far in its upper bits, and the pieces that nobody has claimed in its lower bits.
CLAIMS = 0
DONE = 8
TASK, PIECES, LEAST, HELPERS, ARGUMENTS = range(16, 21)
REGION = 1 << 20  # more than the pieces of a region
SHARES = 2  # a thread claims this part of an equal share of the pieces that nobody has claimed
AWAKE = 2000  # looks for work before a thread lets other programs run between two of them
PATIENCE = 6000  # looks for work before a helper sleeps
# yields the core to another thread or program
let_others_run = types.ExternalFunction(
    "sched_yield" if os.name == "posix" else "SwitchToThread", types.int32()
)

one_at_a_time = threading.Lock()  # of the compiled functions that use the board
board = np.zeros(64, np.int64)
pool = ThreadPoolExecutor(os.cpu_count(), "step")
helpers: dict[int, Future] = {}


def wake_helpers() -> None:
    """Wake as many helpers as torch has threads beside the caller's."""
    board[HELPERS] = torch.get_num_threads() - 1
    for number in range(board[HELPERS]):
        if number not in helpers or helpers[number].done():
            helpers[number] = pool.submit(help_with, board)


def compiled_task(task: Callable[[int, int, int], None], kind: int) -> int:
    """Address of a compiled task ``(board, first, end)`` for one kind of numbers."""
    # The name tells kinds apart where compiled code is kept.
    task.__qualname__ = f"{task.__name__}_{kind}"
    return cfunc("void(int64, int64, int64)", cache=True, error_model="numpy")(task).address


def word_at(builder: ir.IRBuilder, place: ir.Value) -> ir.Value:
    """Pointer to the word at an address."""
    return builder.inttoptr(place, I64.as_pointer())


@intrinsic
def atomic_load(typing: Any, place: Any):
    """Word at an address, read before all that follows."""
    return types.int64(types.int64), lambda context, builder, signature, given: builder.load_atomic(
        word_at(builder, given[0]), "seq_cst", 8
    )


@intrinsic
def atomic_add(typing: Any, place: Any, number: Any):
    """Add to the word at an address, after all that precedes."""
    return types.int64(
        types.int64, types.int64
    ), lambda context, builder, signature, given: builder.atomic_rmw(
        "add", word_at(builder, given[0]), given[1], "seq_cst"
    )


@intrinsic
def compare_and_swap(typing: Any, place: Any, old: Any, new: Any):
    """Whether the word at an address was ``old``, and is now ``new``."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        found = builder.cmpxchg(word_at(builder, given[0]), *given[1:], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def call(typing: Any, task: Any, board: Any, first: Any, end: Any):
    """Call of a task by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 3).as_pointer()

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, given: Any) -> ir.Value:
        builder.call(builder.inttoptr(given[0], kind), given[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@compiled()
def work(board: np.ndarray) -> int:
    """Claim pieces until none is left, and do them: their number."""
    place = address(board)
    done = 0
    while True:
        claims = atomic_load(place)
        task = board[TASK]
        pieces = board[PIECES]
        least = board[LEAST]
        left = claims % REGION
        if left == 0:
            return done
        taken = min(left, max(least, left // (SHARES * (board[HELPERS] + 1))))
        # Nobody has claimed a piece in between, so all that was read is of the claims' region.
        if compare_and_swap(place, claims, claims - taken):
            call(task, place, pieces - left, pieces - left + taken)
            done += taken


@compiled()
def run(board: np.ndarray, task: int, pieces: int, least: int, arguments: tuple[int, ...]) -> None:
    """Run all pieces of a task, ``least`` or more at a time. It finds ``arguments`` on the
    board.
    """
    place = address(board)
    for index in range(len(arguments)):
        board[ARGUMENTS + index] = arguments[index]
    if pieces <= least or board[HELPERS] == 0:
        call(task, place, 0, pieces)
        return
    board[TASK] = task
    board[PIECES] = pieces
    board[LEAST] = least
    board[DONE] = 0
    atomic_add(place + 8 * CLAIMS, REGION + pieces)
    by_helpers = pieces - work(board)
    looks = 0
    while atomic_load(place + 8 * DONE) < by_helpers:
        looks += 1
        if looks > AWAKE:
            let_others_run()


@compiled(cache=True, no_cpython_wrapper=False)
def help_with(board: np.ndarray) -> None:
    """Work of a helper, until there has been none for a while."""
    looks = 0
    while looks < PATIENCE:
        done = work(board)
        looks = 0 if done else looks + 1
        if done:
            atomic_add(address(board) + 8 * DONE, done)
        elif looks > AWAKE:
            let_others_run()
