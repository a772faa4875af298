"""API keys: hashes in a file, compared in constant time, revoked by deleting a line."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from genius_search.cli import main
from genius_search.errors import BadData, UsageError
from genius_search.serve import keys as module
from genius_search.serve.keys import Keys, add_key


def test_a_key_is_known_by_its_hash_only(tmp_path):
    file = tmp_path / "keys"
    reader = add_key(file, name="page", scope="read")
    writer = add_key(file, name="loader", scope="write")
    assert reader not in file.read_text()
    assert hashlib.sha256(writer.encode()).hexdigest() in file.read_text()
    keys = Keys(file)
    assert keys.find(reader)[:2] == ("page", "read")
    assert keys.find(writer)[:2] == ("loader", "write")
    for wrong in (
        "",
        "genius_",
        reader[:-1],
        reader.upper(),
        "\ud800",
        hashlib.sha256(reader.encode()).hexdigest(),
    ):
        assert keys.find(wrong) is None


def test_a_key_whose_line_is_deleted_is_good_for_nothing_any_more(tmp_path):
    file = tmp_path / "keys"
    old = add_key(file, name="old", scope="read")
    keys = Keys(file)
    new = add_key(file, name="new", scope="read")
    assert keys.find(new) is not None
    kept = [line for line in file.read_text().splitlines() if not line.startswith("old ")]
    file.write_text("\n".join(["# those of today", "", *kept]))
    assert keys.find(old) is None
    assert keys.find(new) is not None
    file.unlink()
    with pytest.raises(BadData):
        keys.find(new)


def test_keys_added_at_once_are_all_stored(tmp_path):
    file = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        names = [f"key{number}" for number in range(40)]
        given = list(pool.map(lambda name: add_key(file, name=name, scope="read"), names))
    keys = Keys(file)
    assert [keys.find(key).name for key in given] == names
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    key = add_key(file, name="page", scope="read")
    lines = file.read_text()
    keys = Keys(file)
    file.write_text("")  # by an editor that empties the file first
    read = module.read_keys

    def read_too_early(path):
        found = read(path)
        if not found:
            file.write_text(lines)
        return found

    monkeypatch.setattr(module, "read_keys", read_too_early)
    assert keys.find(key) is not None


def test_a_line_that_is_no_key_is_named(tmp_path):
    file = tmp_path / "keys"
    for line in ("x", "name admin " + "0" * 64, "name read abc"):
        file.write_text(f"\n{line}\n")
        with pytest.raises(BadData, match=r"keys:2: expected a name"):
            Keys(file)
    with pytest.raises(BadData, match="cannot be read"):
        Keys(tmp_path / "none")


def test_a_name_is_given_once_and_fits_on_a_line(tmp_path):
    file = tmp_path / "keys"
    add_key(file, name="page", scope="read")
    with pytest.raises(UsageError, match="page"):
        add_key(file, name="page", scope="write")
    for name in ("", "two words", "line\nbreak", "x" * 65):
        with pytest.raises(UsageError, match="expected 1 to 64"):
            add_key(file, name=name, scope="read")


def test_the_command_prints_the_key_once_on_stdout(tmp_path, capsys):
    file = tmp_path / "keys"
    assert main(["keys", "add", str(file), "--name", "page", "--scope", "write"]) == 0
    printed = capsys.readouterr()
    assert Keys(file).find(printed.out.strip()).scope == "write"
    assert "has its hash" in printed.err
    assert list(tmp_path.iterdir()) == [file]
