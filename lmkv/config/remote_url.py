"""Parses `remote_url`, the address of the store that nodes share. Pure; used by the node and `lmkv doctor`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss")
"""`valkeys` and `rediss` use TLS."""
TLS_SCHEMES = ("valkeys", "rediss")
VALKEY_PORT = 6379
FILE_SCHEME = "file"
_AWS_HOST = re.compile(r"(?P<bucket>.+)\.s3[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com")
_FOLDER = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")


def has_tls(url: str) -> bool:
    """Whether a URL names a server that is called with TLS."""
    return urlsplit(url).scheme in TLS_SCHEMES


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteUrl:
    """A store: a Valkey or Redis server, an S3 bucket, or a folder that hosts share."""

    url: str = field(repr=False)
    """The URL as configured; it may contain a password."""
    shown: str
    """The URL without secrets, for messages."""
    host: str = ""
    port: int = 0
    """Port of a server; 0 for a bucket or folder."""
    folder: str = ""
    """Absolute path of a folder; empty for a server or bucket."""
    bucket: str = ""
    """Empty for a server or folder."""
    prefix: str = ""
    """Prefix of object names in the bucket; empty, or ends with a slash."""
    region: str = ""
    """Region of the bucket, if the URL contains it."""


def parse_remote_url(text: str) -> RemoteUrl:
    """The store of a URL. Raises `ValueError` if the URL is invalid or of an unknown kind."""
    parts = urlsplit(text)
    if parts.scheme in VALKEY_SCHEMES:
        if not parts.hostname or not re.fullmatch(r"/?[0-9]*", parts.path) or parts.fragment:
            raise ValueError
        port, host = parts.port or VALKEY_PORT, parts.hostname
        shown = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}/{parts.path.lstrip('/') or 0}"
        return RemoteUrl(url=text, shown=shown, host=host, port=port)
    if parts.scheme == FILE_SCHEME and text == f"{FILE_SCHEME}://{parts.path}" and _FOLDER.fullmatch(parts.path):
        return RemoteUrl(url=text, shown=text, folder=parts.path)
    if parts.scheme != "s3" or parts.query or parts.fragment or not _BUCKET.fullmatch(parts.netloc):
        raise ValueError
    aws = _AWS_HOST.fullmatch(parts.netloc)  # LMCache's form
    bucket, prefix = (aws["bucket"] if aws else parts.netloc), parts.path.strip("/")
    return RemoteUrl(
        url=text,
        shown=f"s3://{bucket}/{prefix}".rstrip("/"),
        bucket=bucket,
        prefix=f"{prefix}/" if prefix else "",
        region=aws["region"] if aws else "",
    )
