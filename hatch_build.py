"""Compile the search when a wheel or an editable installation is built."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "src" / "genius_search" / "native"


class CompileSearch(BuildHookInterface):
    """Adds the compiled library to the wheel; without a compiler the wheel is pure Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tag the wheel with the platform it is for.

        pip builds an editable installation twice, first for its metadata. Its wheel contains no
        library, so a library that is up to date stays. With ``GENIUS_COMPILE=later``, whoever
        calls pip compiles; the Makefile does so while pip installs.
        """
        spec = importlib.util.spec_from_file_location("build_search", NATIVE / "build.py")
        build_search = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build_search)
        is_compiled_later = os.environ.get("GENIUS_COMPILE") == "later"
        if version == "editable" and (is_compiled_later or build_search.is_compiled()):
            return
        compiler = build_search.build()
        if compiler is None:
            self.app.display_warning("no C compiler found: searches will need PyTorch")
            return
        self.app.display_info(f"compiled the search with {' '.join(compiler)}")
        build_data["artifacts"] += [
            str(build_search.library_path(variant).relative_to(self.root))
            for variant in build_search.VARIANTS
        ]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{build_search.platform_tag(compiler)}"
