"""Names, switches, time limits; offline is said at once, with advice."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

from genius_search.cli import main
from genius_search.encoders.pretrained import find_checkpoint
from genius_search.errors import NetworkNeeded, UsageError
from genius_search.hub import access
from genius_search.hub.access import is_path, stays_inside, translate_hub_errors, translate_os_errors
from genius_search.hub.checkpoints import CHECKPOINTS
from genius_search.hub.pull import plan_pull
from genius_search.model import Genius


@pytest.fixture
def no_network(monkeypatch):
    def touched(*_, **__):
        raise AssertionError("the network was touched")

    monkeypatch.setattr("socket.getaddrinfo", touched)
    monkeypatch.setattr("socket.socket.connect", touched)


@pytest.mark.parametrize("switch", ["GENIUS_OFFLINE=1", "GENIUS_OFFLINE=true", "HF_HUB_OFFLINE=YES"])
def test_a_switch_forbids_any_use_of_the_network(no_network, monkeypatch, switch):
    monkeypatch.setenv(*switch.split("="))
    for use in (
        lambda: Genius.from_pretrained("some/repo"),
        lambda: plan_pull("some/repo"),
        lambda: find_checkpoint("some/repo", download=True),
    ):
        with pytest.raises(NetworkNeeded, match=f"{switch}.*Unset {switch.split('=')[0]}") as refused:
            use()
        assert "Connect" not in str(refused.value)


def test_a_switch_is_read_when_it_matters_and_may_be_off(monkeypatch):
    for value in ("", "0", "false"):
        for switch in ("GENIUS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.setenv(switch, value)
        assert access.offline_switch() is None
    monkeypatch.setenv("GENIUS_OFFLINE", "1")
    assert access.offline_switch() == "GENIUS_OFFLINE=1"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_authors_files_are_named_so_that_a_browser_can_fetch_them(no_network, monkeypatch, name):
    monkeypatch.setenv("GENIUS_OFFLINE", "1")
    with pytest.raises(NetworkNeeded) as refused:
        plan_pull(name)
    for part in (CHECKPOINTS[name].repository, *CHECKPOINTS[name].files):
        assert part in str(refused.value)


def test_a_hub_that_swallows_packets_is_given_up_soon(monkeypatch):
    done = threading.Event()

    def hang(*_, **__):
        done.wait()
        raise TimeoutError

    for switch in ("GENIUS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.setattr(access.urllib.request, "urlopen", hang)
    begun = time.perf_counter()
    with pytest.raises(NetworkNeeded, match="cannot be reached"):
        access.check_reachable("this")
    assert time.perf_counter() - begun < 20  # two seconds, and what a busy machine adds
    done.set()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "nonsense"])
def test_a_pull_from_a_hub_that_does_not_answer_leaves_with_5_and_advice(monkeypatch, capsys, address):
    for switch in ("GENIUS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert main(["pull", "some/repo"]) == 5
    message = capsys.readouterr().err
    assert f"{address} cannot be reached" in message
    assert "copy its folder" in message


def test_an_absent_model_is_said_without_importing_torch():
    script = (
        "import sys\n"
        "from genius_search.errors import NetworkNeeded\n"
        "from genius_search.hub.pull import find_or_pull\n"
        "try:\n    find_or_pull('some/repo', 'model', check=print)\n"
        "except NetworkNeeded as error:\n"
        "    print({'torch', 'huggingface_hub.hf_api'} & sys.modules.keys(), error)"
    )
    output = subprocess.run(  # noqa: S603
        [sys.executable, "-c", script],
        env={**os.environ, "GENIUS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.startswith("set() some/repo is not on this machine")
    assert "genius pull some/repo" in output


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
    assert is_path(name) is place


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_refuses_is_not_called_a_network(number):
    for translate in (translate_hub_errors, translate_os_errors):
        with pytest.raises(UsageError, match="me/model"), translate("me/model"):
            raise OSError(number, "refused")


def test_a_connection_that_breaks_is_the_networks_fault():
    with pytest.raises(NetworkNeeded, match="Connection reset"), translate_hub_errors("me/model"):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
