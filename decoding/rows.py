"""Functions of rows of a vocabulary: how a GPU computes them, and reductions in two levels.

Torch's compiler gives the argmin or the running sum of a whole row to one block of threads, while
all others wait. Chunks occupy all of them.

Knows nothing of sampling and texts.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.device import compiled
from model.errors import typed_line

COMPARED = 256  # numbers of a chunk in which the least is found
# Numbers of a chunk of a sum. More than 128 chunks would be divided among blocks of threads again,
# which add their sums as they come: Gemma 3's 262,144 tokens are 128 chunks.
ADDED = 2048
NOT_COMPILED: set[Callable[..., Tensor]] = set()  # functions on which the compiler failed


def compute(function: Callable[..., Tensor], rows: Tensor, *more: Any) -> Tensor:
    """Return the result of a function that works row by row; on a GPU it is compiled.

    The same code computes any number of rows, so the bits of a row do not depend on the others. If
    compiling fails, a warning is logged that says why, and the function itself runs.
    """
    if rows.device.type == "cpu" or function in NOT_COMPILED:
        return function(rows, *more)
    try:
        return by_compiled_code(compiled(function), rows, *more)
    except torch.OutOfMemoryError:  # says nothing of the compiler
        raise
    except Exception as error:  # of compilers and drivers
        NOT_COMPILED.add(function)
        logging.getLogger(__name__).warning(
            "[%s runs uncompiled: %s]", function.__name__, typed_line(error)
        )
        return function(rows, *more)


def by_compiled_code(code: Callable[..., Tensor], rows: Tensor, *more: Any) -> Tensor:
    """Return the results of code that takes two rows or more, and numbers as tensors: other
    numbers must not compile it again.
    """

    def prepared(argument: Any) -> Any:
        if isinstance(argument, float):
            return torch.tensor(argument, dtype=torch.float64)
        if isinstance(argument, Tensor):
            if len(argument) == 1:  # a single row would have code of its own
                argument = torch.cat((argument, argument))
            torch._dynamo.mark_dynamic(argument, 0)
        return argument

    return code(*map(prepared, (rows, *more)))[: len(rows)]


def first_least(numbers: Tensor) -> Tensor:
    """Return the place of the least number of each row, of equal ones the first: ``[..., n]`` ->
    ``[...]`` int64. In a row with a NaN any place may be returned.
    """
    least, places = chunks_of(numbers, COMPARED, math.inf).min(-1)
    chunk = least.argmin(-1, keepdim=True)
    # a row of infinities must not give a place of the padding
    return (chunk * COMPARED + places.gather(-1, chunk))[..., 0].clamp(max=numbers.shape[-1] - 1)


def running_sums(numbers: Tensor) -> Tensor:
    """Return the cumulative sums along the last dimension, in the shape of ``numbers``."""
    sums = chunks_of(numbers, ADDED, 0.0).cumsum(-1)
    before = F.pad(sums[..., -1], (1, -1)).cumsum(-1)
    return (sums + before[..., None]).flatten(-2)[..., : numbers.shape[-1]]


def chunks_of(numbers: Tensor, size: int, padding: float) -> Tensor:
    """Return the chunks of each row, ``[..., chunks, size]``; the last one is padded."""
    missing = -numbers.shape[-1] % size
    return F.pad(numbers, (0, missing), value=padding).unflatten(-1, (-1, size))
