"""``genius cluster``: make indexes in shards; the commands of ``genius index`` change and inspect them."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from genius_search.cli.options import (
    DeviceOptions,
    JsonOption,
    OptionalFolder,
    WaitOption,
    Words,
    command,
)
from genius_search.cli.terminal import TerminalProgress, format_bytes, print_json, print_text
from genius_search.cluster.plan import PlanSettings

if TYPE_CHECKING:
    from genius_search.cluster.build import Runner


@command
class Build(DeviceOptions, JsonOption):
    """Build an index in shards, for pools that are too large for one index.

    Run the same command again after an interruption: only what is missing is done.
    """

    pool: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="POOL")]
    """A folder of pictures and texts; or .jsonl, .parquet or .tar (WebDataset) files: one, a folder of them,
    or a pattern, also elsewhere: 's3://bucket/pool/*.parquet'."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the new cluster; with several machines, one that all of them see."""

    model: OptionalFolder = None
    """Folder of a trained model."""

    encoder: Words = None
    """Instead of a model: encoder as of `genius index create`; codebooks are fitted to a sample of the
    pool."""

    shards: int = 1
    """Number of shards."""

    rows: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 100_000
    """Rows of the pool that are encoded together; a .tar file is always encoded as a whole."""

    local: Annotated[int, tyro.conf.arg(metavar="PROCESSES")] = 1
    """Processes on this machine."""

    address: Words = None
    """Build on a Ray cluster instead: HOST:PORT of its head, or local, which starts Ray here."""

    embeddings: Literal["none", "fused", "raw"] | None = None
    """Store an embedding of every item, for re-ranking. Default: none with a model, otherwise fused."""

    embedding_bits: Literal[1, 2, 4, 8, 16] | None = None
    """Bits of each number of a stored embedding; fewer than 8 only for fused ones. Default: 16 with a model,
    otherwise 4, and 1 from a million items on."""

    no_captions: bool = False
    """Ignore texts beside pictures of a folder."""

    def run(self) -> None:
        """Build the cluster."""
        from genius_search.cluster.build import Settings, build_cluster

        settings = Settings(
            pool=self.pool,
            model=None if self.model is None else str(self.model),
            encoder=self.encoder,
            shards=self.shards,
            rows=self.rows,
            embeddings=self.embeddings,
            embedding_bits=self.embedding_bits,
            captions=not self.no_captions,
            device=self.device,
            download=self.download,
        )
        with self._runner() as run, TerminalProgress() as progress:
            built = build_cluster(self.out, settings, run=run, progress=progress)
            progress.say(
                f"{built.items:,} items in {len(built.shards)} shards, {built.left_out:,} left out, as "
                f"{self.out / 'left-out.jsonl'} lists"
            )
            progress.say(f'next: genius search {shlex.quote(str(self.out))} "what you look for"')
        if self.json:
            print_json({"items": built.items, "shards": len(built.shards), "left_out": built.left_out})

    def _runner(self) -> AbstractContextManager[Runner]:
        if self.address is None:
            from genius_search.cluster.run import LocalProcesses

            return nullcontext(LocalProcesses(self.local))
        from genius_search.cluster.ray import Ray

        return Ray(self.address, cores=self.local)


@command
class Rebalance(WaitOption):
    """Cut the IDs anew into shards of about the same size, without deleted items; no model is needed.

    Searches go on meanwhile. New shards are written beside the old ones, which takes the room of a second
    copy. Nothing is done where the largest shard has at most 1.2 times the mean.
    """

    cluster: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CLUSTER")]
    """Folder of the cluster."""

    shards: int | None = None
    """Number of shards. Default: as many as there are."""

    def run(self) -> None:
        """Rebalance the cluster."""
        from genius_search.cluster.folder import read_cluster
        from genius_search.cluster.writer import one_cluster_writer

        with (
            TerminalProgress() as progress,
            one_cluster_writer(self.cluster, wait_seconds=self.wait) as writer,
        ):
            is_changed = writer.rebalance(self.shards, progress=progress)
            sizes = ", ".join(f"{shard.items:,}" for shard in read_cluster(self.cluster).shards)
            progress.say(f"{'now' if is_changed else 'even already'}: {sizes} items")


@command
class Plan(JsonOption, PlanSettings):
    """Estimate bytes, machines, hours and queries per second of a cluster, each with its formula.

    The measured figures are by default those of short texts, the encoder text:wordllama and one core of a
    small machine; pictures take far longer to encode than texts. Give your own.
    """

    def run(self) -> None:
        """Print the plan."""
        from genius_search.cluster.plan import plan_cluster

        figures = plan_cluster(self)
        if self.json:
            print_json([figure._asdict() for figure in figures])
            return
        for figure in figures:
            value = format_bytes(round(figure.value)) if figure.unit == "bytes" else f"{figure.value:,.4g}"
            unit = "" if figure.unit in ("", "bytes") else f" {figure.unit}"
            print_text(f"{figure.name:<22}{value + unit:>18}   {figure.formula}")
