"""API keys: lines of a file, revoked by deleting them."""

from __future__ import annotations

import pytest

from genius_search.errors import BadData
from genius_search.serve.keys import find_key, read_keys

OLD, WRITER = "0" * 20, "a-key_" * 4


def test_a_key_is_known_until_its_line_is_deleted(write_keys):
    file = write_keys(f"old read {OLD}", f"loader write {WRITER}")
    assert find_key(file, OLD)[:2] == ("old", "read")
    assert find_key(file, WRITER)[:2] == ("loader", "write")
    for wrong in ("", "old", WRITER[:-1], WRITER.upper(), "\ud800"):
        assert find_key(file, wrong) is None
    write_keys("  # those of today", "", f"  loader write {WRITER} ")
    assert find_key(file, OLD) is None
    assert find_key(file, WRITER) is not None


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
