"""Compiled ``step.c``: its structures, and calls of its functions.

It is compiled at the first run on a machine, by the system's C compiler. Knows nothing of models.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from ctypes import c_float, c_int32, c_long, c_void_p
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from model.errors import InputError
from model.places import cache_folder, version

STEP = Path(__file__).with_name("step.c")
SOURCES = [STEP, *map(STEP.with_name, ("products.h", "attention.h", "threads.h", "round.h"))]
FLAGS = [
    *("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    *("-shared", "-fPIC", "-pthread"),
]
# for x86: whole registers, and a tile's inputs stay in them, unlike with GCC's tuning for Zen
TUNING = "-mtune=skylake-avx512 -mprefer-vector-width=512"
one_at_a_time = threading.Lock()  # step.c has one pool of threads, and one memory of a step


def structure(name: str, fields: dict[str, type]) -> type[ctypes.Structure]:
    """Return a structure of ``step.c``. A key of ``fields`` holds the names of fields of a type."""
    each = [(part, kind) for names, kind in fields.items() for part in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": each})


CMatrix = structure("CMatrix", {"weights bias": c_void_p, "kind rows columns": c_long})
CLayer = structure(
    "CLayer",
    {
        "qkv": CMatrix * 3,
        "o": CMatrix,
        "gate_up": CMatrix * 2,
        "down": CMatrix,
        "attention_norm attention_post_norm mlp_norm mlp_post_norm": c_void_p,
        "q_norm k_norm cos sin": c_void_p,
        "window": c_long,
    },
)
CModel = structure(
    "CModel",
    {
        "layers embedding norm": c_void_p,
        "head": CMatrix,
        "num_layers kind hidden heads key_heads size newest": c_long,
        "embedding_scale eps scale soft_cap final_soft_cap": c_float,
        "is_gelu": c_int32,
    },
)
CText = structure("CText", {"tokens entries": c_void_p, "rows start head_bytes": c_long})


def compiler() -> list[str]:
    """Return the command of a C compiler: the system's, or that of the package ``ziglang``. Raises
    InputError where there is none.
    """
    if shutil.which("cc"):
        return ["cc"]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise InputError("there is no C compiler: install one as cc, or run pip install ziglang")


def machine_flags() -> list[str]:
    """Return the compiler's options for this processor, or for the one in SPECDEC_MARCH."""
    name = os.environ.get("SPECDEC_MARCH", "native")
    is_arm = platform.machine() in ("aarch64", "arm64")
    return f"-mcpu={name}".split() if is_arm else f"{TUNING} -march={name}".split()


def cpu_identity() -> list[str]:
    """Return lines that tell this processor from those that may lack some of its instructions."""
    names = "model name", "flags", "CPU part", "Features"
    lines = {platform.machine()}
    with suppress(OSError):
        told = Path("/proc/cpuinfo").read_text().splitlines()
        lines.update(line for line in told if line.startswith(names))
    return sorted(lines)


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled step. It is kept in the cache folder, by its source, the compiler's
    options and the processor. Raises InputError where it cannot be compiled.
    """
    flags = [*FLAGS, *machine_flags()]
    machine = hashlib.sha256("\n".join([*flags, *cpu_identity()]).encode()).hexdigest()
    kept = cache_folder() / "step" / f"{version(SOURCES)}-{machine[:16]}.so"
    with suppress(OSError):  # absent, or damaged
        return ctypes.CDLL(str(kept))
    print("compiling the decoding step for this machine, once", file=sys.stderr)
    with TemporaryDirectory() as folder:
        made = Path(folder) / kept.name
        command = [*compiler(), *flags, str(STEP), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = [line for line in done.stderr.splitlines() if "error" in line][:1]
            raise InputError(f"{command[0]} cannot compile {STEP.name}: {' '.join(why)}")
        with suppress(OSError):  # a full disk, or a folder that cannot be written
            kept.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=kept.parent) as beside:
                os.replace(shutil.copy(made, beside), kept)
        return ctypes.CDLL(str(made))


def call(function: str, *arguments: object) -> None:
    """Call a function of ``step.c`` on torch's number of threads."""
    with one_at_a_time:
        library().use_threads(c_long(torch.get_num_threads()))
        getattr(library(), function)(*arguments)
