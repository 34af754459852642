"""An engine that attaches on a thread of its own, since the digest of the weights and the node may take a while."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmkv_client.engine.engine import Engine
from lmkv_client.engine.log import logger
from lmkv_client.processors import use_processors


class LateEngine:
    """`engine` is None until it is attached, after an error, and once it is closed."""

    def __init__(self, attach: Callable[[], Engine], *, without: str) -> None:
        """`attach` is called on the thread; `without` describes, for the log, how the engine runs until it returns."""
        self._attach = attach
        self._without = without
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._error: Exception | None = None
        self._is_awaited = True
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="lmkv-attach", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine | None:
        """The attached engine."""
        return self._engine

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is attached. Raises the error of `attach`; a later error is logged."""
        self._thread.join(timeout)
        with self._lock:
            self._is_awaited = False
            error = self._error
        if error is not None:
            raise error
        if self._thread.is_alive():
            logger.warning("the digest of the weights is not known yet: %s until it is", self._without)

    def close(self) -> None:
        """Detaches, now or once it is attached. Idempotent."""
        with self._lock:
            self._is_closed = True
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _run(self) -> None:
        use_processors()
        try:
            engine = self._attach()
        except Exception as error:
            with self._lock:
                self._error = error
                if self._is_awaited:
                    return
            logger.error("%s: %s", self._without, error)
            return
        with self._lock:
            if not self._is_closed:
                self._engine = engine
                return
        engine.close()
