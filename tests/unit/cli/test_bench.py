from __future__ import annotations

from pathlib import Path

import pytest

from genius_search.cli import main
from genius_search.lab.cli.bench import Decode, Rivals, Scale
from genius_search.lab.cli.bench_results import command_of


def test_a_command_is_told_without_folders_and_defaults():
    assert command_of(Scale(out=Path("/somebody/place")), "scale") == "genius bench scale"
    decode = Decode(out=Path("x"), items=300, hf=False, model=Path("/somebody/models/tiny"), json=True)
    assert command_of(decode, "decode") == "genius bench decode --items 300 --model tiny --no-hf"
    rivals = Rivals(
        data=Path("/somebody/data/flickr8k"), model=Path("m"), out=Path("x"), methods="exact,ours"
    )
    assert command_of(rivals, "rivals") == "genius bench rivals flickr8k --model m --methods exact,ours"


def test_sizes_that_are_no_numbers_are_refused(capsys, tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    assert main(["bench", "scale", "--out", str(tmp_path), "--sizes", "many"]) == 2
    assert "expected numbers with commas between" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["decode", "scale", "rivals", "quality"])
def test_help_explains_every_flag(name, capsys):
    with pytest.raises(SystemExit):
        main(["bench", name, "--help"])
    assert "--seed" in capsys.readouterr().out
