"""The folder of cached files, such as the texts of PDF files and the frames of videos."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "genius-search"
