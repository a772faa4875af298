"""What ``genius repro`` tells before a run: files, disk, hours, commands, and the numbers to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from genius_search.lab.repro import Check, NeededFile, ReproPlan


def plain_console() -> Console:
    """Lines as they are: never broken, never coloured."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def asks() -> str:
    """How queries are asked and scored."""
    from genius_search.lab.published_numbers import PAPER_BEAM

    return (
        "Asks as the authors' code: always the first instruction, scores over the whole vocabulary, "
        f"a beam of {PAPER_BEAM}."
    )


def print_plan(needed: ReproPlan, looked: list[Check]) -> None:
    """All of it."""
    console = plain_console()
    _print_files(console, needed)
    _print_work(console, needed)
    console.print("\nCommands:")
    for command in needed.commands:
        console.print(f"  {command}")
    if looked:
        console.print("\nA first look at what is there:")
    for check in looked:
        mark = "[OK]" if check.ok else "[DIFFERS]"
        console.print(f"  {mark} {check.what}: {check.found} (expected {check.expected})")
    _print_targets(console, needed)
    if needed.missing:
        asked = needed.asked or ("local",)
        which = f"the {asked[0]} pool" if len(asked) == 1 else "both pools"
        console.print(f"\n{len(needed.missing)} of {len(needed.needed)} files for {which} are missing.")
    else:
        console.print(f"\nAll is there for: {', '.join(needed.pools)}. Add --run.")


def _print_files(console: Console, needed: ReproPlan) -> None:
    console.print(f"Files, looked for in {needed.data}:")
    if needed.model is not None and not needed.has_model:
        console.print(f"  no model at {needed.model}; it is imported from the published checkpoints")
    for file in needed.files:
        console.print(_file_line(file))
    if needed.global_files and needed.means_global:
        console.print("For the global pool besides:")
        for file in needed.global_files:
            console.print(_file_line(file))
    elif needed.global_files and not needed.asked:
        console.print("For the global pool more is needed; --pools local,global lists it.")
    _print_disk(console, needed)
    if needed.mteb:
        console.print(
            "Cheaper, local pool only: mteb's copies, a repository for each row, pictures inside "
            "(how: docs/mteb.md):"
        )
    for repository in needed.mteb:
        console.print(f"  {repository}")


def _print_disk(console: Console, needed: ReproPlan) -> None:
    parts = []
    if needed.download_gigabytes:
        parts.append(f"{needed.download_gigabytes:g} GB the archive of all pictures, in four parts")
    if needed.unpacked_gigabytes:
        parts.append(f"{needed.unpacked_gigabytes:.0f} GB its pictures unpacked, as they hardly compress")
    if needed.file_gigabytes:
        parts.append(f"{_size(needed.file_gigabytes)} missing files whose sizes are published")
    parts.append(f"{_size(needed.feature_gigabytes)} features")
    total = (
        needed.download_gigabytes
        + needed.unpacked_gigabytes
        + needed.file_gigabytes
        + needed.feature_gigabytes
    )
    console.print(f"Disk space still to be filled: {_size(total)}, an estimate ({'; '.join(parts)}).")


def _print_work(console: Console, needed: ReproPlan) -> None:
    from genius_search.lab.repro import MACHINES

    shared = "; what one pool encodes the other does not encode again" if len(needed.work) > 1 else ""
    console.print(f"\n{asks()}")
    console.print(f"Work{shared}:")
    for work in needed.work:
        console.print(
            f"  {work.pool} pool: {work.queries:,} queries, {work.candidates:,} candidates; "
            f"{work.images:,} pictures and {work.texts:,} texts to encode"
        )
        for machine in MACHINES:
            console.print(f"    estimate for a {machine.name}: {_hours(work.hours(machine))}")
    for machine in MACHINES:
        console.print(f"  The estimate for a {machine.name} assumes {machine.basis}.")


def _print_targets(console: Console, needed: ReproPlan) -> None:
    from genius_search.lab.published_numbers import TOLERANCE, shown

    console.print(
        "\nIt will be compared with"
        + ("" if needed.captions else f" (exact-raw: within {TOLERANCE} of the released weights)")
        + ":"
    )
    for one in needed.published:
        reference = one.reference
        misprint = f"; {reference.misprint}" if reference.misprint else ""
        console.print(
            f"  {one.row}, {one.pool}, {one.method}: {shown(reference.value)} "
            f"({reference.system}, {reference.weights}{misprint})"
        )
    for caption in needed.captions:
        recalls = " / ".join(shown(recall) for recall in caption.recalls)
        noted = caption.trained_on != "not noted"
        trained = f"trained on {caption.trained_on}" if noted else "training data not noted"
        console.print(f"  R@1/5/10 {recalls} ({caption.system}; {trained})")


def _file_line(file: NeededFile) -> str:
    size = "" if file.gigabytes is None else f", {_size(file.gigabytes)}"
    return f"  {'there  ' if file.found else 'missing'}  {file.path}  ({file.why}{size})"


def _size(gigabytes: float) -> str:
    """``5.13 GB``, ``6.14 kB``."""
    value, unit = gigabytes, "GB"
    for smaller in ("MB", "kB", "bytes"):
        if value >= 1:
            break
        value, unit = value * 1000, smaller
    return f"{value:.0f} {unit}" if value >= 100 or unit == "bytes" else f"{value:.2f} {unit}"


def _hours(hours: float) -> str:
    return f"{hours:.0f} h" if hours >= 10 else f"{hours:.1f} h" if hours >= 0.1 else f"{60 * hours:.0f} min"
