"""Arrays of texts for the benchmark."""

import numpy as np
import pytest

from research.texts import main

pytest.importorskip("wordllama")


def test_queries_are_removed_from_the_pool_and_answers_are_its_rows(tmp_path, capsys):
    texts = tmp_path / "texts.txt"
    lines = [f"a text about number {number}" for number in range(150)]
    texts.write_text("\n".join([*lines, lines[0], "too short", "a red house"]))
    queries = tmp_path / "queries.tsv"
    queries.write_text(f"a red house\t{lines[3]}\ta house that is red\na car\t{lines[5]}\n")
    arguments = [str(texts), "--queries", str(queries), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    items, queries, answers = (
        np.load(tmp_path / "out" / f"{name}.npy") for name in ("items", "queries", "answers")
    )
    assert items.shape == (151, 256)
    assert queries.shape == (2, 256)
    assert answers.tolist() == [[3, 150], [5, -1]]
    assert "151 texts, 2 queries" in capsys.readouterr().out
