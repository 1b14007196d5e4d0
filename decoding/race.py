"""Exponential race with keyed exponentials: the token of the least E/p, and the hash that makes E.

On a CPU a race computes logarithms of a few ids only. Knows nothing of texts and seeds.
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
# On a CPU a race of more possible tokens computes the exponentials of those with p of at least
# 1 / FEW, and of those with a small 1 - u.
FEW = 512


def race_at(probs: Tensor, keys: Tensor) -> Tensor:
    """Return the token of the least E/p of each row, with the exponentials E = -log u of its key:
    ``[rows, vocab]`` and ``[rows]`` int64 -> ``[rows]`` int64.
    """
    ids = torch.arange(probs.shape[-1], device=probs.device)
    # This is ids * GOLDEN + keys, which torch's compiler would begin in 32 bits.
    counters = (ids + keys[:, None] * signed(INVERSE)) * signed(GOLDEN)
    exponentials = -torch.log1p(complements(hashed(counters)).double().mul_(-(2.0**-53)))
    return first_least(torch.where(probs > 0, exponentials / probs.double(), math.inf))


def race_among_few(probs: np.ndarray, key: int) -> int:
    """Return ``race_at`` of one row ``[vocab]`` on a CPU, with logarithms of a few ids only.

    After a filter these are the possible tokens. Of many possible tokens they are the likely ones,
    of p at least 1 / FEW, and those of a small 1 - u. E is at least 1 - u, so another token can win
    only if its 1 - u is below the E/p of the likeliest token, divided by FEW.

    A row of 49,152 possible tokens takes .11 ms here and .23 by ``race_at``. A round has several.
    """
    few = probs > 0
    count = np.count_nonzero(few)
    if count < 2:  # a row of zeros has token 0, which is meaningless
        return few.argmax().item()
    if count > FEW:  # the least E/p is at most that of the likeliest token
        bits = hashed(id_counters(len(probs)) + key).view(np.uint64)
        likeliest = probs.argmax()
        arrival = -math.log(((int(bits[likeliest]) >> 11) + 1) * 2.0**-53) / float(probs[likeliest])
        # 2²⁰ more than the bound in units of 2⁻⁶⁴, since it is rounded
        close = bits >= max(0, 2**64 - 2**20 - int(arrival / FEW * 2**64))
        few &= close | (probs >= 1 / FEW)
    ids = np.flatnonzero(few)
    counters = id_counters(len(probs))[ids] + key
    exponentials = -np.log1p(complements(hashed(counters)) * -(2.0**-53))
    return ids[(exponentials / probs[ids]).argmin()].item()


@lru_cache(maxsize=1)
def id_counters(vocab: int) -> np.ndarray:
    """Return the counter of each id before a place's key is added, int64 ``[vocab]``."""
    return np.arange(vocab) * signed(GOLDEN)


def complements(bits: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return 1 - u, int64 in units of 2⁻⁵³, of hashed ``bits``: 53 of them give u in (0, 1]."""
    return 2**53 - 1 - shifted(bits, 11)


def hashed(counters: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Return SplitMix64's finaliser of int64 ``counters`` of any shape, in place, which wrap
    around.
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
