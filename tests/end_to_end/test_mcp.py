"""`genius mcp` as agents start it: with standard input and output, and with HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
from mcp import StdioServerParameters

from tests.unit.serve.conftest import make_index
from tests.unit.serve.test_mcp import call, ids

COMMAND = ["-c", "import sys; from genius_search.cli import main; sys.exit(main())", "mcp"]


@pytest.fixture(scope="module")
def index(model, tmp_path_factory):
    return make_index(tmp_path_factory.mktemp("for agents"), model)


def test_the_command_answers_on_standard_output(index):
    server = StdioServerParameters(
        command=sys.executable, args=[*COMMAND, str(index.folder)], env=dict(os.environ)
    )
    assert ids(call(server, "search", where=["price=3"])) == ["1:3"]


@pytest.mark.slow
def test_the_command_answers_over_http(index):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, *COMMAND, index.folder, "--http", "--port", str(port)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:  # noqa: S603
        try:
            while process.poll() is None:
                with socket.socket() as client:
                    if not client.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.1)
            assert ids(call(f"http://127.0.0.1:{port}/mcp", "search", where=["price=3"])) == ["1:3"]
        finally:
            process.terminate()
