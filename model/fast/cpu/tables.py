"""What a compiled step reads of a model, of a cache and of its rows: numbers, addresses and small arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_ROWS = 64

# Matrices of a layer, in the order of their rows in its table, and the columns of such a table.
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
KIND, ADDRESS, ROW_BYTES, ROWS, BIAS = range(5)
ABSENT = -1  # the kind of matrices that a plan leaves out; the place of a bias where there is none


class Weights(NamedTuple):
    """A model under a layer plan, as a step reads it.

    ``kind`` is that of the embedding, of the cache and of all that is not in low bits. Sizes are in numbers;
    ``attention_cap``, ``final_cap`` and windows are 0 where there is none. ``matrices`` ``[layers, 7, 5]`` and ``head``
    ``[1, 5]`` are tables of matrices; their biases are places in ``biases``. ``norms`` ``[layers, norms, hidden]``: two
    of a Llama, four of a Gemma-2. ``cos`` and ``sin`` ``[positions, D / 2]``. All numbers are float32.
    """

    kind: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    embedding: int
    embedding_scale: np.float32
    eps: np.float32
    attention_scale: np.float32
    attention_cap: np.float32
    final_cap: np.float32
    is_gemma: bool
    matrices: np.ndarray
    head: np.ndarray
    biases: np.ndarray
    norms: np.ndarray
    final_norm: np.ndarray
    windows: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Rows(NamedTuple):
    """The tokens of a step: ids, positions, and the number of each one's text, all ``[rows]`` int64."""

    tokens: np.ndarray
    positions: np.ndarray
    texts: np.ndarray


class Cache(NamedTuple):
    """The caches of a step's texts, wherever they lie.

    ``entries`` ``[texts, layers, 2]``: addresses of keys and values; ``head_bytes`` ``[texts]``: bytes from one head
    to the next.
    """

    entries: np.ndarray
    head_bytes: np.ndarray
