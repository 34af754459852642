"""Notices that the node of a mapped pool has exited while vLLM runs no step. Used by `WorkerSide`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmkv.pool.socket import AttachedPool
from lmkv_client.processors import use_processors


class NodeWatch:
    """Waits on a thread until the node of a pool has disconnected, then calls `on_exit`, or until the pool is closed.

    `on_exit` returns after how many seconds it is to be called again; None: never. It may close the pool.
    """

    def __init__(self, pool: AttachedPool, on_exit: Callable[[], float | None]) -> None:
        self._node = pool.watch()
        self._on_exit = on_exit
        threading.Thread(target=self._run, name="lmkv-node-watch", daemon=True).start()

    def _run(self) -> None:
        use_processors()
        self._node.wait()
        pause = threading.Event()
        while (seconds := self._on_exit()) is not None:
            pause.wait(seconds)
