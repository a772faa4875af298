"""A hub on this machine: the few answers that huggingface_hub needs."""

from __future__ import annotations

import base64
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
    """Its contents, the requests it had, and what goes wrong."""

    def __init__(self) -> None:
        self.address = ""
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.downloads: list[str] = []
        self.is_closed = False
        """Refuse to store anything."""

    def hold(self, name: str, folder: Path, *, kind: str = "models") -> None:
        self.repositories[f"{kind}/{name}"] = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }

    def commit(self, repository: str) -> str:
        files = self.repositories[repository]
        return hashlib.sha1(  # noqa: S324
            json.dumps({n: blob(c) for n, c in sorted(files.items())}).encode()
        ).hexdigest()


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
            self.send_header("Content-Length", str(len(content)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            if match := re.fullmatch(
                r"/api/(models|datasets)/([^/]+/[^/]+)(/revision/.*|/tree/.*)?", path
            ):
                repository = f"{match[1]}/{match[2]}"
                if repository not in hub.repositories:
                    return self.reply(404, X_Error_Code="RepoNotFound")
                if "/tree/" in path:
                    files = hub.repositories[repository]
                    return self.reply(
                        200, [entry(name, content) for name, content in files.items()]
                    )
                return self.reply(
                    200, {"id": match[2], "sha": hub.commit(repository), "siblings": []}
                )
            match = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path)
            if match is None:
                return self.reply(404)
            repository, name = f"{'datasets' if match[1] else 'models'}/{match[2]}", match[4]
            content = hub.repositories[repository][name]
            facts = entry(name, content)
            etag = f'"{facts.get("lfs", {}).get("oid", facts["oid"])}"'
            if self.command == "GET":
                hub.downloads.append(name)
            return self.reply(200, content, ETag=etag, X_Repo_Commit=hub.commit(repository))

        def do_POST(self):
            path = self.path.partition("?")[0]
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if hub.is_closed:
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
    """A running hub, empty, that the library's settings point to; with a cache of its own."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    state.address = f"http://127.0.0.1:{server.server_port}"
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    serving.start()
    template = f"{state.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", state.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    yield state
    server.shutdown()
    serving.join()
    server.server_close()
