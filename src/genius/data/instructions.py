"""M-BEIR's instruction file: the ways of saying what kind of result is wanted."""

from __future__ import annotations

import csv
from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from genius.data.lines import numbered_lines
from genius.data.records import Modality
from genius.data.writing import appearing_whole
from genius.errors import BadData, BadRecord, UsageError


class InstructionKey(NamedTuple):
    """What an instruction is chosen by."""

    dataset_id: int
    query: Modality
    candidate: Modality


class InstructionRow(NamedTuple):
    """One row of the instruction file."""

    query: Modality
    candidate: Modality
    dataset: str
    dataset_id: int
    instructions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instructions:
    """The ways of saying what is wanted, by data set, query modality and candidate modality."""

    file: Path | None
    """Where they were read; None when the data set has none, then every look-up gives none."""
    rows: Mapping[InstructionKey, tuple[str, ...]]

    @staticmethod
    def empty() -> Instructions:
        """Of a data set without instructions: every look-up gives ``()``."""
        return Instructions(None, {})

    @staticmethod
    def read(path: Path) -> Instructions:
        """Read ``query_instructions.tsv`` by position, as UniIR does; a first row of names is skipped."""
        rows: dict[InstructionKey, tuple[str, ...]] = {}
        for line, raw in numbered_lines(path):
            try:
                cells = next(csv.reader([raw.decode()], delimiter="\t"))
                if line == 1 and not (len(cells) > 3 and cells[3].strip().isdecimal()):
                    continue
                key, instructions = _instruction(cells)
            except (UsageError, UnicodeDecodeError, csv.Error, ValueError) as error:
                raise BadRecord(path, line, f"instructions: {error}") from None
            known = rows.get(key, ())
            rows[key] = known + tuple(text for text in instructions if text not in known)
        return Instructions(path, rows)

    def lookup(self, dataset_id: int, query: Modality, candidate: Modality) -> tuple[str, ...]:
        """Every instruction for this data set and these modalities.

        Raises
        ------
        BadData
            there is a file and it has no such row.
        """
        if self.file is None:
            return ()
        found = self.rows.get(InstructionKey(dataset_id, query, candidate))
        if found is None:
            raise BadData(
                f"{self.file}: no instruction for data set {dataset_id}, {query.label} -> {candidate.label}; "
                f"add a row {query.value}<tab>{candidate.value}<tab>NAME<tab>{dataset_id}<tab>INSTRUCTION"
            )
        return found

    def keys(self) -> KeysView[InstructionKey]:
        """The combinations that have instructions."""
        return self.rows.keys()


def write_instructions(path: Path, rows: Iterable[InstructionRow]) -> None:
    """Write ``query_instructions.tsv``; rows with fewer instructions than others end in empty cells."""
    kept = list(rows)
    for row in kept:
        if any(set(text) & set("\t\r\n") for text in row.instructions):
            raise BadData(f"instructions of {row.dataset} hold a tab or a line break, which a TSV row cannot")
    width = max((len(row.instructions) for row in kept), default=0)
    with appearing_whole(path) as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        names = (f"prompt_{number}" for number in range(1, width + 1))
        writer.writerow(["query_modality", "cand_modality", "dataset_name", "dataset_id", *names])
        for row in kept:
            empty = [""] * (width - len(row.instructions))
            writer.writerow(
                [row.query.value, row.candidate.value, row.dataset, row.dataset_id, *row.instructions, *empty]
            )


def _instruction(cells: list[str]) -> tuple[InstructionKey, tuple[str, ...]]:
    if len(cells) < 5:
        raise ValueError(
            f"has {len(cells)} columns, expected query modality, candidate modality, data set, "
            "data set number and at least one instruction, with tabs between them"
        )
    if not cells[3].strip().isdecimal():
        raise ValueError(f"the data set number is {cells[3]!r}, expected a number in the fourth column")
    key = InstructionKey(int(cells[3]), Modality.parse(cells[0]), Modality.parse(cells[1]))
    instructions = tuple(text.strip() for text in cells[4:] if text.strip())
    if not instructions:
        raise ValueError("has no instruction")
    return key, instructions
