from __future__ import annotations

import logging
import sys

import pytest

from genius_search.native import build as native
from genius_search.native.build import open_library


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(native, "find_compilers", lambda: iter(()))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_nothing_is_built_which_is_logged_once(tmp_path, caplog):
    assert native.build(tmp_path) is None
    with caplog.at_level(logging.WARNING):
        assert open_library(tmp_path) is None
        assert open_library(tmp_path) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_first_compiler_that_works_is_taken(tmp_path, monkeypatch, capsys):
    fails = [sys.executable, "-c", "import sys; sys.exit('no such flag')"]
    works = [sys.executable, "-c", "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w')"]
    monkeypatch.setattr(
        native, "find_compilers", lambda: iter([["/no/such/compiler"], fails, works])
    )
    assert not native.is_compiled(tmp_path)
    assert native.build(tmp_path) == works
    assert native.is_compiled(tmp_path)
    assert "no such flag" in capsys.readouterr().err
    expected = {native.library_path(variant, tmp_path).name for variant in native.VARIANTS}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_a_library_of_another_source_is_not_opened(tmp_path, monkeypatch):
    source = tmp_path / "search.c"
    source.write_text("int old;")
    monkeypatch.setattr(native, "SOURCE", source)
    old = native.library_path("baseline", tmp_path)
    old.touch()
    source.write_text("int new;")
    assert not native.library_path("baseline", tmp_path).exists()
    monkeypatch.setattr(native, "find_compilers", lambda: iter(()))
    native.build(tmp_path)
    assert not old.exists()


def test_a_wheel_by_zig_runs_on_old_systems_and_one_by_another_compiler_says_where(monkeypatch):
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    zig = ["python", "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.17"]
    assert native.platform_tag(zig) == "manylinux_2_17_x86_64"
    monkeypatch.setattr(native.sysconfig, "get_platform", lambda: "macosx-11.0-arm64")
    assert native.platform_tag(["cc"]) == "macosx_11_0_arm64"
