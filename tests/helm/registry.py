"""A registry of images and charts on a port of this host, which holds what is pushed in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

USER, PASSWORD = "pusher", "secret"
"""The credentials that it asks for."""


class Registry(ThreadingHTTPServer):
    """Answers what clients ask to push and to look up: version 1.1 of OCI's distribution API."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.held: dict[str, tuple[bytes, str]] = {}
        """Blobs and manifests with their types, by path."""
        self.uploads: dict[str, bytes] = {}
        """What has arrived of blobs, by path."""

    @property
    def address(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self.server_port}"

    @property
    def authorization(self) -> str:
        """The header that every request must have."""
        return "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    def digest(self, name: str, tag: str) -> str:
        """The digest of a tag's manifest."""
        return digest_of(self.held[f"/v2/{name}/manifests/{tag}"][0])

    def log_in(self, folder: Path) -> None:
        """Writes what `docker login` writes to a folder that `DOCKER_CONFIG` names."""
        auth = self.authorization.removeprefix("Basic ")
        (folder / "config.json").write_text(json.dumps({"auths": {self.address: {"auth": auth}}}))


@contextmanager
def registry() -> Iterator[Registry]:
    """A registry that serves until the end of the block."""
    with Registry() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def digest_of(content: bytes) -> str:
    """The digest by which registries name a content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class _Handler(BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # name of the base class
        """Logs nothing."""

    def handle_one(self) -> None:
        content = self._content()
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != self.server.authorization:
            self._answer(401, WWW_Authenticate='Basic realm="registry"')
        elif self.command in ("GET", "HEAD"):
            found, kind = self.server.held.get(path, (b"", ""))
            is_found = bool(kind) or path == "/v2/"
            self._answer(200 if is_found else 404, found, Content_Type=kind, Docker_Content_Digest=digest_of(found))
        elif self.command == "POST":
            self._answer(202, Location=f"{path.rstrip('/')}/{uuid.uuid4().hex}")
        elif self.command == "PATCH":
            uploaded = self.server.uploads[path] = self.server.uploads.get(path, b"") + content
            self._answer(202, Location=path, Range=f"0-{len(uploaded) - 1}")
        else:
            self._hold(path, content)

    do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = handle_one  # noqa: N815  # names of the base class

    def _hold(self, path: str, content: bytes) -> None:
        content = self.server.uploads.pop(path, b"") + content
        digest = digest_of(content)
        kind = self.headers.get("Content-Type") or "application/octet-stream"
        is_blob = "/uploads/" in path
        folder = path.partition("uploads/")[0] if is_blob else path[: path.rindex("/") + 1]
        names = {folder + digest} if is_blob else {folder + digest, path}
        self.server.held |= dict.fromkeys(names, (content, kind))
        self._answer(201, Location=min(names), Docker_Content_Digest=digest)

    def _content(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
