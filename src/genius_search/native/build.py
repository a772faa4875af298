"""Compile ``search.c``, ``python -m genius_search.native.build``, and open what was compiled.

The build of a wheel or an editable installation does this too (``hatch_build.py``). This module uses only the
standard library, because the build runs it before anything is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("search.c")
FOLDER: Final = SOURCE.with_name("lib")
"""Where the libraries are; no package, since they are not modules."""
FLAGS: Final = ("-std=gnu11", "-O3", "-fno-math-errno", "-shared", "-fvisibility=hidden", "-s")
IS_X86: Final = platform.machine().lower() in ("x86_64", "amd64")
AVX2: Final = ("-mavx2", "-mfma")
AVX512: Final = tuple(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "vnni"))
VARIANTS: Final = {
    **({"avx512": (*AVX2, "-mbmi2", *AVX512), "avx2": AVX2} if IS_X86 else {}),
    "baseline": (),
}
"""Compiler flags of each library, the best processor's first."""
OLDEST_GLIBC: Final = "2.17"
"""The C library that a wheel needs on Linux, if Zig compiles it."""
CODES: Final = 256
"""Most codes at a level, and the length of a level's row in all tables."""
BLOCK: Final = 64
"""Outputs of a matrix that lie side by side."""
NO_MEMORY: Final = -2
"""Status of a function that had no memory."""


def library(variant: str, folder: Path = FOLDER) -> Path:
    """Return the path of a compiled library. Its name changes with the machine and the source."""
    suffix = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return folder / f"search-{platform.machine()}-{variant}-{source}.{suffix}"


def find_compilers() -> Iterator[list[str]]:
    """Yield the commands of this machine's compilers: ``$CC``, the package ziglang's, the system's.

    Zig comes before the system's compiler because what it makes also runs on older systems.
    """
    if os.environ.get("CC"):
        yield shlex.split(os.environ["CC"])
    if importlib.util.find_spec("ziglang") is not None:
        target = []
        if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
            target = ["-target", f"{platform.machine()}-linux-gnu.{OLDEST_GLIBC}"]
        yield [sys.executable, "-m", "ziglang", "cc", *target]
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            yield [name]


def platform_tag(compiler: list[str]) -> str:
    """Return the platform of a wheel with what this compiler made."""
    if f"{platform.machine()}-linux-gnu.{OLDEST_GLIBC}" in compiler:
        return f"manylinux_{OLDEST_GLIBC.replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_variants(compiler: list[str], folder: Path = FOLDER) -> str | None:
    """Compile the library for all kinds of processors at once; return the compiler's message if it fails."""
    command = [*compiler, *FLAGS, *(() if sys.platform == "win32" else ("-fPIC",))]
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work, ThreadPoolExecutor() as pool:
        outputs = {Path(work) / library(variant).name: flags for variant, flags in VARIANTS.items()}
        commands = [
            [*command, *flags, "-o", str(path), str(SOURCE)] for path, flags in outputs.items()
        ]
        try:
            results = [*pool.map(run, commands)]
        except OSError as error:
            return str(error)
        for done, output in zip(results, outputs, strict=True):
            if done.returncode or not output.exists():
                return done.stderr.strip() or f"exit status {done.returncode}"
        for output in outputs:
            output.replace(folder / output.name)
    return None


def build(folder: Path = FOLDER) -> list[str] | None:
    """Compile with the first compiler that works and return its command; without one, return None."""
    for old in folder.glob("search-*-*.*"):
        old.unlink()
    for compiler in find_compilers():
        problem = compile_variants(compiler, folder)
        if problem is None:
            return compiler
        sys.stderr.write(f"{shlex.join(compiler)} cannot compile the search: {problem}\n")
    return None


def main() -> None:
    """Compile, and say with what. With ``--install-compiler`` get one from the Python index if none works."""
    if all(library(variant).exists() for variant in VARIANTS):
        return
    compiler = build()
    if compiler is None and "--install-compiler" in sys.argv:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "ziglang"], check=False)
        importlib.invalidate_caches()
        compiler = build()
    if compiler is None:
        sys.stderr.write(
            "no C compiler found: searches need PyTorch, and take a few times longer\n"
        )
    else:
        sys.stderr.write(f"compiled the search with {shlex.join(compiler)}\n")


@cache
def open_library(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Open the library for this processor; return None, and log it, if there is none."""
    for variant in VARIANTS:
        path = library(variant, folder)
        if path.exists():
            opened = ctypes.CDLL(str(path))
            if opened.is_supported():
                pointer, integer = ctypes.c_void_p, ctypes.c_int64
                opened.make_work.restype = pointer
                opened.search.argtypes = (
                    pointer,
                    pointer,
                    integer,
                    *[pointer] * 3,
                    integer,
                    pointer,
                )
                opened.nearest_sums.argtypes = (*[pointer] * 3, *[integer] * 3, pointer)
                opened.sum_by_code.argtypes = (pointer, pointer, integer, integer, pointer)
                opened.sum_by_code.restype = None
                return opened
    logging.getLogger(__name__).info(
        "the compiled library is missing; NumPy and PyTorch (extra train) replace it, a few times slower; "
        "`python -m genius_search.native.build` compiles it"
    )
    return None


if __name__ == "__main__":
    main()
