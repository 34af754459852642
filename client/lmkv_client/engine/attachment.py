"""One attachment of an engine to its node, and its pool: mapped on a thread beside the engine's steps, with retries."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lmkv.errors import LmkvError
from lmkv.pool.pool import LEFT_BYTES
from lmkv.pool.socket import AttachedPool, attach
from lmkv_client.engine.log import logger
from lmkv_client.processors import use_processors

TRY_SECONDS = 5.0
"""Timeout of one try. A node on a busy host may take a second to answer."""
FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0
"""The delay between tries doubles from the first to the second value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """The pool that extents refer to. With a new attachment all extents of the old one are invalid."""

    engine_id: str
    pool_socket: str
    epoch: int
    node_address: str = ""
    """gRPC address of the node."""
    device_buffer_bytes: int = 0
    """Bytes of the device buffer that the node would use; 0: none."""
    weight_version: str = ""
    """Version of the weights with which the engine attached."""


class PoolMapping:
    """The pool of one attachment: requested until the node provides it or `close` is called."""

    def __init__(self, attachment: Attachment, rank: int) -> None:
        self._attachment = attachment
        self._rank = rank
        self._lock = threading.Lock()
        self._pool: AttachedPool | None = None
        self._tried = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="lmkv-map", daemon=True).start()

    @property
    def tried(self) -> bool:
        """Whether the first try has ended; without a pool then, the node is unreachable for the time being."""
        return self._tried.is_set()

    def wait(self, timeout_seconds: float) -> None:
        """Waits for the end of the first try."""
        self._tried.wait(timeout_seconds)

    def take(self) -> AttachedPool | None:
        """The pool, once it is mapped. The caller closes it; later calls return None."""
        with self._lock:
            pool, self._pool = self._pool, None
        return pool

    def close(self) -> None:
        """Stops trying; unmaps a pool that was not taken. Does not wait for the thread. Idempotent."""
        self._closed.set()
        if pool := self.take():
            pool.close()

    def _run(self) -> None:
        use_processors()
        delay = FIRST_RETRY_SECONDS
        while (pool := self._try()) is None:
            if self._closed.wait(delay):
                return
            delay = min(2 * delay, MAX_RETRY_SECONDS)
        if self.tried:
            logger.info("mapped the node's pool after a failed try; loads and stores work again")
        with self._lock:
            is_wanted = not self._closed.is_set()
            if is_wanted:
                self._pool = pool
        self._tried.set()
        if is_wanted:
            populate(pool)
        else:
            pool.close()

    def _try(self) -> AttachedPool | None:
        at = self._attachment
        try:
            return attach(at.pool_socket, at.engine_id, self._rank, at.epoch, TRY_SECONDS)
        except LmkvError as error:
            if not self.tried and not self._closed.is_set():
                logger.warning(
                    "cannot map the node's pool; nothing is loaded or stored until a retry succeeds: %s", error
                )
            self._tried.set()
            return None


def populate(pool: AttachedPool) -> None:
    """Fills this process's page table ahead of the first copies."""
    try:
        pool.pool.populate(leave_bytes=LEFT_BYTES)
    except LmkvError as error:
        logger.warning("cannot touch the node's pool ahead of its first use: %s", error)
