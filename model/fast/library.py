"""Compiled ``step.c``, and the structures and functions that it declares.

It is compiled at the first run on a machine, by the system's C compiler, with the numbers of
``model.quantise``. Knows nothing of models.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from model.errors import InputError, explaining
from model.places import cache_folder, version
from model.quantise import CUTS, FITS, GROUP, LEVELS

STEP = Path(__file__).with_name("step.c")
SOURCES = [STEP, *sorted(STEP.parent.glob("*.h"))]
# the C of the step, without comments
CODE = re.sub(r"/\*.*?\*/", "", "".join(map(Path.read_text, SOURCES)), flags=re.DOTALL)
FLAGS = [
    *("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    *("-shared", "-fPIC", "-pthread"),
    *(f"-DGROUP={GROUP}", f"-DLEVELS={LEVELS}", f"-DCUTS={CUTS}", f"-DFITS={FITS}"),
]
# for x86: whole registers, and a tile's inputs stay in them, unlike with GCC's tuning for Zen
TUNING = "-mtune=skylake-avx512 -mprefer-vector-width=512"

TYPES = {
    "char": ctypes.c_char,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "long": ctypes.c_long,
}
# a name, and whether it is an address or an array, such as "*const *entries" or "qkv[3]"; arrays of
# addresses are not read
NAME = r"(?:(\*)(?:const \*)?(?!\w+\[))?(\w+)(?:\[(\d+)\])?"
DECLARATION = re.compile(rf"\s*(?:const )?(?P<type>\w+) (?P<names>{NAME}(?:,\s*{NAME})*)")
# functions that are not static and have parameters: result, name, parameters
EXPORTED = re.compile(
    r"^(?!static |INLINE )(\w[\w *]*?)(\w+)\((?!void\))([^)]*)\) \{", re.MULTILINE
)


def declared(declaration: str) -> list[tuple[str, type]]:
    """Return the names and types that a declaration of C gives: numbers, structures, arrays of
    these, and addresses. Raises ValueError for any other C, which a call would misread.
    """
    found = DECLARATION.fullmatch(declaration)
    if not found:
        raise ValueError(f"{STEP.name}: cannot read the declaration {declaration.strip()!r}")
    kind = TYPES.get(found["type"]) or structure(found["type"])
    # a structure is refused where another is expected; numbers are only known by their address
    address = ctypes.c_void_p if found["type"] in TYPES else ctypes.POINTER(kind)
    return [
        (name, address if star else kind * int(count) if count else kind)
        for star, name, count in re.findall(NAME, found["names"])
    ]


@functools.cache
def structure(name: str) -> type[ctypes.Structure]:
    """Return a structure of the step, with the fields that its C declares. Raises ValueError for a
    name that it does not declare.
    """
    found = re.search(rf"typedef struct \{{([^}}]*)\}} {name};", CODE)
    if not found:
        raise ValueError(f"{STEP.name} declares no structure {name}")
    fields = [field for each in found[1].split(";")[:-1] for field in declared(each)]
    # without a place for other names, a misspelt one is refused
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


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
    name = os.environ.get("SPECDEC_MARCH") or "native"
    is_arm = platform.machine() in ("aarch64", "arm64")
    return f"-mcpu={name}".split() if is_arm else f"{TUNING} -march={name}".split()


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled step, whose functions with parameters refuse arguments that their C does
    not declare.

    Raises InputError where it cannot be compiled or loaded, and ValueError for a function whose
    result is other than none or an int, which a call would misread.
    """
    step = load()
    for result, name, parameters in EXPORTED.findall(CODE):
        if result.strip() not in ("void", "int"):
            raise ValueError(f"{STEP.name}: {name} must return void or int, not {result.strip()}")
        types = [declared(each)[0][1] for each in parameters.split(",")]
        getattr(step, name).argtypes = types
    return step


def load() -> ctypes.CDLL:
    """Compile the step, or load it from the cache folder; return it. It is kept there by its
    source, the compiler's options and the processor. Raises InputError where neither is possible.
    """
    flags = [*FLAGS, *machine_flags()]
    told = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = "model name", "flags", "CPU part", "Features"
    processor = {platform.machine(), *(line for line in told if line.startswith(names))}
    machine = hashlib.sha256("\n".join([*flags, *sorted(processor)]).encode()).hexdigest()
    kept = cache_folder() / "step" / f"{version(SOURCES)}-{machine[:16]}.so"
    with suppress(OSError):  # absent, or no library
        return ctypes.CDLL(str(kept))
    logging.getLogger(__name__).warning("[compiling the decoding step for this machine, once]")
    trouble = "the compiled step cannot be loaded: set TMPDIR to a folder where programs may run"
    with explaining(trouble), TemporaryDirectory() as folder:
        made = Path(folder) / kept.name
        command = [*compiler(), *flags, str(STEP), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.splitlines() or [f"it ends with status {done.returncode}"]
            why = next((line for line in said if "error" in line), said[0])
            raise InputError(f"{command[0]} cannot compile {STEP.name}: {why}")
        with suppress(OSError):  # a full disk, or a folder that cannot be written
            kept.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=kept.parent) as beside:
                os.replace(shutil.copy(made, beside), kept)
            return ctypes.CDLL(str(kept))  # where programs may not run in the other folder
        return ctypes.CDLL(str(made))
