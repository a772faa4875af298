"""A process that is killed while it decodes a video, or encodes its frames, can be restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genius_search.encoders import open as open_module
from genius_search.index.index import Index
from tests.videos import BLUE, GREEN, RED, YELLOW, colour_plugins, draw_video

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from genius_search.encoders import open as open_module
from genius_search.index.index import Index
from tests.videos import colour_plugins

open_module.entry_points = colour_plugins
Index.create(sys.argv[1], sys.argv[2], encoder="colours:x")
"""


def start(index: Path, videos: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(index), str(videos)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ)  # noqa: S603


@pytest.mark.parametrize(
    "pattern", ["genius-search/videos/.*.partial/*", "genius-search/videos/*/result.json"]
)
def test_a_killed_run_continues_with_unread_videos(tmp_path, monkeypatch, pattern):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(open_module, "entry_points", colour_plugins)
    videos = tmp_path / "videos"
    videos.mkdir()
    for name in ("a.mp4", "b.mp4"):
        scenes = [(RED, 20), (GREEN, 20), (BLUE, 20)] if name == "a.mp4" else [(YELLOW, 60)]
        draw_video(videos / name, scenes)
    process = start(tmp_path / "i", videos)
    deadline = time.monotonic() + 60
    while not [*(tmp_path / "cache").glob(pattern)] and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert start(tmp_path / "i", videos).wait() == 0
    index = Index.open(tmp_path / "i")
    assert len(index) == 2
    for query, begin in (("green", 20), ("blue", 40)):
        hit = index.search(query, k=1)[0]
        assert hit.id == "a.mp4"
        assert begin <= hit.moment < begin + 20
    assert not [*(tmp_path / "cache").glob("genius-search/videos/.*.partial")]
