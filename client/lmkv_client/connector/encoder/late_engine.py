"""An engine that attaches on a thread of its own, since the digest of the weights and the node may take a while."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmkv.config import ConnectorConfig
from lmkv.errors import LmkvError
from lmkv.spec import KvSpec
from lmkv_client.connector.vllm_api import init_logger
from lmkv_client.engine import Engine
from lmkv_client.processors import use_processors

logger = init_logger("vllm.lmkv")


class LateEngine:
    """`engine` is None until it is attached, after an error, and once it is closed."""

    def __init__(self, config: ConnectorConfig, spec: Callable[[], KvSpec]) -> None:
        """`spec` is called on the thread."""
        self._config = config
        self._spec = spec
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._error: LmkvError | None = None
        self._is_awaited = True
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="lmkv-encoder-attach", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine | None:
        """The attached engine."""
        return self._engine

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is attached. Raises `ConfigError` if it cannot be; a later error is logged."""
        self._thread.join(timeout)
        with self._lock:
            self._is_awaited = False
            error = self._error
        if error is not None:
            raise error
        if self._thread.is_alive():
            logger.warning("the digest of the weights is not known yet: encoders run for everything until it is")

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
            engine = Engine.attach(self._spec(), config=self._config)
        except LmkvError as error:
            with self._lock:
                self._error = error
                if self._is_awaited:
                    return
            logger.error("outputs of encoders are neither loaded nor stored: %s", error)
            return
        with self._lock:
            if not self._is_closed:
                self._engine = engine
                return
        engine.close()
