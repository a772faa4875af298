"""Offline: said at once, with advice, before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from genius_search.cli import main
from genius_search.encoders.pretrained import find_checkpoint
from genius_search.errors import MissingExtra, NetworkNeeded
from genius_search.hub import files as reach
from genius_search.hub.files import ORIGINALS, is_place, stays_inside
from genius_search.hub.pull import plan_pull
from genius_search.model import Genius


@pytest.fixture
def untouched(monkeypatch):
    def touched(*_, **__):
        raise AssertionError("the network was touched")

    monkeypatch.setattr("socket.getaddrinfo", touched)
    monkeypatch.setattr("socket.socket.connect", touched)


@pytest.mark.parametrize("switch", ["GENIUS_OFFLINE", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_a_switch_forbids_any_use_of_the_network(untouched, monkeypatch, switch, value):
    monkeypatch.setenv(switch, value)
    for ask in (
        lambda: Genius.from_pretrained("some/repo"),
        lambda: plan_pull("some/repo"),
        lambda: find_checkpoint("some/repo", download=True),
    ):
        with pytest.raises(NetworkNeeded, match=f"{switch}={value} forbids"):
            ask()


@pytest.mark.parametrize("switch", ["GENIUS_OFFLINE", "HF_HUB_OFFLINE"])
def test_one_is_told_to_unset_the_switch_and_not_to_connect(untouched, monkeypatch, switch):
    monkeypatch.setenv(switch, "1")
    with pytest.raises(NetworkNeeded, match=rf"Unset {switch} and run the same again, or copy") as refused:
        plan_pull("some/repo")
    assert "Connect" not in str(refused.value)


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_authors_files_are_named_so_that_a_browser_can_fetch_them(untouched, monkeypatch, name):
    monkeypatch.setenv("GENIUS_OFFLINE", "1")
    with pytest.raises(NetworkNeeded, match="with a browser") as refused:
        plan_pull(name)
    for part in (ORIGINALS[name].repository, *ORIGINALS[name].files):
        assert part in str(refused.value)


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_a_switch_that_is_off_forbids_nothing(monkeypatch, value):
    for switch in ("GENIUS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(switch, value)
    assert reach.forbidden() is None


def test_the_switch_is_read_when_it_matters_not_when_genius_is_imported(monkeypatch):
    monkeypatch.setenv("GENIUS_OFFLINE", "1")
    assert reach.forbidden() == "GENIUS_OFFLINE=1"
    monkeypatch.delenv("GENIUS_OFFLINE")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert reach.forbidden() is None


def test_a_hub_that_swallows_packets_is_given_up_soon(monkeypatch):
    tired = threading.Event()

    def hang(*_, **__):
        tired.wait()
        raise TimeoutError

    monkeypatch.setattr(reach.urllib.request, "urlopen", hang)
    begun = time.perf_counter()
    with pytest.raises(NetworkNeeded, match="cannot be reached"):
        reach.probe("this")
    assert time.perf_counter() - begun < 20  # two seconds, and what a busy machine adds
    tired.set()


def test_commands_leave_with_5_and_advice(monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert main(["pull", "some/repo"]) == 5
    said = capsys.readouterr().err
    assert "http://127.0.0.1:9 cannot be reached" in said
    assert "copy its folder" in said


def test_an_address_that_is_none_counts_as_unreachable(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    with pytest.raises(NetworkNeeded, match="nonsense cannot be reached"):
        reach.probe("this")


def test_an_absent_model_is_said_without_importing_torch():
    script = (
        "import sys\n"
        "from genius_search.errors import NetworkNeeded\n"
        "from genius_search.pretrained import Genius\n"
        "try:\n    Genius.from_pretrained('some/repo')\n"
        "except NetworkNeeded as error:\n    print('torch' in sys.modules, error)"
    )
    said = subprocess.run(  # noqa: S603
        [sys.executable, "-c", script],
        env={"GENIUS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith("False some/repo is not on this machine")
    assert "genius pull some/repo" in said


def test_without_the_hubs_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install genius-retrieval\[hf\]"):
        plan_pull("some/repo")


@pytest.mark.parametrize("path", ["a.json", "encoder/model.safetensors", "..a/b", "a..b"])
def test_a_plain_relative_path_stays_inside(path):
    assert stays_inside(path)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../a", "a/../../b", "a\\..\\b", "C:a", "a\0b"])
def test_a_path_that_could_leave_its_folder_does_not(path):
    assert not stays_inside(path)


@pytest.mark.parametrize(
    ("name", "place"),
    [("a/b", False), ("datasets/a/b", False), ("./a", True), ("/a/b", True), ("~/a", True), ("a/b/c", True)],
)
def test_names_of_repositories_and_of_folders_are_told_apart(name, place):
    assert is_place(name) is place
