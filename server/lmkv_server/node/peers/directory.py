"""Finds the node of an instance, on this host or at a coordinator.

An instance is found if its node runs on this host under the same user and `runtime_dir`, or if it is registered at a
coordinator. Requests do not name addresses: a node connects, and sends its token, only to nodes that are found here.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TextIO

from lmkv.errors import ConfigError, InstanceNotFound, Unreachable
from lmkv.runtime.folder import Folder
from lmkv.v1.cache_service_pb2 import Holder

logger = logging.getLogger(__name__)

FILE = "peer.json"
"""File in an instance's folder with its epoch and address. The node keeps it locked while it runs."""
MAX_FILE_BYTES = 1024
LOCK_TRIES = 100
MAX_KNOWN = 256
"""Instances whose registration is cached."""
FRESH_SECONDS = 5.0
"""The time for which a cached registration is used; while no coordinator answers it is used for longer."""

Locate = Callable[[str], Awaitable[Holder | None]]
"""Finds an instance at the coordinators; None if it is not registered. Raises `Unreachable` if none answers."""


async def _no_coordinator(_: str) -> Holder | None:
    return None


class InstanceDirectory:
    """Finds instances. `publish` makes this node findable on its host until it ends."""

    def __init__(self, runtime_path: Path, locate: Locate = _no_coordinator) -> None:
        self.locate = locate
        self._runtime_path = runtime_path
        self._known: OrderedDict[str, tuple[Holder, float]] = OrderedDict()
        self._file: TextIO | None = None

    def publish(self, instance_id: str, epoch: int, peer_address: str) -> None:
        """Makes this node findable on its host."""
        with Folder.private(self._runtime_path / instance_id, "runtime_dir") as folder:
            file = os.fdopen(folder.open(FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+")
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # other nodes lock it for a moment, to find out whether the last node has ended
                time.sleep(0.01)
        file.truncate(0)
        file.write(json.dumps({"epoch": epoch, "peer_address": peer_address}))
        file.flush()
        self._file = file

    def close(self) -> None:
        """Makes this node not findable. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    async def find(self, instance_id: str) -> Holder:
        """The instance's node. Raises `InstanceNotFound`, or `Unreachable` if no coordinator answers."""
        if holder := self._on_this_host(instance_id):
            return holder
        known, until = self._known.get(instance_id, (None, 0.0))
        if known and time.monotonic() < until:
            return known
        try:
            holder = await self.locate(instance_id)
        except Unreachable:
            if known:
                return known
            raise
        if holder is None:
            self.forget(instance_id)
            raise InstanceNotFound(
                f"no instance {instance_id!r} runs on this host or is registered; set coordinator_address, the same at "
                "prefill and decode engines",
                instance_id=instance_id,
            )
        if not holder.peer_address:
            raise InstanceNotFound(
                f"instance {instance_id!r} serves no peers; set enable_p2p there", instance_id=instance_id
            )
        self._known[instance_id] = holder, time.monotonic() + FRESH_SECONDS
        self._known.move_to_end(instance_id)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return holder

    async def find_epoch(self, instance_id: str, epoch: int) -> Holder:
        """The instance's node, if it is of this epoch. Raises as `find`."""
        holder = await self.find(instance_id)
        if holder.epoch != epoch:  # it may have restarted a moment ago
            self.forget(instance_id)
            holder = await self.find(instance_id)
        if holder.epoch != epoch:
            raise InstanceNotFound(
                f"instance {instance_id!r} is registered in another epoch", instance_id=instance_id, epoch=epoch
            )
        return holder

    def forget(self, instance_id: str) -> None:
        """Drops a cached registration: another node may be this instance by now."""
        self._known.pop(instance_id, None)

    def _on_this_host(self, instance_id: str) -> Holder | None:
        if not instance_id or "/" in instance_id or instance_id in (".", ".."):
            return None
        path = self._runtime_path / instance_id
        try:
            with (
                Folder.private(path, "runtime_dir", make=False) as folder,
                os.fdopen(folder.open(FILE, os.O_RDONLY)) as file,
            ):
                if os.fstat(folder.fd).st_mode & 0o077:
                    return None
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    content = json.loads(file.read(MAX_FILE_BYTES))
                    return Holder(instance_id=instance_id, epoch=content["epoch"], peer_address=content["peer_address"])
        except ConfigError:  # the node of another user: users may share a runtime_dir
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                logger.debug("cannot read %s: %s", path, error)
        return None  # the file is missing, or not locked: its node has ended
