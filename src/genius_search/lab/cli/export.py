"""``genius export``: models for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from genius_search.cli.options import JsonOption, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table

if TYPE_CHECKING:
    from genius_search.lab.onnx.run import Agreement
    from genius_search.model import Genius


@command
class Onnx(JsonOption):
    """Export a model as ONNX files: its encoder where possible, its fusion and its decoder; measure them.

    The measurement, in one run on one core, compares searches with the exported decoders and with PyTorch's:
    how far they agree, and the CPU time of each.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder to write."""

    int8: bool = False
    """Write files with 8-bit matrix products too: smaller; faster for large decoders. Scores differ a
    little."""

    check: Annotated[Path | None, tyro.conf.arg(metavar="FEATURES", help_behavior_hint="")] = None
    """Measure with real queries: a folder that `genius embed` wrote, or MODEL/features. Default: random
    queries against random IDs, which show the cost of a search, but less about the agreement."""

    queries: int = 200
    """Queries to measure with; 0 measures nothing."""

    beam: int = 50
    """IDs kept at each level while measuring."""

    def run(self) -> None:
        """Write and measure."""
        from genius_search.errors import UsageError
        from genius_search.lab.onnx.export import export_onnx
        from genius_search.model import Genius

        if self.queries < 0 or self.beam < 1:
            raise UsageError(
                f"--queries {self.queries} --beam {self.beam}: expected at least 0 and at least 1"
            )
        with TerminalProgress() as progress:
            model = Genius.open(self.model)
            manifest = export_onnx(model, self.out, int8=self.int8, progress=progress)
            files = [
                (path.relative_to(self.out).as_posix(), path.stat().st_size)
                for path in sorted(self.out.rglob("*.onnx"))
            ]
            progress.say(f"written to {self.out}: {sum(count for _, count in files) / 1e6:.1f} MB")
            encoder = manifest.facts["encoder"]
            if encoder["kind"] is None:
                progress.say(f"without the encoder: {encoder['why_not']}")
            measured = self._measure(model, progress) if self.queries else []
        if self.json:
            print_json(
                {
                    "folder": str(self.out),
                    "model": model.fingerprint,
                    "encoder": encoder,
                    "files": [{"path": path, "bytes": count} for path, count in files],
                    "queries": "none" if not measured else "drawn" if self.check is None else str(self.check),
                    "measured": [row._asdict() for row in measured],
                }
            )
        elif measured:
            headings = ("decoder", "same best", "of 10", "of 50", "CPU-ms per query")
            lines = [
                (row.name, *(f"{one:.1%}" for one in row[1:4]), f"{row.cpu_ms:,.2f}") for row in measured
            ]
            print_table(headings, lines, left=headings[:1])

    def _measure(self, model: Genius, progress: TerminalProgress) -> list[Agreement]:
        """Compare the decoders on one thread."""
        import torch

        from genius_search.config import SearchConfig
        from genius_search.data.features import Features
        from genius_search.lab.onnx.run import OnnxDecoder, compare_decoders, random_trial, real_trial

        if self.check is None:
            queries, table = random_trial(model.sizes, model.dim, num_queries=self.queries)
            source = "random vectors"
        else:
            folders = (Features.open(self.check / name) for name in ("queries", "candidates"))
            queries, table = real_trial(model, *folders, num_queries=self.queries)
            source = f"queries of {self.check}"
        progress.say(f"measuring: {len(queries)} {source} against {len(table)} IDs, beam {self.beam}")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            decoders = {"PyTorch": model.decoder, "ONNX fp32": OnnxDecoder.open(self.out)}
            if self.int8:
                decoders["ONNX int8"] = OnnxDecoder.open(self.out, precision="int8")
            return compare_decoders(decoders, queries, table, SearchConfig(beam=self.beam))
        finally:
            torch.set_num_threads(threads)
