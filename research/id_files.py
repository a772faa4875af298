"""IDs of items as JSON, in the form that LETTER and MiniOneRec call ``.index.json``.

An item has a code for each level, and a code has the name of its level::

    {"0": ["<a_12>", "<b_7>", "<c_0>"], "1": ["<a_12>", "<b_9>", "<c_4>"]}

``python -m research.id_files`` writes the IDs of a model's candidates in this form. The other
direction is ``python -m research.baselines.generative --kind file --id-file FILE``.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import tyro
from jaxtyping import Int16, Int64, Integer

from genius_search.cli.options import DeviceOptions, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, UsageError, plural
from genius_search.index.evaluate import format_first_ids
from genius_search.model import Genius
from genius_search.records import did_of, parse_id
from genius_search.training.codebooks import encode_features
from genius_search.training.records import embed_pool
from genius_search.writing import write_atomically
from research.command import run
from research.evaluate import EvaluationPools, chosen_rows
from research.settings import EvaluationConfig

MAX_FILE_BYTES: Final = 4 << 30
"""A larger file is not read: JSON takes some ten times as much memory as its text."""
MAX_CODE: Final = int(np.iinfo(np.int16).max)
"""Tables of IDs store codes as 16-bit integers."""
TOKEN: Final = re.compile(r"<([A-Za-z][A-Za-z0-9_]*)_([0-9]{1,5})>")
EXAMPLE: Final = '["<a_12>", "<b_7>"]'


class ItemIds(NamedTuple):
    """The IDs of items, by their names in the file."""

    names: list[str]
    codes: Int16[np.ndarray, "items levels"]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes at each level: one more than the largest code of an item."""
        return tuple(int(largest) + 1 for largest in self.codes.max(axis=0))

    def rows_of(
        self, numbers: Int64[np.ndarray, " candidates"]
    ) -> Int64[np.ndarray, " candidates"]:
        """Return the row of each candidate, by M-BEIR's numbers of candidates.

        A name is a candidate's id, such as ``30:17``. A bare number, as in LETTER's files, is the
        number after the colon, if all candidates have the same data set.

        Raises
        ------
        BadData
            A candidate has no ID.
        """
        dids = [did_of(number) for number in numbers.tolist()]
        rows = {name: row for row, name in enumerate(self.names)}
        if not any(":" in name for name in self.names):
            datasets = {parse_id(did)[0] for did in dids}
            if len(datasets) > 1:
                raise BadData(
                    f"the items of the ID file are bare numbers, such as {self.names[0]!r}, and "
                    f"the candidates are of {len(datasets)} data sets; name items by candidate "
                    f"ids, such as {dids[0]!r}"
                )
            dids = [did.partition(":")[2] for did in dids]
        missing = [did for did in dids if did not in rows]
        if missing:
            raise BadData(
                f"{plural(len(missing), 'candidate')} of {len(dids):,} have no ID in the file: "
                f"{format_first_ids(missing)}; it has items such as {self.names[0]!r}"
            )
        return np.array([rows[did] for did in dids], dtype=np.int64)


def read_id_file(path: Path) -> ItemIds:
    """Read the IDs of items.

    Raises
    ------
    BadData
        The file is not such a JSON file, an item occurs twice, or IDs differ in length.
    """
    if not path.is_file():
        raise BadData(f"{path} is not a file; give a JSON file of items and their codes")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise BadData(f"{path} has more than {MAX_FILE_BYTES:,} bytes; divide the pool")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            raise BadData(
                f"{path}: items occur more than once: {format_first_ids(repeated)}; give each item "
                "one ID"
            )
        return dict(pairs)

    try:
        items = json.loads(path.read_bytes(), object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadData):
            raise
        raise BadData(f"{path} is not valid JSON: {error}") from None
    if not isinstance(items, dict) or not items:
        raise BadData(f'{path} has no items; expected {{"ITEM": {EXAMPLE}, ...}}')
    return _parse_items(path, items)


def _parse_items(path: Path, items: dict[str, Any]) -> ItemIds:
    """Return the codes of all items; the first item decides length and names of levels."""
    first_name, first_tokens = next(iter(items.items()))
    levels = [level for level, _ in _parse_tokens(path, first_name, first_tokens)]
    codes = np.empty((len(items), len(levels)), dtype=np.int16)
    for row, (name, tokens) in enumerate(items.items()):
        pairs = _parse_tokens(path, name, tokens)
        if len(pairs) != len(levels):
            raise BadData(
                f"{path}: item {name!r} has {plural(len(pairs), 'code')}, and item {first_name!r} "
                f"has {len(levels)}; give every item the same number, for example with one more "
                "code that numbers the items of an ID"
            )
        if [level for level, _ in pairs] != levels:
            raise BadData(
                f"{path}: the codes of item {name!r} are of the levels "
                f"{', '.join(level for level, _ in pairs)}; those of item {first_name!r} are of "
                f"{', '.join(levels)}"
            )
        codes[row] = [code for _, code in pairs]
    return ItemIds(list(items), codes)


def _parse_tokens(path: Path, item: str, tokens: object) -> list[tuple[str, int]]:
    """Return the level and the number of each code of an item."""
    pairs = []
    for token in tokens if isinstance(tokens, list) else []:
        match = TOKEN.fullmatch(token) if isinstance(token, str) else None
        if match is None or int(match[2]) > MAX_CODE:
            raise BadData(
                f"{path}: item {item!r} has the code {json.dumps(token)[:80]}; expected a name of "
                f"its level and a number up to {MAX_CODE:,}, such as <a_12>"
            )
        pairs.append((match[1], int(match[2])))
    if not pairs:
        raise BadData(
            f"{path}: item {item!r} has {json.dumps(tokens)[:80]}; expected codes such as {EXAMPLE}"
        )
    return pairs


def write_id_file(
    path: Path, names: Iterable[str], codes: Integer[np.ndarray, "items levels"]
) -> None:
    """Write the IDs of items, atomically.

    Raises
    ------
    UsageError
        There are more levels than letters.
    """
    if codes.shape[1] > len(ascii_lowercase):
        raise UsageError(
            f"IDs of {codes.shape[1]} levels have no names; the levels of such files are named by "
            f"the {len(ascii_lowercase)} letters from a to z"
        )
    with write_atomically(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        separator = "{"
        for name, item_codes in zip(names, codes.tolist(), strict=True):
            pairs = zip(ascii_lowercase, item_codes, strict=False)
            tokens = [f"<{letter}_{code}>" for letter, code in pairs]
            file.write(f"{separator}{json.dumps(name)}: {json.dumps(tokens)}")
            separator = ",\n"
        file.write("}\n")


def bare_numbers(dids: Sequence[str]) -> list[str]:
    """Return the numbers after the colons of candidate ids, which must be of one data set."""
    datasets: Collection[int] = {parse_id(did)[0] for did in dids}
    if len(datasets) > 1:
        raise UsageError(
            f"the candidates are of {len(datasets)} data sets, in which a number occurs "
            "repeatedly; leave out --bare-numbers"
        )
    return [did.partition(":")[2] for did in dids]


@command
class ExportIds(DeviceOptions):
    """Write the IDs of a data set's candidates as JSON, for other projects that generate IDs.

    The first code is the modality, unless the model has no such level.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of the model."""

    data: Annotated[Path, tyro.conf.Positional]
    """Folder of the data set, in M-BEIR's layout."""

    out: Path
    """File to write, such as catalogue.index.json."""

    split: str = "test"
    """Split whose pool is written."""

    bare_numbers: bool = False
    """Name items by the numbers after the colons of their ids, as LETTER and MiniOneRec do."""

    training: bool = False
    """Write the IDs of the training candidates, too; a decoder that learns the IDs needs them."""

    evaluation: OptionalFolder = None
    """Folder of the features of the pool; default: evaluation/ in the model's folder."""

    def run(self) -> None:
        """Embed and encode the pool unless that is done, and write the file."""
        data = MBeir(self.data)
        config = EvaluationConfig(split=self.split, pools=("global",), methods=("generative",))
        folder = self.evaluation or self.model / "evaluation"
        with TerminalProgress() as progress:
            model = Genius.open(self.model, device=self.device, download=self.download)
            rows = chosen_rows(data, config)
            pools = EvaluationPools(data, model, rows, folder, config, progress=progress)
            pool = pools.of(rows[0], "global")
            dids = [did_of(number) for number in pool.dids.tolist()]
            codes = pool.codes[:, : len(model.codebooks.sizes)]
            if self.training:
                trained = embed_pool(
                    data,
                    data.training_pools(),
                    model.encoder,
                    folder / "training" / "candidates",
                    progress=progress,
                )
                new = np.flatnonzero(~np.isin(trained.ids, pool.dids))
                dids += [did_of(number) for number in trained.ids[new].tolist()]
                new_codes = encode_features(model.codebooks, trained, new).codes
                codes = np.concatenate([codes, new_codes.astype(codes.dtype)])
            names = bare_numbers(dids) if self.bare_numbers else dids
            write_id_file(self.out, names, codes)
            progress.say(f"{plural(len(names), 'ID')} written to {self.out}")


main = partial(run, ExportIds, "id_files")


if __name__ == "__main__":
    sys.exit(main())
