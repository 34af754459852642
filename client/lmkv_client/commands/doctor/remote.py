"""Whether this host can reach the remote store. Does not authenticate: the node logs whether that succeeds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from lmkv.config import NodeConfig
from lmkv.config.remote_url import parse_remote_url
from lmkv_client.commands.doctor.finding import Finding, fail, ok

CONNECT_SECONDS = 3.0


def check_remote(config: NodeConfig) -> Iterator[Finding]:
    """Nothing, where no store is configured."""
    if not config.remote_url:
        return
    url = parse_remote_url(config.remote_url)
    package, extra = ("botocore", "s3") if url.bucket else ("valkey", "valkey")
    if find_spec(package) is None:
        yield fail(
            "remote_url",
            f"{url.shown} needs {package}, which is not installed; pip install '.[{extra}]' in a clone of lmkv",
        )
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
