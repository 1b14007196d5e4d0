"""Exponential race with keyed exponentials: the token of the least E/p, and the hash that makes E.

On a CPU ``race_among_few`` computes logarithms of a few ids only. Knows nothing of texts and seeds.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from decoding.rows import first_least

GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / φ: SplitMix64's step
INVERSE = pow(GOLDEN, -1, 2**64)
MIXERS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
# On a CPU a race of more possible tokens computes the exponentials of the likely ones, of p of at
# least 1 / FEW, and of the unlikely ones that could win.
FEW = 512


def race_at(probs: Tensor, keys: Tensor) -> Tensor:
    """Return the token of the least E/p of each row, with the exponentials E = -log u of its key:
    ``[rows, vocab]`` and ``[rows]`` int64 -> ``[rows]`` int64.
    """
    ids = torch.arange(probs.shape[-1], device=probs.device)
    # The counters are ids * GOLDEN + keys. Written so, torch's compiler would multiply ids in 32
    # bits, so they are (ids + keys / GOLDEN) * GOLDEN, modulo 2⁶⁴.
    counters = (ids + keys[:, None] * signed(INVERSE)) * signed(GOLDEN)
    bits = hash_in_place(counters)
    exponentials = -torch.log1p(complements(bits).double().mul_(-(2.0**-53)))
    return first_least(torch.where(probs > 0, exponentials / probs.double(), math.inf))


def race_among_few(probs: np.ndarray, key: int) -> int:
    """Return ``race_at`` of one row ``[vocab]`` on a CPU, with logarithms of a few ids only.

    After a filter these are the possible tokens. Of many possible tokens they are the likely ones,
    of p at least 1 / FEW, and the unlikely ones that could win. The winner's E/p is at most that of
    the likeliest token. E is at least 1 - u. So an unlikely token could win only if

        1 - u <= E = p · E/p < 1 / FEW · E/p of the likeliest token

    A row of 49,152 possible tokens takes .11 ms here and .23 by ``race_at``. A round has several.
    """
    racing = probs > 0
    possible = np.count_nonzero(racing)
    if possible < 2:  # a row of zeros has token 0, which is meaningless
        return racing.argmax().item()
    if possible > FEW:
        bits = hash_in_place(id_counters(len(probs)) + key).view(np.uint64)
        likeliest = probs.argmax()
        u = ((int(bits[likeliest]) >> 11) + 1) * 2.0**-53
        bound = -math.log(u) / float(probs[likeliest]) / FEW
        # In units of 2⁻⁶⁴, 1 - u is 2⁶⁴ - bits, rounded to 2¹¹. The bound is rounded too, so it is
        # raised by 2²⁰, far more than both.
        could_win = bits >= max(0, 2**64 - int(bound * 2**64) - 2**20)
        racing &= could_win | (probs >= 1 / FEW)
    ids = np.flatnonzero(racing)
    bits = hash_in_place(id_counters(len(probs))[ids] + key)
    exponentials = -np.log1p(complements(bits) * -(2.0**-53))
    return ids[(exponentials / probs[ids]).argmin()].item()


@lru_cache(maxsize=1)
def id_counters(vocab: int) -> np.ndarray:
    """Return the counter of each id before a place's key is added, int64 ``[vocab]``."""
    return np.arange(vocab) * signed(GOLDEN)


def complements(bits: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return 1 - u, int64 in units of 2⁻⁵³, of hashed ``bits``: 53 of them give u in (0, 1]."""
    return 2**53 - 1 - shifted(bits, 11)


def hash_in_place(counters: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return int64 ``counters`` of any shape after they were overwritten by SplitMix64's finaliser,
    whose products wrap around.
    """
    for shift, factor in MIXERS:
        counters ^= shifted(counters, shift)
        counters *= signed(factor)
    counters ^= shifted(counters, 31)
    return counters


def shifted(numbers: Tensor | np.ndarray, by: int) -> Tensor | np.ndarray:
    """Return the logical right shift by ``by`` bits, which torch lacks for signed numbers."""
    if isinstance(numbers, np.ndarray):
        return (numbers.view(np.uint64) >> by).view(np.int64)
    return (numbers >> by).bitwise_and_((1 << (64 - by)) - 1)


def signed(number: int) -> int:
    """Return the int64 with the 64 bits of an unsigned number."""
    return number - 2**64 if number >= 2**63 else number


def mix(*numbers: int) -> int:
    """Return a 64-bit key hashed from several numbers, by SplitMix64."""
    key = 0
    for number in numbers:
        key = ((key ^ number) + GOLDEN) % 2**64
        for shift, factor in MIXERS:
            key = (key ^ key >> shift) * factor % 2**64
        key ^= key >> 31
    return key
