"""What ``genius serve`` refuses before it loads anything."""

from __future__ import annotations

import socket

import pytest

from genius_search.cli import main
from genius_search.index.index import Index


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    (root / "pool").mkdir()
    (root / "pool" / "kite.txt").write_text("a kite")
    Index.create(root / "photos.index", root / "pool", model=trained.model)
    return root / "photos.index"


def refused(capsys, *arguments) -> str:
    assert main(["serve", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_an_address_that_others_reach_needs_keys(folder, capsys):
    for host in ("192.0.2.1", "::", "example.org"):
        assert "API keys" in refused(capsys, folder, "--host", host)


def test_an_address_that_is_taken_or_elsewhere_is_refused_at_once(folder, write_keys, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port}" in refused(capsys, folder, "--port", port)
    keys = write_keys(f"one read {'k' * 20}")
    elsewhere = refused(capsys, folder, "--host", "192.0.2.1", "--keys", keys)
    assert "192.0.2.1 port 8000" in elsewhere
    for number in (-1, 65536):
        assert "0 to 65535" in refused(capsys, folder, "--port", number)


def test_a_missing_index_or_file_of_keys_is_named(folder, tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none.index"), "--port", "0"]) == 4
    assert "no index at" in capsys.readouterr().err
    assert main(["serve", str(folder), "--keys", str(tmp_path / "none"), "--port", "0"]) == 6
    assert str(tmp_path / "none") in capsys.readouterr().err
    (tmp_path / "empty").touch(0o600)
    assert "contains no key" in refused(capsys, folder, "--keys", tmp_path / "empty")
