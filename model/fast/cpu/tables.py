"""Arguments of a compiled step: model, rows and caches, as numbers, addresses and small arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_ROWS = 64  # tokens per step

# Rows of a layer's table of matrices, and the columns of such a table.
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
KIND, ADDRESS, ROW_BYTES, ROWS, BIAS = range(5)
ABSENT = -1  # kind of matrices that a plan skips, index of an absent bias


class Weights(NamedTuple):
    """Model under a layer plan.

    ``kind`` is that of the embedding, the cache and all weights not in low bits. Sizes count numbers, not bytes.
    ``attention_cap``, ``final_cap`` and windows are 0 where there is none. ``matrices`` ``[layers, 7, 5]`` and ``head``
    ``[1, 5]`` are tables of matrices; their biases are indices into ``biases``. ``norms`` is ``[layers, norms,
    hidden]``, with two norms per layer for Llama and four for Gemma-2; ``cos`` and ``sin`` are ``[positions, D / 2]``.
    Arrays of numbers are float32.
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
    """Tokens of a step: their ids, positions and the indices of their texts, all ``[rows]`` int64."""

    tokens: np.ndarray
    positions: np.ndarray
    texts: np.ndarray


class Cache(NamedTuple):
    """Caches of a step's texts, by address.

    ``entries`` ``[texts, layers, 2]``: addresses of keys and values; ``head_bytes`` ``[texts]``: bytes from one head
    to the next.
    """

    entries: np.ndarray
    head_bytes: np.ndarray
