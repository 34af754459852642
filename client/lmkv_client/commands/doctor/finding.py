"""Findings of checks, one line each with the fix, and the checks of files and of the remote store that a node uses."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from lmkv.auth.credentials import validity
from lmkv.auth.encryption_keys import KEY, read_encryption_keys
from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig
from lmkv.config.remote_url import parse_remote_url
from lmkv.errors import ConfigError
from lmkv.runtime.folder import Folder

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: Level
    text: str


def ok(check: str, text: str) -> Finding:
    """The check passed."""
    return Finding(check=check, level="ok", text=text)


def warn(check: str, text: str) -> Finding:
    """The check passed, but the configuration may be unintended."""
    return Finding(check=check, level="warn", text=text)


def fail(check: str, text: str) -> Finding:
    return Finding(check=check, level="fail", text=text)


SOON_SECONDS = 14 * 86_400.0


def check_tls(config: ConnectorConfig | CoordinatorConfig) -> Iterator[Finding]:
    """Whether the files are valid and no certificate has expired or expires soon."""
    try:
        credentials = config.credentials
    except ConfigError as error:
        yield fail("tls", str(error))
        return
    files = {"tls_cert": credentials.cert, "tls_ca": credentials.ca, "tls_client_ca": credentials.client_ca}
    if not any(files.values()):
        yield ok("tls", "not configured: the control plane is not encrypted")
    for name, path in files.items():
        if path:
            yield _check_validity(name, path)


def _check_validity(name: str, path: str) -> Finding:
    """The certificate of a file that expires first."""
    begin, end = validity(path)
    now = time.time()
    if begin > now:
        return fail(name, f"{path} is not valid before {_day(begin)}; check this host's clock")
    if end < now:
        return fail(name, f"{path} has expired on {_day(end)}; renew it")
    if end < now + SOON_SECONDS:
        return warn(name, f"{path} is valid only until {_day(end)}; renew it")
    return ok(name, f"{path} is valid until {_day(end)}")


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d")


def check_encryption(config: NodeConfig) -> Iterator[Finding]:
    """Whether the node can use the file; nothing, where none is configured."""
    if not config.encryption_key_file:
        return
    if find_spec("cryptography") is None:
        yield fail(KEY, "it needs cryptography, which is not installed; pip install '.[encryption]' in a clone of lmkv")
        return
    try:
        keys = read_encryption_keys(config.encryption_key_file)
    except ConfigError as error:
        yield fail(KEY, str(error).removeprefix(f"{KEY}: "))
    else:
        path, readable = config.encryption_key_file, ", ".join(key.name for key in keys)
        yield ok(KEY, f"{path}: new chunks are encrypted with key {keys[0].name}; readable are those of {readable}")


CONNECT_SECONDS = 3.0


def check_remote_package(config: NodeConfig) -> Iterator[Finding]:
    """Whether the client of the remote store is missing; nothing, where it is installed or no store is configured."""
    if not config.remote_url:
        return
    url = parse_remote_url(config.remote_url)
    if url.folder:
        return
    package, extra = ("botocore", "s3") if url.bucket else ("valkey", "valkey")
    if find_spec(package) is None:
        yield fail(
            "remote_url",
            f"{url.shown} needs {package}, which is not installed; pip install '.[{extra}]' in a clone of lmkv",
        )


def check_remote(config: NodeConfig) -> Iterator[Finding]:
    """Nothing, where no store is configured."""
    if not config.remote_url:
        return
    if missing := list(check_remote_package(config)):
        yield from missing
        return
    url = parse_remote_url(config.remote_url)
    if url.folder:
        yield _check_folder(Path(url.folder))
        return
    host, port = url.host, url.port
    if url.bucket:
        endpoint = urlsplit(config.remote_endpoint_url or "https://s3.amazonaws.com")
        host, port = endpoint.hostname or "", endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        fix = "start it, or set remote_url" + (" and remote_endpoint_url" if url.bucket else "")
        yield fail("remote_url", f"{host}:{port} of {url.shown} does not respond ({error.strerror or error}); {fix}")
    else:
        yield ok("remote_url", f"{url.shown} responds at {host}:{port}; the node logs whether authentication succeeds")


def _check_folder(path: Path) -> Finding:
    """Whether the folder that hosts share can be used. Its file system may hang, so a thread asks it."""
    found: list[Finding] = []
    asking = threading.Thread(target=lambda: found.append(_look_at(path)), name="lmkv-doctor-folder", daemon=True)
    asking.start()
    asking.join(CONNECT_SECONDS)
    return found[0] if found else fail("remote_url", f"{path} does not answer; check the server of its file system")


def _look_at(path: Path) -> Finding:
    try:
        Folder.shared(path, "remote_url").close()
    except ConfigError as error:
        return fail("remote_url", str(error).removeprefix("remote_url: "))
    except OSError as error:
        return fail("remote_url", f"{path} cannot be used: {error.strerror}; mount it, or make it")
    if not os.access(path, os.W_OK | os.X_OK):
        return warn("remote_url", f"{path} is read-only here: its chunks are read, and none are written")
    return ok("remote_url", f"{path} can be read and written")
