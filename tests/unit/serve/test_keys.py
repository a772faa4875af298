"""API keys: lines of a file, revoked by deleting them."""

from __future__ import annotations

import pytest

from genius_search.errors import BadData
from genius_search.serve.keys import KeyFile, read_keys

OLD, WRITER = "0" * 20, "a-key_" * 4


def test_a_key_is_known_until_its_line_is_deleted(write_keys):
    keys = KeyFile(write_keys(f"old read {OLD}", f"loader write {WRITER}"))
    assert keys.find(OLD)[:2] == ("old", "read")
    assert keys.find(WRITER)[:2] == ("loader", "write")
    for wrong in ("", "old", WRITER[:-1], WRITER.upper(), "\ud800"):
        assert keys.find(wrong) is None
    write_keys("  # those of today", "", f"  loader write {WRITER} ")
    assert keys.find(OLD) is None
    assert keys.find(WRITER) is not None


def test_a_file_or_a_line_that_is_no_key_is_named_and_one_that_others_read(write_keys):
    for line in (
        "x",
        f"name admin {OLD}",
        "name read abc",
        f"two words read {OLD}",
        f"{'x' * 65} read {OLD}",
    ):
        file = write_keys("", line)
        with pytest.raises(BadData, match=r"keys:2: expected `NAME read KEY`"):
            read_keys(file)
    write_keys(f"old read {OLD}")
    file.chmod(0o640)
    with pytest.raises(BadData, match="chmod 600"):
        read_keys(file)
    with pytest.raises(BadData, match="cannot be read"):
        read_keys(file.with_name("none"))
