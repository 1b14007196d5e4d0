"""Compiling and keeping of functions, arrays by address, and instructions that Numba lacks.

Compiled code is kept in a folder whose name is a hash of its ``SOURCES``, so stale code never runs:
Numba's cache alone notices a change in the file of a function, but not in the files of the
functions that it calls. The settings of Numba here, and one class that is replaced, hold for the
whole process.

Instructions are written with numbers and vectors of LLVM's IR that have Python's operators
(``Value``). Such code runs while Numba compiles a function: ``a + b`` appends an addition to that
function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, partialmethod, wraps
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import caching, cgutils
from numba.core.typing import Signature
from numba.extending import intrinsic

from model import quantise
from model.places import cache_folder, version

LANES = 16
I8, I16, I32, I64 = map(ir.IntType, (8, 16, 32, 64))
FLOAT = ir.FloatType()
SHORTS = ir.VectorType(I16, LANES)
INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(FLOAT, LANES)


class Locator(caching.UserProvidedCacheLocator):
    """Locator of compiled code that is independent of the path of the sources."""

    def get_cache_path(self) -> str:
        return numba.config.CACHE_DIR

    def ensure_cache_path(self) -> None:
        """Do nothing: ``KernelFile`` passes over a folder that cannot be used."""


class KernelFile(caching.IndexDataCacheFile):
    """Kept code of a function: if damaged compiled again, in a read-only folder not kept."""

    def load(self, key: Any) -> Any:
        with suppress(Exception):  # unpickling damaged bytes may raise anything
            return super().load(key)
        with suppress(OSError):
            self.flush()  # else the damaged index would also stop ``save``
        return None

    def save(self, key: Any, data: Any) -> None:
        with suppress(OSError):
            super().save(key, data)


# files whose functions and constants are compiled
SOURCES = [*Path(__file__).parent.glob("*.py"), Path(quantise.__file__)]


def kernel_folder(sources: Iterable[Path] = SOURCES) -> Path:
    """Folder for compiled code of these sources; below NUMBA_CACHE_DIR if that is set."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_folder() / "kernels")
    folder /= version(sources)
    with suppress(OSError):  # read-only: every process compiles
        folder.mkdir(parents=True, exist_ok=True)
    return folder


KERNELS = kernel_folder()
# Numba reads both where a function is declared, in the files of this folder.
numba.config.CACHE_DIR = str(KERNELS)
numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{Locator.__name__}"
caching.IndexDataCacheFile = KernelFile  # Numba has no setting for it

# Division by zero gives infinity: Python's check for it would prevent vectorisation.
compiled = partial(
    njit, error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@dataclass(frozen=True)
class Value:
    """Number or vector of LLVM's IR with Python's operators; a Python number beside it is a
    constant of its type.
    """

    builder: ir.IRBuilder
    raw: ir.Value

    @property
    def is_float(self) -> bool:
        """Whether this is a float32 number, or a vector of them."""
        kind = self.raw.type
        return getattr(kind, "element", kind) == FLOAT

    def constant(self, number: float) -> Value:
        """Constant of this value's type, the same in all lanes of a vector."""
        kind = self.raw.type
        content = [number] * kind.count if isinstance(kind, ir.VectorType) else number
        return Value(self.builder, ir.Constant(kind, content))

    def combine(self, operation: str, other: Value | float) -> Value:
        """Result of a builder's method, or for float32 of its floating-point variant."""
        other = other if isinstance(other, Value) else self.constant(other)
        method = getattr(self.builder, f"f{operation}" if self.is_float else operation)
        return Value(self.builder, method(self.raw, other.raw))

    __add__ = partialmethod(combine, "add")
    __sub__ = partialmethod(combine, "sub")
    __mul__ = partialmethod(combine, "mul")
    __floordiv__ = partialmethod(combine, "sdiv")
    __and__ = partialmethod(combine, "and_")
    __or__ = partialmethod(combine, "or_")
    __lshift__ = partialmethod(combine, "shl")
    __rshift__ = partialmethod(combine, "lshr")

    def __lt__(self, other: Value) -> Value:
        compare = self.builder.fcmp_ordered if self.is_float else self.builder.icmp_signed
        return Value(self.builder, compare("<", self.raw, other.raw))

    def select(self, a: Value, b: Value) -> Value:
        """Value ``a`` where this one is true, else ``b``."""
        return Value(self.builder, self.builder.select(self.raw, a.raw, b.raw))

    def cast(self, kind: ir.Type, operation: str = "bitcast") -> Value:
        """Result of a builder's conversion to another type: by default the same bits."""
        return Value(self.builder, getattr(self.builder, operation)(self.raw, kind))

    def shuffle(self, lanes: list[int], other: Value | None = None) -> Value:
        """Vector of these lanes, counted on in ``other``."""
        numbers = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        more = (other or self).raw
        return Value(self.builder, self.builder.shuffle_vector(self.raw, more, numbers))

    def call(self, name: str, result: ir.Type, *more: Value | ir.Constant) -> Value:
        """Result of an LLVM intrinsic, called with this value and ``more``."""
        arguments = [each.raw if isinstance(each, Value) else each for each in (self, *more)]
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        return Value(self.builder, self.builder.call(function, arguments))


def instruction(
    signature: Signature, constants: int = 0
) -> Callable[[Callable[..., Value | None]], Any]:
    """Decorator of a function that appends instructions. Compiled functions call it with this
    signature, and get the value that it returns.

    The function receives a builder and the operands. The first ``constants`` of them must be
    constants of the caller and are Python's numbers; the others are values.
    """

    def declare(append: Callable[..., Value | None]) -> Any:
        @intrinsic(prefer_literal=constants > 0)
        @wraps(append)  # Numba takes the names of the operands from it
        def typed(typing: Any, *operands: Any, **named: Any):
            literals = operands[:constants]

            def generate(
                context: Any, builder: ir.IRBuilder, signature: Signature, raw: list[ir.Value]
            ) -> ir.Value:
                values = (Value(builder, each) for each in raw[constants:])
                result = append(builder, *(each.literal_value for each in literals), *values)
                return context.get_dummy_value() if result is None else result.raw

            return signature.replace(args=literals + signature.args[constants:]), generate

        return typed

    return declare


class Sum:
    """Sum of products, as 16 partial sums in float32 that LLVM keeps in a register."""

    def __init__(self, builder: ir.IRBuilder, start: Value | None = None) -> None:
        raw = start.raw if start else ir.Constant(FLOATS, [0.0] * LANES)
        self.place = Value(builder, cgutils.alloca_once_value(builder, raw))

    @property
    def value(self) -> Value:
        return Value(self.place.builder, self.place.builder.load(self.place.raw))

    def add(self, multiply_add: Callable[[Value, Value, Value], Value], a: Value, b: Value) -> None:
        """Add a · b."""
        self.place.builder.store(multiply_add(self.value, a, b).raw, self.place.raw)


@contextmanager
def turns(count: Value) -> Iterator[Value]:
    """Loop of ``count`` turns, which yields its index; not unrolled, to compile fast."""
    with cgutils.for_range(count.builder, count.raw) as loop:
        yield Value(count.builder, loop.index)
    module = count.builder.module
    _, last = loop.index.incomings[1]
    not_unrolled = module.add_metadata(["llvm.loop.unroll.disable"])
    last.terminator.set_metadata("llvm.loop", module.add_metadata([not_unrolled]))


def in_blocks(count: Value, size: int, append: Callable[[Value, Value | None], None]) -> None:
    """Loop over ``count`` columns: ``append(first, None)`` for each block of ``size``, then
    ``append(first, left)`` for those left over.
    """
    whole = count // size
    with turns(whole) as turn:
        append(turn * size, None)
    rest = whole * size
    with count.builder.if_then((rest < count).raw):
        append(rest, count - rest)


def on_lanes(function: str, x: Value, *more: Value) -> Value:
    """LLVM's ``function`` of 16 lanes of float32, such as ``fma`` and ``floor``, lane by lane."""
    return x.call(f"llvm.{function}.v{LANES}f32", FLOATS, *more)


def pointer(address: Value, kind: ir.Type) -> Value:
    """Pointer of this type to an address."""
    return Value(address.builder, address.builder.inttoptr(address.raw, kind.as_pointer()))


def load(address: Value, kind: ir.Type, count: Value | None = None) -> Value:
    """Value of this type at any address; with ``count`` the lanes after it are 0."""
    place = pointer(address, kind)
    if count is None:
        return Value(place.builder, place.builder.load(place.raw, align=1))
    mask = first_lanes(kind.count, count)
    nothing = ir.Constant(kind, None)
    return place.call(masked("load", kind), kind, ir.Constant(I32, 1), mask, nothing)


def store(address: Value, value: Value, count: Value | None = None) -> None:
    """Store a number or vector at any address; with ``count``, only its first lanes."""
    kind = value.raw.type
    place = pointer(address, kind)
    if count is None:
        place.builder.store(value.raw, place.raw, align=1)
        return
    mask = first_lanes(kind.count, count)
    value.call(masked("store", kind), ir.VoidType(), place, ir.Constant(I32, 1), mask)


def masked(operation: str, kind: ir.VectorType) -> str:
    """Name of LLVM's masked load or store of a vector of float32 or int16."""
    return f"llvm.masked.{operation}.v{kind.count}{'f32' if kind.element == FLOAT else 'i16'}.p0"


def prefetch(address: Value) -> None:
    """Bring the cache line of an address into the second cache.

    The first would be too near: fewer of its lines than of the second's can be on their way.
    """
    settings = [ir.Constant(I32, each) for each in (0, 2, 1)]  # to read, from level 2 on, data
    pointer(address, I8).call("llvm.prefetch.p0", ir.VoidType(), *settings)


def first_lanes(lanes: int, count: Value) -> Value:
    """Boolean mask of the first ``count`` lanes."""
    counts = broadcast(count, lanes)
    return Value(count.builder, ir.Constant(counts.raw.type, list(range(lanes)))) < counts


def broadcast(value: Value, lanes: int = LANES) -> Value:
    """Vector with ``value`` in every lane."""
    undefined = ir.Constant(ir.VectorType(value.raw.type, lanes), ir.Undefined)
    first = value.builder.insert_element(undefined, value.raw, ir.Constant(I32, 0))
    return Value(value.builder, first).shuffle([0] * lanes)


def add_lanes(vectors: list[Value]) -> Value:
    """Sum of the lanes of each of 1, 2, 4, 8 or 16 vectors, as one vector with a lane for each.

    In each step the upper half of a sum's lanes is added to its lower half. The halves of two
    vectors then share a register, so many sums take little longer than one.
    """
    width = LANES  # of a sum in each vector
    while width > 1:
        lanes = vectors[0].raw.type.count
        sources = (0, lanes) if len(vectors) > 1 else (0,)
        half = width // 2
        lower = [
            first + source + lane
            for first in range(0, lanes, width)
            for source in sources
            for lane in range(half)
        ]
        upper = [lane + half for lane in lower]
        pairs = (len(vectors) + 1) // 2
        vectors = [
            a.shuffle(lower, b) + a.shuffle(upper, b)
            for a, b in zip(vectors[:pairs], vectors[-pairs:], strict=True)
        ]
        width = half
    return vectors[0]


@instruction(types.voidptr(types.int64))
def pointer_to(builder: ir.IRBuilder, place: Value) -> Value:
    """Pointer to an address, for ``carray``."""
    return pointer(place, I8)


@compiled()
def array_at(place: int, count: int, dtype: type) -> np.ndarray:
    """Array of ``count`` numbers or records at an address."""
    return carray(pointer_to(place), count, dtype)


@compiled()
def address(array: np.ndarray) -> int:
    """Address of an array's first number, signed as all integers here. It does not keep the array:
    see ``keep_alive``.
    """
    return np.int64(array.ctypes.data)


@compiled()
def keep_alive(array: np.ndarray) -> None:
    """Do nothing, after the last use of an array by its address.

    Numba frees an array after its last use by name. So the function that makes an array for others
    to use by its address names it once more here, where it is no longer used.
    """
