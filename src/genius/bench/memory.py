"""Memory of this process and of the machine, as the system tells it. Quick to import."""

from __future__ import annotations

from pathlib import Path
from typing import Final

STATUS_FILE: Final = Path("/proc/self/status")
MEMORY_FILE: Final = Path("/proc/meminfo")


def total_bytes() -> int | None:
    """Memory of the machine; None where the system does not say, here and below."""
    return _field(MEMORY_FILE, "MemTotal")


def available_bytes() -> int | None:
    """Memory that can be taken without swapping; None where the system does not say."""
    return _field(MEMORY_FILE, "MemAvailable")


def peak_bytes() -> int | None:
    """The most memory this process ever had, mapped files that it read included."""
    return _field(STATUS_FILE, "VmHWM")


def resident_bytes() -> int | None:
    """The memory this process has now."""
    return _field(STATUS_FILE, "VmRSS")


def _field(file: Path, name: str) -> int | None:
    """A size in one of the system's files of ``name: number kB``."""
    if not file.exists():
        return None
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None
