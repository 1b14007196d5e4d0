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

from model.fast.cpu.kernels import I64, Value, address, compiled, instruction, pointer

# Words of the board, those that all threads write on cache lines of their own. UNCLAIMED is the
# number of pieces that nobody has claimed, 0 or less if there is none. At ARGUMENTS begin the
# arguments of a task, a word each.
UNCLAIMED = 0
DONE = 8  # by helpers
TASK, PIECES, LEAST, HELPERS, ARGUMENTS = range(16, 21)
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


def on_all_threads(function: Callable[..., Any], *arguments: Any) -> Any:
    """Result of a compiled function of the board and ``arguments``, which runs tasks on torch's
    number of threads.
    """
    with one_at_a_time:
        board[HELPERS] = torch.get_num_threads() - 1
        for number in range(board[HELPERS]):
            if number not in helpers or helpers[number].done():
                helpers[number] = pool.submit(help_with, board)
        return function(board, *arguments)


def compiled_task(task: Callable[[int, int, int], None], kind: int) -> int:
    """Address of a compiled task ``(arguments, first, end)`` for one kind of numbers.

    It does the pieces ``[first, end)``, with its arguments at that address.
    """
    # The name tells kinds apart where compiled code is kept.
    task.__qualname__ = f"{task.__name__}_{kind}"
    return cfunc("void(int64, int64, int64)", cache=True, error_model="numpy")(task).address


@instruction(types.int64(types.int64))
def atomic_load(builder: ir.IRBuilder, place: Value) -> Value:
    """Word at an address, read before all that follows."""
    return Value(builder, builder.load_atomic(pointer(place, I64).raw, "seq_cst", 8))


@instruction(types.int64(types.unicode_type, types.int64, types.int64), constants=1)
def atomic(builder: ir.IRBuilder, operation: str, place: Value, number: Value) -> Value:
    """Word at an address before ``operation`` by a number, LLVM's ``add`` or ``xchg``: an exchange.

    It comes after all that precedes, and before all that follows.
    """
    word = pointer(place, I64).raw
    return Value(builder, builder.atomic_rmw(operation, word, number.raw, "seq_cst"))


@instruction(types.void(*[types.int64] * 4))
def call(builder: ir.IRBuilder, task: Value, arguments: Value, first: Value, end: Value) -> None:
    """Call of a task by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
    builder.call(pointer(task, kind).raw, [arguments.raw, first.raw, end.raw])


@compiled()
def work(board: np.ndarray) -> int:
    """Claim pieces until none is left, and do them: their number."""
    place = address(board)
    done = 0
    unclaimed = atomic_load(place + 8 * UNCLAIMED)
    while unclaimed > 0:
        share = max(board[LEAST], unclaimed // (SHARES * (board[HELPERS] + 1)))
        left = atomic("add", place + 8 * UNCLAIMED, -share)
        if left > 0:
            # The board stays as it is until all claimed pieces are done, so it is read only now.
            first = board[PIECES] - left
            taken = min(share, left)
            call(board[TASK], place + 8 * ARGUMENTS, first, first + taken)
            done += taken
        unclaimed = left - share
    return done


@compiled(cache=True, no_cpython_wrapper=False)
def run(board: np.ndarray, task: int, pieces: int, least: int, arguments: tuple[int, ...]) -> None:
    """Run all pieces of a task, ``least`` or more at a time, with these ``arguments``."""
    place = address(board)
    board[ARGUMENTS : ARGUMENTS + len(arguments)] = arguments
    if pieces <= least or board[HELPERS] == 0:
        call(task, place + 8 * ARGUMENTS, 0, pieces)
        return
    board[TASK] = task
    board[PIECES] = pieces
    board[LEAST] = least
    board[DONE] = 0
    atomic("xchg", place + 8 * UNCLAIMED, pieces)
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
            atomic("add", address(board) + 8 * DONE, done)
        elif looks > AWAKE:
            let_others_run()
