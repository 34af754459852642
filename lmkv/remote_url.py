"""Where the store is that nodes share: `remote_url`, taken apart. Pure; used by the node and `lmkv doctor`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss")
"""Those that end with an s after `valkey` or `redis` speak TLS."""
VALKEY_PORT = 6379
_AWS_HOST = re.compile(r"(?P<bucket>.+)\.s3[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteUrl:
    """A store: a Valkey or Redis server, or a bucket of S3's."""

    url: str = field(repr=False)
    """As it was written; it may hold a password."""
    shown: str
    """The same for people, without what is secret."""
    host: str = ""
    port: int = 0
    """Of a server. An `endpoint_url` says where buckets are."""
    bucket: str = ""
    """Empty for a server."""
    prefix: str = ""
    """What names begin with in the bucket; empty, or it ends with a slash."""
    region: str = ""
    """The bucket's, if the URL says it."""


def parse_remote_url(text: str) -> RemoteUrl:
    """The store of a URL. Raises `ValueError` if it is none that lmkv knows."""
    parts = urlsplit(text)
    if parts.scheme in VALKEY_SCHEMES:
        if not parts.hostname or not re.fullmatch(r"/?[0-9]*", parts.path) or parts.fragment:
            raise ValueError
        port, host = parts.port or VALKEY_PORT, parts.hostname
        shown = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}/{parts.path.lstrip('/') or 0}"
        return RemoteUrl(url=text, shown=shown, host=host, port=port)
    if parts.scheme != "s3" or parts.query or parts.fragment or not _BUCKET.fullmatch(parts.netloc):
        raise ValueError
    aws = _AWS_HOST.fullmatch(parts.netloc)  # as LMCache has it
    bucket, prefix = (aws["bucket"] if aws else parts.netloc), parts.path.strip("/")
    return RemoteUrl(
        url=text,
        shown=f"s3://{bucket}/{prefix}".rstrip("/"),
        bucket=bucket,
        prefix=f"{prefix}/" if prefix else "",
        region=aws["region"] if aws else "",
    )
