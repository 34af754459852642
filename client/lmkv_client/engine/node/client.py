"""The engine's connection to its node: the scheduler's thread sends and receives, another thread attaches."""

from __future__ import annotations

import os
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import lmkv
from lmkv.config import ConnectorConfig, as_written
from lmkv.config.node import attach_socket_beside
from lmkv.errors import ConfigConflict, ConfigError, LmkvError, Unreachable
from lmkv.kv_inputs import KvInputs
from lmkv.spec import KvSpec
from lmkv.units import format_bytes, format_duration, format_rate
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.attachment import Attachment
from lmkv_client.engine.key_space import ServedNames
from lmkv_client.engine.log import logger
from lmkv_client.engine.node.connection import AttachConnection
from lmkv_client.engine.node.launcher import NodeLauncher
from lmkv_client.processors import use_processors

CONNECT_TIMEOUT_SECONDS = 2.0
FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 1.0


class NodeLost:
    """Event: the connection to the node is lost, and with it everything that it had granted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identified:
    """Event: the weights are identified, and the engine attaches with a spec of this identity."""

    model_id: str


Event = Identified | Attachment | NodeLost | pb.AttachResponse


class NodeClient:
    """Keeps the engine attached to its node: finds or starts it, and does so again whenever it is lost.

    `receive` and `wait` put what has arrived into `inbox`, which the scheduler side empties. While they are not called,
    the client's own thread receives.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        spec: KvSpec,
        worker_count: int,
        served: ServedNames | None = None,
        *,
        wants_tier_changes: bool = False,
    ) -> None:
        """`served` are the names that the node registers for this engine, as they are at each attachment.

        `wants_tier_changes`: the node reports which chunks of the spec it holds.
        """
        self.served = served or ServedNames()
        self.kv_inputs = KvInputs(others={"lmkv": lmkv.__version__})
        """The inputs of the engine's KV that are known, for attachments that begin later."""
        self.inbox: deque[Event] = deque()
        self._changed = threading.Event()
        """Set when the engine was attached, or the node lost, since the last wait."""
        self._config = config
        self._spec = spec
        self._worker_count = worker_count
        self._wants_tier_changes = wants_tier_changes
        self._identify: Callable[[], str] | None = None
        self._identified = threading.Event()
        """Set when `identify` has returned or raised."""
        self._model_id = ""
        """As `identify` has found it."""
        self._closing = threading.Event()
        self._launcher = NodeLauncher(config, self._closing)
        self._engine = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._attach_count = 0
        self._opened: AttachConnection | None = None
        """The connection, also before the node has answered."""
        self._attached: tuple[str, AttachConnection] | None = None
        """The engine id of the attachment, and its connection."""
        self._attached_once = threading.Event()
        self._config_error: LmkvError | None = None
        self._thread = threading.Thread(target=self._run, name="lmkv-node-client", daemon=True)

    def start(self, identify: Callable[[], str] | None = None, identify_timeout: float = 0.0) -> None:
        """Starts the thread and waits, up to `node_start_timeout`, until the engine is attached.

        `identify` finds the spec's `model_id` on that thread, before the first attachment; this waits up to
        `identify_timeout` for it.

        Raises `ConfigError` if the weights cannot be identified, or the node cannot start as configured. Weights whose
        digest takes longer, and a node that is not available yet, are not errors: the engine computes until they are.
        """
        self._identify = identify
        self._thread.start()
        if identify and not self._identified.wait(identify_timeout):
            logger.warning("the digest of the weights is not known yet: nothing is looked up or stored until it is")
            self._attached_once.set()  # from now on mistakes are logged
        if not self._attached_once.wait(self._config.node_start_timeout):
            logger.warning(
                "no node after %.0f s; computing everything until one is available", self._config.node_start_timeout
            )
            self._attached_once.set()  # no caller waits any more: from now on mistakes are logged
        if self._config_error:
            raise self._config_error

    @property
    def is_attached(self) -> bool:
        """Whether a node has accepted the engine."""
        return self._attached is not None

    def send(self, attachment: Attachment, *acts: pb.Act) -> None:
        """Sends acts, in order; those that wait are sent in one message. Never blocks.

        Drops them if the attachment has ended: its offsets and lookup ids are not valid for the next one.
        """
        engine_id, connection = self._attached or ("", None)
        if connection and engine_id == attachment.engine_id:
            connection.send(*acts)

    def receive(self) -> None:
        """Puts what has arrived into the inbox; never blocks."""
        if attached := self._attached:
            attached[1].receive()

    def wait(self, timeout_seconds: float) -> None:
        """Waits until something is in the inbox. May return before: call it again."""
        if attached := self._attached:
            connection = attached[1]
            with connection.lock:  # else the thread may take from the socket what is waited for
                if self.inbox:
                    return
                if connection.error is None:
                    connection.wait(timeout_seconds)
                    return
        if self._changed.wait(timeout_seconds):
            self._changed.clear()

    def change_spec(self, spec: KvSpec) -> None:
        """The engine's spec from now on, for attachments that begin later."""
        self._spec = spec

    def close(self) -> None:
        """Closes the connection. A node that this client started stays for `node_linger`: the engine may restart."""
        self._closing.set()
        if connection := self._opened:
            connection.end(Unreachable("the engine ends"))
        if self._thread.is_alive():
            self._thread.join(CONNECT_TIMEOUT_SECONDS)

    def _run(self) -> None:
        use_processors()
        if self._identify and not self._find_identity(self._identify):
            return
        backoff = FIRST_BACKOFF_SECONDS
        while not self._closing.is_set():
            try:
                self._attach(self._launcher.address())
            except ConfigError as error:
                if not self._attached_once.is_set():
                    self._config_error = error
                    self._attached_once.set()
                    return
                logger.error("cannot attach to a node: %s", error)
            except LmkvError as error:
                if self._attached and not self._closing.is_set():
                    logger.info("the connection to the node has ended: %s", error)
                else:
                    logger.debug("node not reachable: %s", error)
            except Exception:  # the engine must be attached again, whatever the error is
                logger.exception("the connection to the node failed unexpectedly")
            if self._attached and not self._closing.is_set():
                self._attached = None
                self.inbox.append(NodeLost())
                self._changed.set()
                backoff = FIRST_BACKOFF_SECONDS
            self._closing.wait(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    def _find_identity(self, identify: Callable[[], str]) -> bool:
        """Identifies the weights. Without an identity, the engine never attaches."""
        try:
            self._model_id = identify()
        except (LmkvError, OSError) as error:
            if self._attached_once.is_set():
                logger.error("nothing is looked up or stored: %s", error)
            else:
                self._config_error = error if isinstance(error, LmkvError) else ConfigError(str(error))
            self._attached_once.set()
            return False
        finally:
            self._identified.set()
        self.inbox.append(Identified(model_id=self._model_id))
        self._changed.set()
        return True

    def _attach(self, address: str) -> None:
        """Attaches, and returns by the error with which the stream ends."""
        self._attach_count += 1
        engine_id = f"{self._engine}-{self._attach_count}"
        spec = replace(self._spec, model_id=self._model_id) if self._model_id else self._spec
        hello = pb.Hello(
            engine_id=engine_id,
            spec=spec.to_proto(),
            worker_count=self._worker_count,
            expected_config=self._launcher.expected_config,
            served_models=self.served.messages,
            wants_tier_changes=self._wants_tier_changes,
            kv_inputs=self.kv_inputs.to_proto(),
        )
        path = attach_socket_beside(Path(address.removeprefix("unix:")))
        self._opened = connection = AttachConnection(path, self._deliver, CONNECT_TIMEOUT_SECONDS)
        try:
            if self._closing.is_set():  # before it was known to `close`
                return
            answers = connection.welcome(hello, CONNECT_TIMEOUT_SECONDS)
            with connection.lock:
                self._attached = engine_id, connection
                self._welcome(address, engine_id, spec.weight_version, answers)
            connection.keep()
        except LmkvError as error:
            raise self._translate(error) from None
        finally:
            self._opened = None
            connection.close()

    def _welcome(self, address: str, engine_id: str, weight_version: str, answers: list[pb.AttachResponse]) -> None:
        welcome = answers[0].events[0].welcome
        attachment = Attachment(
            engine_id=engine_id,
            pool_socket=welcome.pool_socket,
            epoch=welcome.epoch,
            node_address=address,
            device_buffer_bytes=welcome.device_buffer_bytes,
            weight_version=weight_version,
        )
        self.inbox.append(attachment)
        for answer in answers:
            self._deliver(answer)
        self._changed.set()
        logger.info(
            "attached to node %s (pid %d), pool %s",
            welcome.instance_id,
            welcome.node_pid,
            format_bytes(welcome.pool_size_bytes),
        )
        self._attached_once.set()

    def _deliver(self, message: pb.AttachResponse) -> None:
        self.inbox.append(message)
        for event in message.events:
            if event.HasField("handed"):
                log_handoff(event.handed)
            elif event.HasField("peer_connected"):
                peer = event.peer_connected
                logger.info(
                    "Connected to peer %s at %s, channel %s", peer.peer_instance_id, peer.peer_address, peer.channel
                )

    def _translate(self, error: LmkvError) -> LmkvError:
        """The error to raise: a conflict with a running node is a `ConfigError`, unless that node ends now."""
        if isinstance(error, ConfigConflict) and not self._launcher.replaces(error):
            return ConfigError(as_written(str(error), self._config.written))
        if error.code == "INVALID_ARGUMENT":
            return ConfigError(str(error))
        return error


def log_handoff(handed: pb.HandedChunks) -> None:
    """Logs a handoff when it has ended; an idle engine would do so only with its next request."""
    if handed.status.code:
        logger.warning("[%s] handoff %s failed: %s", handed.engine_request_id, handed.handoff_id, handed.status.message)
    chunks = "1 chunk" if handed.chunk_count == 1 else f"{handed.chunk_count} chunks"
    if not handed.transferred_bytes:
        if handed.chunk_count:
            logger.info(
                "[%s] Handoff %s: the decode node held %s before, nothing was sent",
                handed.engine_request_id,
                handed.handoff_id,
                chunks,
            )
        return
    seconds = handed.transfer_duration.ToNanoseconds() / 1e9
    logger.info(
        "[%s] Handoff %s: %s at the decode node, %s sent, %s, %s",
        handed.engine_request_id,
        handed.handoff_id,
        chunks,
        format_bytes(handed.transferred_bytes),
        format_duration(seconds),
        format_rate(handed.transferred_bytes, seconds),
    )
