"""The thread that owns a NIXL agent and makes all calls to it. For the NIXL channel only.

It posts reads in batches, polls those in flight, and makes progress for peers that read from this node. Otherwise it
sleeps. Public methods are thread-safe unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lmkv.errors import ConfigError, Full, LmkvError, Unreachable, WrongInstance
from lmkv.transfer.channel import Copy, Region
from lmkv.transfer.nixl import api as nixl_api
from lmkv.transfer.nixl.api import Descriptors, descriptor_batches

logger = logging.getLogger(__name__)

QUEUE_SIZE = 1024
START_SECONDS = 60.0
"""Registration pins every page for RDMA."""
SETTLE_SECONDS = 0.05
"""UCX closes a lost connection in the background; received bytes may be written for about this long."""
STALL_SECONDS = 0.25
"""A peer gets no new reads if it has not finished an abandoned one after this time."""
SPIN_SECONDS = 0.0001

Job = Callable[[], None] | None
"""A function to call on the thread; None only wakes it."""


@dataclass(slots=True)
class _NixlPeer:
    metadata: bytes
    read_count: int = 0
    lost: bool = False
    """Whether to remove it after its last read. NIXL reports the end of a read only for a known peer."""


class AgentThread:
    """A thread with a NIXL agent for one region of memory."""

    def __init__(
        self, agent_name: str, region: Region, backends: Sequence[str], prepare: Callable[[], object] = lambda: None
    ) -> None:
        """`prepare` is called on the thread first."""
        self.serving = False
        """Whether to make progress for peers; set on the event loop."""
        self._agent_name = agent_name
        self._device = region.device or 0
        self._segment = "DRAM" if region.device is None else "VRAM"
        self._region = [(region.address, region.size_bytes, self._device, "")]
        self._prepare = prepare
        self._backends = list(backends)
        self._jobs: queue.Queue[Job] = queue.Queue(QUEUE_SIZE)
        self._stopping = False
        self._opened: Future[bytes] = Future()
        self._thread = threading.Thread(target=self._run, name="lmkv-nixl", daemon=True)
        # Used only on the thread:
        self._agent: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._peers: dict[str, _NixlPeer] = {}
        self._reads: list[Read] = []
        self._busy_at = 0.0

    def start(self) -> bytes:
        """Starts the agent and returns its metadata. Raises `ConfigError` if it does not start."""
        self._thread.start()
        try:
            return self._opened.result(START_SECONDS)
        except TimeoutError:
            self.stop()
            raise ConfigError(f"transfer_channel: NIXL did not start within {START_SECONDS:.0f} s") from None

    def submit(self, job: Job) -> None:
        """Queues a job. Raises `Full` if the queue is full, `Unreachable` after `stop`."""
        if self._stopping:
            raise Unreachable("the transfer channel is closed")
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise Full(f"more than {QUEUE_SIZE} transfers are waiting", retry_seconds=0.1) from None

    def wake(self) -> None:
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            pass  # the thread is awake

    def stop(self) -> None:
        """Makes the thread close the agent and end."""
        self._stopping = True
        self.wake()

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the thread to end; returns whether it did."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # The rest runs on the thread.

    def begin(self, read: Read) -> None:
        """Starts a read. Called as a job."""
        peer = self._peers.get(read.peer_name)
        if peer is None or peer.lost:
            read.end(Unreachable(f"{read.peer_name} is not connected", peer=read.peer_name))
        elif self._stalled(read.peer_name):
            read.end(Unreachable(f"{read.peer_name} has yet to finish an earlier read", peer=read.peer_name))
        else:
            read.split()
            peer.read_count += 1
            self._reads.append(read)
            self._advance(read)

    def add_peer(self, peer_name: str, metadata: bytes) -> None:
        """Connects to a peer. Called as a job. Raises as `Channel.add_peer` does."""
        if self._agent is None:
            raise Unreachable("the transfer channel is closed")
        peer = self._peers.get(peer_name)
        if peer and not peer.lost and peer.metadata == metadata:
            return
        if peer and peer.read_count:
            raise Unreachable(f"{peer_name} has yet to finish an earlier read", peer=peer_name)
        self.forget_peer(peer_name)
        try:
            found = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            self._remove_agent(peer_name)  # it may be added in part
            raise Unreachable(f"{peer_name} does not answer: {error}", peer=peer_name) from None
        found = found.decode() if isinstance(found, bytes) else found
        if found != peer_name:
            if found not in self._peers:
                self._remove_agent(found)
            raise WrongInstance(f"the channel metadata is of {found}, not of {peer_name}", peer=peer_name)
        self._peers[peer_name] = _NixlPeer(metadata)

    def forget_peer(self, peer_name: str) -> None:
        """Removes a peer when its reads have ended. Called as a job."""
        peer = self._peers.get(peer_name)
        if peer is None:
            return
        peer.lost = True
        if not peer.read_count:
            del self._peers[peer_name]
            self._remove_agent(peer_name)

    def _run(self) -> None:
        try:
            self._prepare()
            metadata = self._open()
        except BaseException as error:
            self._agent = None
            self._opened.set_exception(error)
            return
        self._opened.set_result(metadata)
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            logger.exception("the transfer thread failed; no further reads from peers are possible")
        finally:
            self._stopping = True
            self._close()

    def _open(self) -> bytes:
        api = nixl_api.load()
        self._errors = nixl_api.errors(api)
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = api.nixl_agent(self._agent_name, config)
            with nixl_api.without_mmap_hooks():
                for backend in self._backends:
                    self._agent.create_backend(backend)
            self._agent.register_memory(self._region, self._segment)
            return bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise ConfigError(
                f"nixl_backends: {', '.join(self._backends)} did not start: {error}; UCX_TLS, if set, must name tcp",
                key="nixl_backends",
            ) from None

    def _close(self) -> None:
        self._peers.clear()
        for read in self._reads:
            self._release(read)
        self._agent = None  # closes all connections: no bytes arrive from here on
        for read in self._reads:
            read.end(Unreachable("the transfer channel was closed", peer=read.peer_name))
        self._reads.clear()
        while not self._jobs.empty():
            if job := self._jobs.get_nowait():
                job()

    def _turn(self) -> None:
        """Runs the queued jobs, after a pause if there are none, then advances all reads by one step."""
        pause = self._pause()
        try:
            while True:
                job = self._jobs.get(block=pause != 0, timeout=pause)
                self._busy_at = time.monotonic()
                pause = 0
                if job:
                    job()
        except queue.Empty:
            pass
        if self._reads or self.serving:
            self._agent.get_new_notifs()  # makes progress
        for read in tuple(self._reads):
            self._advance(read)

    def _pause(self) -> float | None:
        """Seconds to wait for a job before the next poll; None: there is nothing to poll."""
        if not self._reads and not self.serving:
            return None
        quiet = time.monotonic() - self._busy_at
        if any(read.abandoned_at is None and read.settled_at is None for read in self._reads):
            return 0 if quiet < SPIN_SECONDS else 0.0002
        # Longer pauses for peers that read from this node, and for abandoned reads.
        return 0.0002 if quiet < 0.1 else 0.001 if quiet < 1 else 0.005

    def _stalled(self, peer_name: str) -> bool:
        before = time.monotonic() - STALL_SECONDS
        return any(
            read.peer_name == peer_name and read.abandoned_at is not None and read.abandoned_at <= before
            for read in self._reads
        )

    def _advance(self, read: Read) -> None:
        """Advances a read: posts the next batch, or polls the batch in flight."""
        if read.settled_at is not None:
            if read.settled_at <= time.monotonic():
                self._end(read)
            return
        try:
            if read.handle is not None:
                state = self._agent.check_xfer_state(read.handle)
            elif read.wants_more:
                state = self._post(read)
            else:
                self._end(read)
                return
        except self._errors as error:
            self._fail(read, str(error))
            return
        if state == "PROC":
            return
        self._busy_at = time.monotonic()
        if state != "DONE":
            self._fail(read, state)
            return
        self._release(read)
        if not read.wants_more:
            self._end(read)

    def _post(self, read: Read) -> str:
        local, remote = read.batches.popleft()
        local[:, 2] = self._device
        agent = self._agent
        read.handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, self._segment), agent.get_xfer_descs(remote, "DRAM"), read.peer_name
        )
        state: str = agent.transfer(read.handle)
        return state

    def _fail(self, read: Read, what: str) -> None:
        """Fails a read whose connection is lost: raises at the caller now, and calls `on_stopped` a little later."""
        read.outcome.resolve(
            Unreachable(f"{read.peer_name} was lost: {what}", peer=read.peer_name, quarantined=True),
        )
        self._release(read)
        self._peers[read.peer_name].lost = True
        read.settled_at = time.monotonic() + SETTLE_SECONDS

    def _end(self, read: Read) -> None:
        """Ends a read: no more bytes can arrive."""
        self._reads.remove(read)
        peer = self._peers[read.peer_name]
        peer.read_count -= 1
        if peer.lost:
            self.forget_peer(read.peer_name)
        read.end()

    def _release(self, read: Read) -> None:
        handle, read.handle = read.handle, None
        if handle is None:
            return
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            logger.warning("NIXL did not release a read from %s: %s", read.peer_name, error)

    def _remove_agent(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._errors as error:
            logger.debug("NIXL did not remove %s: %s", name, error)


def settle(outcome: asyncio.Future[None], error: LmkvError | None) -> None:
    """Completes a future unless it is done. Must be called on its event loop."""
    if outcome.done():
        return
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


class ReadOutcome:
    """The result of a job on the thread, for the event loop that awaits it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def resolve(self, error: LmkvError | None = None, before: Callable[[], None] | None = None) -> None:
        """Completes the future on its event loop, after calling `before`."""

        def end() -> None:
            if before:
                before()
            settle(self.future, error)

        try:
            self.loop.call_soon_threadsafe(end)
        except RuntimeError:
            logger.debug("the loop closed before the transfer thread could answer")


class Read:
    """One read. The caller may set `abandoned_at`; everything else is used by the thread only."""

    def __init__(self, peer_name: str, copies: Sequence[Copy], on_stopped: Callable[[], None]) -> None:
        self.peer_name = peer_name
        self.batches: deque[tuple[Descriptors, Descriptors]] = deque()
        """Batches not yet posted."""
        self.outcome = ReadOutcome()
        self.stopped = False
        """Whether no more bytes can arrive; set on the event loop."""
        self.abandoned_at: float | None = None
        """When the caller stopped waiting, on the monotonic clock; no further batch is posted."""
        self.handle: Any = None
        """NIXL's handle of the batch in flight."""
        self.settled_at: float | None = None
        """When a failed read has certainly stopped, on the monotonic clock."""
        self._copies = copies
        self._on_stopped = on_stopped

    def split(self) -> None:
        """Splits the copies into batches."""
        self.batches.extend(descriptor_batches(self._copies))

    @property
    def wants_more(self) -> bool:
        """Whether another batch must be posted."""
        return bool(self.batches) and self.abandoned_at is None

    def end(self, error: LmkvError | None = None) -> None:
        """Completes the read: no more bytes can arrive."""
        self.outcome.resolve(error, before=self._stop)

    def _stop(self) -> None:
        self.stopped = True
        self._on_stopped()
