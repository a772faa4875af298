"""Compile ``search.c`` into a shared library, and open the library.

``python -m genius_search.native.build`` compiles it, and so does the build of a wheel or of an
editable installation (``hatch_build.py``). The build runs this module before anything is installed,
so it uses only the standard library.

On x86, the source is compiled three times, with AVX-512, AVX2 and baseline instructions.
:func:`open_library` opens the best library that the processor supports.
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
INCLUDED: Final = tuple(
    SOURCE.with_name(name)
    for name in (
        "structures.h",
        "products.c",
        "sorting.c",
        "generator.c",
        "beam.c",
        "ids.c",
        "cells.c",
        "embeddings.c",
        "codes.c",
    )
)
"""Files that the source includes."""
FOLDER: Final = SOURCE.with_name("lib")
"""The folder of the compiled libraries. It is no package, since they are not Python modules."""
FLAGS: Final = ("-std=gnu11", "-O3", "-fno-math-errno", "-shared", "-fvisibility=hidden", "-s")
IS_X86: Final = platform.machine().lower() in ("x86_64", "amd64")
AVX2: Final = ("-mavx2", "-mfma")
AVX512: Final = tuple(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "vnni"))
VARIANTS: Final = {
    **({"avx512": (*AVX2, "-mbmi2", *AVX512), "avx2": AVX2} if IS_X86 else {}),
    "baseline": (),
}
"""Name of each library -> its compiler flags, fastest first."""
OLDEST_GLIBC: Final = "2.17"
"""The oldest C library on which a wheel runs on Linux, if it was compiled by Zig."""
CODES: Final = 256
"""Maximum number of codes at a level, and the length of a level's row in all tables (search.c)."""
BLOCK: Final = 64
"""Number of outputs of a matrix that are stored next to each other (search.c)."""
NO_MEMORY: Final = -2
"""Status of a function of the library that could not allocate memory (search.c)."""


def library_path(variant: str, folder: Path = FOLDER) -> Path:
    """Return the path of a compiled library.

    Its name contains the machine and a hash of the source, so that an outdated library is never
    opened: ``search-x86_64-avx2-0123456789ab.so``.
    """
    suffix = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
    contents = b"".join(path.read_bytes() for path in (SOURCE, *INCLUDED))
    source_hash = hashlib.sha256(contents).hexdigest()[:12]
    return folder / f"search-{platform.machine()}-{variant}-{source_hash}.{suffix}"


def find_compilers() -> Iterator[list[str]]:
    """Yield the commands of the available compilers: ``$CC``, Zig (package ziglang), the system's.

    Zig precedes the system's compiler because its output also runs on older systems.
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
    """Return the platform tag of a wheel with libraries of this compiler."""
    if f"{platform.machine()}-linux-gnu.{OLDEST_GLIBC}" in compiler:
        return f"manylinux_{OLDEST_GLIBC.replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_variants(compiler: list[str], folder: Path = FOLDER) -> str | None:
    """Compile all variants of the library in parallel; return the error message if one fails.

    The libraries appear in the folder only if all variants could be compiled.
    """
    command = [*compiler, *FLAGS, *(() if sys.platform == "win32" else ("-fPIC",))]
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work, ThreadPoolExecutor() as pool:
        outputs = {
            Path(work) / library_path(variant).name: flags for variant, flags in VARIANTS.items()
        }
        commands = [
            [*command, *flags, "-o", str(output), str(SOURCE)] for output, flags in outputs.items()
        ]
        try:
            results = [*pool.map(run, commands)]
        except OSError as error:
            return str(error)
        for result, output in zip(results, outputs, strict=True):
            if result.returncode or not output.exists():
                return result.stderr.strip() or f"exit status {result.returncode}"
        for output in outputs:
            output.replace(folder / output.name)
    return None


def build(folder: Path = FOLDER) -> list[str] | None:
    """Compile with the first compiler that works and return its command, or None if none works."""
    for outdated in folder.glob("search-*-*.*"):
        outdated.unlink()
    for compiler in find_compilers():
        problem = compile_variants(compiler, folder)
        if problem is None:
            return compiler
        sys.stderr.write(f"{shlex.join(compiler)} cannot compile the search: {problem}\n")
    return None


def is_compiled(folder: Path = FOLDER) -> bool:
    """Return whether all variants of the library are up to date."""
    return all(library_path(variant, folder).exists() for variant in VARIANTS)


def main() -> None:
    """Compile the library unless it is up to date, and print the compiler's command.

    With ``--install-compiler``, pip installs Zig if no compiler works.
    """
    if is_compiled():
        return
    compiler = build()
    if compiler is None and "--install-compiler" in sys.argv:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "ziglang"], check=False)
        importlib.invalidate_caches()
        compiler = build()
    if compiler is None:
        sys.stderr.write("no C compiler found: searches will take up to a hundred times longer\n")
    else:
        sys.stderr.write(f"compiled the search with {shlex.join(compiler)}\n")


@cache
def open_library(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Open the fastest library that this processor supports; log a warning if there is none."""
    for variant in VARIANTS:
        path = library_path(variant, folder)
        if path.exists():
            library = ctypes.CDLL(str(path))
            if library.is_supported():
                _declare_functions(library)
                return library
    logging.getLogger(__name__).warning(
        "the compiled library is missing or older than its source, so NumPy and PyTorch (extra "
        "train) replace it, up to a hundred times slower; `python -m genius_search.native.build` "
        "compiles it"
    )
    return None


def _declare_functions(library: ctypes.CDLL) -> None:
    """Declare the types of the functions of ``search.c``; the default is ``int``, of 32 bits."""
    pointer = ctypes.c_void_p
    integer = ctypes.c_int64
    library.make_work.restype = pointer
    library.search.argtypes = (pointer, pointer, integer, *[pointer] * 3, integer, pointer)
    library.nearest_sums.argtypes = (*[pointer] * 3, *[integer] * 3, pointer)
    library.sum_by_code.argtypes = (pointer, pointer, integer, integer, pointer)
    library.sum_by_code.restype = None
    library.nearest_fine_codes.argtypes = (*[pointer] * 5, *[integer] * 4)
    library.nearest_fine_codes.restype = None
    library.sum_fine_codes.argtypes = (*[pointer] * 4, *[integer] * 4)
    library.sum_fine_codes.restype = None


if __name__ == "__main__":
    main()
