"""`remote_url`: which stores it can name, and what is shown of it."""

from __future__ import annotations

from typing import Any

import pytest

from lmkv.config import NodeConfig, to_comparison
from lmkv.config.remote_url import parse_remote_url
from lmkv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "shown", "host", "port"),
    [
        ("valkey://h", "valkey://h:6379/0", "h", 6379),
        ("redis://user:hush@h:1/2", "redis://h:1/2", "h", 1),
        ("rediss://:hush@h/", "rediss://h:6379/0", "h", 6379),
        ("valkeys://[::1]:7/3?ssl_cert_reqs=none", "valkeys://[::1]:7/3", "::1", 7),
    ],
)
def test_a_server(text: str, shown: str, host: str, port: int) -> None:
    url = parse_remote_url(text)
    assert (url.shown, url.host, url.port, url.bucket) == (shown, host, port, "")
    assert "hush" not in repr(url)


@pytest.mark.parametrize(
    ("text", "shown", "bucket", "prefix", "region"),
    [
        ("s3://chunks", "s3://chunks", "chunks", "", ""),
        ("s3://my.chunks/a/b/", "s3://my.chunks/a/b", "my.chunks", "a/b/", ""),
        ("s3://chunks.s3.eu-west-1.amazonaws.com", "s3://chunks", "chunks", "", "eu-west-1"),
    ],
)
def test_a_bucket(text: str, shown: str, bucket: str, prefix: str, region: str) -> None:
    url = parse_remote_url(text)
    assert (url.shown, url.bucket, url.prefix, url.region) == (shown, bucket, prefix, region)
    assert (url.host, url.port) == ("", 0)


def test_a_folder() -> None:
    url = parse_remote_url("file:///mnt/shared/kv")
    assert (url.folder, url.shown, url.host, url.bucket) == ("/mnt/shared/kv", "file:///mnt/shared/kv", "", "")


@pytest.mark.parametrize(
    "text",
    ["file://host/mnt", "file:///", "file:///mnt/../etc", "file:///mnt?x=1", "file:///mnt#x", "file://mnt"],
)
def test_what_is_no_absolute_path_is_no_folder(text: str) -> None:
    with pytest.raises(ValueError):
        parse_remote_url(text)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "max_remote_size is required with file:///mnt/kv, or remote_ttl"),
        ({"max_remote_size": 1, "local_disk": "/mnt/kv"}, "/mnt/kv is not a folder of its own"),
        ({"max_remote_size": 1, "local_disk": ["/a", "/mnt"]}, "local_disk has /mnt, which one node uses"),
        ({"max_remote_size": 1, "local_disk": "/mnt/kv/disk"}, "local_disk has /mnt/kv/disk, which one node uses"),
        ({"remote_url": "s3://chunks", "max_remote_size": 1}, "max_remote_size is for a remote_url of file://"),
    ],
)
def test_a_folder_has_limits_and_is_no_disk_of_one_node(settings: dict[str, Any], error: str) -> None:
    disk = {"max_local_disk_size": 1} if "local_disk" in settings else {}
    with pytest.raises(ConfigError, match=error):
        NodeConfig(**{"remote_url": "file:///mnt/kv"} | settings | disk)


def test_either_limit_of_a_folder_is_enough() -> None:
    assert NodeConfig(remote_url="file:///mnt/kv", max_remote_size=1).remote_bytes == 1 << 30
    assert NodeConfig(remote_url="file:///mnt/kv", remote_ttl=60).remote_ttl == 60


@pytest.mark.parametrize(
    "text", ["s3://chunks?x=1", "s3://chunks#part", "ftp://chunks", "redis://h#part", "redis://h/0/1", "valkey:///0"]
)
def test_parts_that_no_store_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_remote_url(text)


@pytest.mark.parametrize(
    "text",
    ["lm://h:1", "redis://", "redis://h:99999", "redis://h/zero", "s3://", "s3://key:hush@chunks", "s3://b", "chunks"],
)
def test_what_is_no_store_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="remote_url must be valkey://HOST:PORT/DB") as refused:
        NodeConfig(remote_url=text)
    assert "hush" not in str(refused.value)


def test_no_error_repeats_the_password_of_a_url_at_the_wrong_key() -> None:
    with pytest.raises(ConfigError, match="enable_p2p must be true or false, not what it is") as refused:
        NodeConfig(enable_p2p="redis://:hush@h")  # type: ignore[arg-type]  # what people write
    assert "hush" not in str(refused.value)


def test_a_ttl_is_for_servers() -> None:
    assert NodeConfig(remote_url="valkey://h", remote_ttl=60).remote_ttl == 60
    with pytest.raises(ConfigError, match="lifecycle"):
        NodeConfig(remote_url="s3://chunks", remote_ttl=60)


def test_two_configurations_are_compared_without_their_passwords() -> None:
    first, second = (to_comparison(NodeConfig(remote_url=f"redis://:{word}@h")) for word in ("hush", "psst"))
    assert first["LMKV_REMOTE_URL"] != second["LMKV_REMOTE_URL"]
    assert "hush" not in str(first)
    assert first == to_comparison(NodeConfig(remote_url="redis://:hush@h"))
