"""What a figure was measured on: never who or where, only what."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from genius.bench.memory import total_bytes

CPU_FILE: Final = Path("/proc/cpuinfo")
PACKAGES: Final = ("torch", "numpy", "faiss-cpu", "transformers")


@dataclass(frozen=True, kw_only=True)
class About:
    """Stands beside every figure."""

    machine: str
    """Model of the processor, cores and memory, threads used, versions."""
    date: str
    command: str
    """That measured it; of folders only the last name."""
    seed: int


def about(command: str, *, seed: int) -> About:
    """Here and now."""
    return About(
        machine=describe(),
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        command=command,
        seed=seed,
    )


def describe() -> str:
    """The machine in one line."""
    memory = total_bytes()
    size = f", {memory / 2**30:.0f} GiB" if memory else ""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return (
        f"{_processor()}, {os.cpu_count()} cores{size}; threads used: {torch.get_num_threads()}; "
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )


def _processor() -> str:
    if CPU_FILE.exists():
        for line in CPU_FILE.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
