"""A hub on this machine: the few answers that huggingface_hub needs, and faults on request."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

LARGE = (".safetensors", ".npy", ".sqlite", ".pth")


class Hub:
    """Its contents, the requests it had, and what goes wrong next."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path, range."""
        self.cut_after: int | None = None
        """Close the next download's connection after so many bytes, once."""
        self.wrong: str | None = None
        """Send other bytes for this file."""
        self.fails: str | None = None
        """Break off the connection instead of sending this file."""
        self.sent: list[str] = []
        """Files that were sent completely."""
        self.too_much = 0
        """Send so many bytes more than a file has."""
        self.full = False
        """Refuse to store anything."""
        self.commit_name: str | None = None
        """Say this instead of a commit."""
        self.headers: dict[str, str] = {}
        """Send these with each file."""
        self.changes: dict[str, object] = {}
        """Say this about each file of a listing."""
        self.answer: object = None
        """Give this answer to every question about a repository."""

    def hold(self, name: str, folder: Path, *, kind: str = "models") -> None:
        self.repositories[f"{kind}/{name}"] = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }

    def commit(self, repository: str) -> str:
        files = self.repositories[repository]
        return hashlib.sha1(json.dumps({n: blob(c) for n, c in sorted(files.items())}).encode()).hexdigest()  # noqa: S324

    def downloads(self) -> list[str]:
        """Files that were requested."""
        return [
            path.split("/resolve/")[1].partition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]


def blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324


def entry(path: str, content: bytes) -> dict:
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    extra = {"lfs": lfs} if path.endswith(LARGE) else {}
    return {"type": "file", "path": path, "size": len(content), "oid": blob(content), **extra}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status, body=b"", **headers):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            length = headers.pop("Content_Length", len(content))
            self.send_header("Content-Length", str(length))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if path == "/":
                return self.reply(200)
            if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(/revision/.*|/tree/.*)?", path):
                repository = f"{match[1]}/{match[2]}"
                if repository not in hub.repositories:
                    return self.reply(404, X_Error_Code="RepoNotFound")
                if "/revision/nowhere" in path:
                    return self.reply(404, X_Error_Code="RevisionNotFound")
                if hub.answer is not None:
                    return self.reply(200, hub.answer)
                if "/tree/" in path:
                    files = hub.repositories[repository]
                    listed = [{**entry(name, content), **hub.changes} for name, content in files.items()]
                    return self.reply(200, listed)
                sha = hub.commit_name or hub.commit(repository)
                return self.reply(200, {"id": match[2], "sha": sha, "siblings": []})
            match = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path)
            if match is None:
                return self.reply(404)
            repository = f"{'datasets' if match[1] else 'models'}/{match[2]}"
            return self.send_file(repository, match[4])

        def send_file(self, repository, name):
            content = hub.repositories[repository][name]
            facts = entry(name, content)
            headers = {
                "ETag": f'"{facts.get("lfs", {}).get("oid", facts["oid"])}"',
                "X_Repo_Commit": hub.commit(repository),
                **hub.headers,
            }
            if hub.fails == name and self.command == "GET":
                return self.reply(500)
            if hub.wrong == name:
                content = bytes(reversed(content))
            start = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
            part = content[start:]
            if self.command == "GET" and hub.cut_after is not None and len(part) > hub.cut_after:
                cut, hub.cut_after = hub.cut_after, None
                self.reply(206 if start else 200, part[:cut], Content_Length=len(part), **headers)
                self.close_connection = True
                return None
            if self.command == "GET" and hub.too_much:
                with contextlib.suppress(ConnectionError):  # nobody has to read all of it
                    self.reply(200, part + bytes(hub.too_much), **headers)
                self.close_connection = True
                return None
            if self.command == "GET":
                hub.sent.append(name)
            return self.reply(206 if start else 200, part, **headers)

        def do_POST(self):
            path = self.path.partition("?")[0]
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            hub.requests.append(("POST", path, None))
            if hub.full:
                return self.reply(403, {"error": "you may not write here"})
            if path == "/api/repos/create":
                wanted = json.loads(body)
                name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
                kind = f"{wanted.get('type', 'model')}s"
                hub.repositories.setdefault(f"{kind}/{name}", {})
                prefix = "datasets/" if kind == "datasets" else ""
                return self.reply(200, {"url": f"{hub.address}/{prefix}{name}", "id": name})
            if path == "/api/validate-yaml":
                return self.reply(200, {"errors": [], "warnings": []})
            if "/preupload/" in path:
                modes = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return self.reply(200, {"files": modes})
            repository = re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/commit/.*", path)[1]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    hub.repositories[repository][line["value"]["path"]] = content
                elif line["key"] == "deletedFile":
                    del hub.repositories[repository][line["value"]["path"]]
            address = f"{hub.address}/{repository}"
            return self.reply(200, {"commitUrl": address, "commitOid": hub.commit(repository)})

    return Handler


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running hub, empty, that the settings point to; with a cache of its own."""
    state = Hub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    state.address = f"http://127.0.0.1:{server.server_port}"
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    serving.start()
    for switch in ("GENIUS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", state.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 18)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    yield state
    server.shutdown()
    serving.join()
    server.server_close()
