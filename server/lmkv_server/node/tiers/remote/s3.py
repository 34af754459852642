"""A bucket of S3, or of a compatible service, as a `RemoteStore`.

By botocore, on threads. NIXL's OBJ plugin writes straight into the pool, but is no faster, takes more of the processor,
has no deadlines, takes a shorter object for a whole one, and can neither measure nor remove.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import get_session

from lmkv.config.remote_url import RemoteUrl
from lmkv_server.node.tiers.remote.store import StoreRefused, first_bytes

ASKED_AT_ONCE = 16
"""S3 has no request about many objects; this many are asked for at a time."""
MAX_CONNECTIONS = 32
REMOVED_AT_ONCE = 1000
"""The most that S3 accepts in one request."""
STEP_BYTES = 1 << 20
_ABSENT = ("404", "NoSuchKey", "NotFound")
_THERE = ("PreconditionFailed", "412", "ConditionalRequestConflict")


class S3Store:
    """Credentials and region come from where AWS's own tools find them."""

    one_per_request = True
    pads_headers = False
    evicted_count = 0

    def __init__(self, url: RemoteUrl, *, endpoint_url: str = "", timeout_seconds: float) -> None:
        self.shown = f"{url.shown} at {endpoint_url}" if endpoint_url else url.shown
        self._url = url
        self._endpoint_url = endpoint_url
        self._timeout_seconds = timeout_seconds
        self._made: Any = None
        self._askers = ThreadPoolExecutor(ASKED_AT_ONCE, "lmkv-s3-ask")

    def open(self) -> None:
        if self._made is None:
            with _failures():
                self._made = self._make_client()
        with _failures():
            self._made.head_bucket(Bucket=self._url.bucket)

    def sizes(self, names: Sequence[str]) -> list[int]:
        return list(self._askers.map(self._size, names))

    def get(self, name: str, parts: Sequence[memoryview]) -> int:
        """Bytes are copied once on the way."""
        deadline = time.monotonic() + self._timeout_seconds
        with _failures():
            try:
                answer = self._made.get_object(Bucket=self._url.bucket, Key=self._url.prefix + name)
            except ClientError as error:
                if _code(error) in _ABSENT:
                    return 0
                raise
            size_bytes = int(answer["ContentLength"])
            with closing(answer["Body"]) as body:
                if size_bytes > sum(map(len, parts)):
                    return 0
                return size_bytes if all(_fill(body, part, deadline) for part in first_bytes(parts, size_bytes)) else 0

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Bytes are copied once on the way."""
        if self._size(name):
            return False
        with _failures():
            try:
                self._made.put_object(
                    Bucket=self._url.bucket, Key=self._url.prefix + name, Body=b"".join(parts), IfNoneMatch="*"
                )
            except ClientError as error:
                if _code(error) in _THERE:
                    return False
                raise
        return True

    def remove(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), REMOVED_AT_ONCE):
            objects = [{"Key": self._url.prefix + name} for name in names[start : start + REMOVED_AT_ONCE]]
            with _failures():
                answer = self._made.delete_objects(Bucket=self._url.bucket, Delete={"Objects": objects, "Quiet": True})
            if failed := answer.get("Errors"):
                raise StoreRefused(f"{len(failed)} objects stay: {failed[0].get('Message', failed[0].get('Code'))}")

    def names(self, prefix: str) -> Iterator[list[str]]:
        start = len(self._url.prefix)
        with _failures():
            pages = self._made.get_paginator("list_objects_v2").paginate(
                Bucket=self._url.bucket, Prefix=self._url.prefix + prefix
            )
            for page in pages:
                yield [found["Key"][start:] for found in page.get("Contents", ())]

    def close(self) -> None:
        self._askers.shutdown(wait=False, cancel_futures=True)
        if self._made is not None:
            self._made.close()

    def _size(self, name: str) -> int:
        with _failures():
            try:
                answer = self._made.head_object(Bucket=self._url.bucket, Key=self._url.prefix + name)
            except ClientError as error:
                if _code(error) in _ABSENT:
                    return 0
                raise
        return int(answer["ContentLength"])

    def _make_client(self) -> Any:
        return get_session().create_client(
            "s3",
            region_name=self._url.region or None,
            endpoint_url=self._endpoint_url or None,
            config=Config(
                connect_timeout=self._timeout_seconds,
                read_timeout=self._timeout_seconds,
                retries={"total_max_attempts": 1},  # it is known what to do without
                max_pool_connections=MAX_CONNECTIONS,
                request_checksum_calculation="when_required",  # chunks have checksums of their own
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if self._endpoint_url else "auto", "payload_signing_enabled": False},
            ),
        )


@contextmanager
def _failures() -> Iterator[None]:
    """Maps exceptions of botocore to those of a store."""
    try:
        yield
    except ClientError as error:
        raise StoreRefused(f"{_code(error)}: {error.response.get('Error', {}).get('Message', '')}") from None
    except (BotoCoreError, ValueError) as error:
        raise OSError(str(error)) from None


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _fill(body: Any, memory: memoryview, deadline: float) -> bool:
    """Fills the memory from a response; False if it ends early. Raises `TimeoutError`."""
    at = 0
    while at < len(memory):
        if time.monotonic() > deadline:
            raise TimeoutError("no whole answer in time")
        count = body.readinto(memory[at : at + STEP_BYTES])
        if not count:
            return False
        at += count
    return True
