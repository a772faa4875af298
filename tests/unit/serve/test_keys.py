"""API keys: hashes in a file, revoked by deleting a line."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from genius_search.cli import main
from genius_search.errors import BadData, UsageError
from genius_search.serve.keys import add_key, find_key, read_keys


def test_a_key_is_known_by_its_hash_only_until_its_line_is_deleted(tmp_path, capsys):
    file = tmp_path / "keys"
    old = add_key(file, name="old", scope="read")
    assert main(["keys", "add", str(file), "--name", "loader", "--scope", "write"]) == 0
    writer = capsys.readouterr().out.strip()
    digest = hashlib.sha256(writer.encode()).hexdigest()
    assert writer not in file.read_text()
    assert digest in file.read_text()
    assert find_key(file, old)[:2] == ("old", "read")
    assert find_key(file, writer)[:2] == ("loader", "write")
    for wrong in ("", "genius_", writer[:-1], writer.upper(), "\ud800", digest):
        assert find_key(file, wrong) is None
    kept = [line for line in file.read_text().splitlines() if not line.startswith("old ")]
    file.write_text("\n".join(["# those of today", "", *kept]))
    assert find_key(file, old) is None
    assert find_key(file, writer) is not None


def test_keys_added_at_once_are_all_stored(tmp_path):
    file = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        names = [f"key{number}" for number in range(40)]
        given = list(pool.map(lambda name: add_key(file, name=name, scope="read"), names))
    assert [find_key(file, key).name for key in given] == names
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_or_a_line_that_is_no_key_is_named(tmp_path):
    file = tmp_path / "keys"
    for line in ("x", "name admin " + "0" * 64, "name read abc"):
        file.write_text(f"\n{line}\n")
        with pytest.raises(BadData, match=r"keys:2: expected a name"):
            read_keys(file)
    with pytest.raises(BadData, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_a_name_is_given_once_and_fits_on_a_line(tmp_path):
    file = tmp_path / "keys"
    add_key(file, name="page", scope="read")
    for name in ("page", "", "two words", "line\nbreak", "x" * 65):
        with pytest.raises(UsageError):
            add_key(file, name=name, scope="write")
