"""Model of the registration of one instance: two of its processes, one after the other, and another node of its name.

Each process has an epoch and a stream of reports; reports of an old stream or of an old process may arrive at any later
time, twice, or with one before them lost. Leases expire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from lmkv.errors import InstanceIdInUse, InstanceNotFound, ResyncRequired, StaleEpoch
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import ChunkKey, digest, join_keys
from lmkv.tiers import HOST
from lmkv_server.coordinator.core.instances import Instance
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.registry.registry import Registry, ReportStream
from tests.models.explorer import Action

ID, TIER, TTL = "i", HOST, 10.0
FINGERPRINT = b"f" * 16
KEYS = {name: ChunkKey(name.encode() * 16) for name in ("a", "b")}


@dataclass
class Stream:
    """A stream of reports as its node has it; `reported` is what it had reported up to each report."""

    process: str
    real: ReportStream
    reported: list[frozenset[str]] = field(default_factory=list)
    snapshot_at: int = 0
    """The sequence of the report that ends the snapshot; 0 until it is sent."""


@dataclass(frozen=True)
class Process:
    """A node's process."""

    epoch: int
    address: str
    secret: bytes


class RegistryModel:
    """`old` and `new` are processes of one node, with its secret; `other` is another node with the same id."""

    processes: ClassVar = {
        "old": Process(1, "host:1", b"s" * 16),
        "new": Process(2, "host:2", b"s" * 16),
        "other": Process(3, "other:1", b"t" * 16),
    }

    def __init__(self) -> None:
        self.now = 0.0
        self.registry = Registry(lease_ttl=TTL, now=0.0)
        self.held: dict[str, set[str]] = {name: set() for name in self.processes}
        self.streams: list[Stream] = []
        self.registered = ""
        """The process whose registration is in force; empty if none is."""
        self.expire_time = 0.0
        self.current: Stream | None = None
        """The stream whose reports count."""
        self.installed: frozenset[str] = frozenset()
        """What lookups must find."""
        self.is_synced = False

    # --- Actions -------------------------------------------------------------------------------------------------

    def actions(self) -> Sequence[Action]:
        found: list[Action] = []
        for name in self.processes:
            found.append(("register", name))
            found.append(("deregister", name))
            if len(self.streams) < 3:
                found.append(("open_stream", name))
        for number, stream in enumerate(self.streams):
            if not stream.snapshot_at:
                found.append(("snapshot", number))
                if not self.held[stream.process] and self._is_newest(stream):
                    found.append(("store_before", number, "a"))
            else:
                held = self.held[stream.process]
                found += [("evict" if key in held else "store", number, key) for key in KEYS]
            if stream.reported:
                found.append(("repeat", number))
                found.append(("lose", number))
        found += [("half_a_lease",), ("a_lease",)]
        if self.registered and self.expire_time <= self.now:
            found.append(("sweep",))
        return found

    def apply(self, action: Action) -> None:
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)

    def _info(self, name: str) -> InstanceInfo:
        process = self.processes[name]
        return InstanceInfo(instance_id=ID, epoch=process.epoch, peer_address=process.address, size_bytes=10)

    def _register(self, name: str) -> None:
        process, known = self.processes[name], self.processes.get(self.registered)
        lives = self.expire_time > self.now
        try:
            instance = self.registry.register(self._info(name), self.now, process.secret)
        except InstanceIdInUse:
            assert known is not None
            assert known.secret != process.secret, "a node is refused its own id"
            return
        except StaleEpoch:
            assert known is not None
            assert known.epoch > process.epoch
            return
        assert known is None or known.secret == process.secret, "an id was taken from its node"
        assert known is None or known.epoch <= process.epoch or not lives, "an old epoch replaced a living newer one"
        assert instance.info.epoch == process.epoch
        if name != self.registered:
            self.registered, self.current = name, None
            self.installed, self.is_synced = frozenset(), False
        elif self.current is None:
            self.is_synced = False
        self.expire_time = self.now + TTL

    def _deregister(self, name: str) -> None:
        try:
            self.registry.deregister(ID, self.processes[name].epoch)
        except (InstanceNotFound, StaleEpoch):
            assert name != self.registered
            return
        assert name == self.registered, "a process deregistered another one"
        self._leave()

    def _leave(self) -> None:
        self.registered, self.current, self.installed, self.is_synced = "", None, frozenset(), False

    def _open_stream(self, name: str) -> None:
        try:
            real = self.registry.open_stream(ID, self.processes[name].epoch, self.now)
        except (InstanceNotFound, StaleEpoch):
            assert name != self.registered
            return
        assert name == self.registered, "a process reports for another one"
        self.current = Stream(name, real)
        self.streams.append(self.current)
        self.is_synced, self.expire_time = False, self.now + TTL

    def _snapshot(self, number: int) -> None:
        stream = self.streams[number]
        report = self._report(stream, admitted=sorted(self.held[stream.process]))
        report.snapshot = report.snapshot_end = True
        if self._send(stream, report):
            self.installed, self.is_synced = frozenset(self.held[stream.process]), True
        stream.snapshot_at = report.sequence

    def _store_before(self, number: int, key: str) -> None:
        """A chunk is stored before the snapshot is sent."""
        self.held[self.streams[number].process].add(key)

    def _store(self, number: int, key: str) -> None:
        stream = self.streams[number]
        if self._is_newest(stream):
            self.held[stream.process].add(key)
        self._change(stream, self._report(stream, admitted=[key]))

    def _evict(self, number: int, key: str) -> None:
        stream = self.streams[number]
        if self._is_newest(stream):
            self.held[stream.process].remove(key)
        self._change(stream, self._report(stream, evicted=[key]))

    def _is_newest(self, stream: Stream) -> bool:
        """Whether it has the changes of its process; what an older one carries is late."""
        return stream is [one for one in self.streams if one.process == stream.process][-1]

    def _change(self, stream: Stream, report: pb.ReportRequest) -> None:
        part = digest([KEYS[key] for key in self.held[stream.process]])
        report.digests.append(pb.TierDigest(tier=TIER, chunk_count=part.chunk_count, key_sum=part.key_sum))
        if self._send(stream, report):
            self.installed = frozenset(self.held[stream.process])

    def _repeat(self, number: int) -> None:
        """The last report of a stream arrives again."""
        stream = self.streams[number]
        report = self._report(stream, admitted=["a"], evicted=["b"])
        report.sequence = len(stream.reported)
        self._send(stream, report, repeated=True)

    def _lose(self, number: int) -> None:
        """A report does not arrive, and the next one does."""
        stream = self.streams[number]
        report = self._report(stream, admitted=["a", "b"])
        report.sequence += 1
        self._send(stream, report, follows_lost=True)

    def _report(self, stream: Stream, admitted: Sequence[str] = (), evicted: Sequence[str] = ()) -> pb.ReportRequest:
        change = pb.ChunkChange(
            tier=TIER,
            fingerprint=FINGERPRINT,
            admitted_keys=join_keys(KEYS[key] for key in admitted),
            evicted_keys=join_keys(KEYS[key] for key in evicted),
            partial_token_counts=dict.fromkeys(range(len(admitted)), 16),
        )
        epoch, sequence = self.processes[stream.process].epoch, len(stream.reported) + 1
        return pb.ReportRequest(instance_id=ID, epoch=epoch, sequence=sequence, changes=[change])

    def _send(
        self, stream: Stream, report: pb.ReportRequest, *, repeated: bool = False, follows_lost: bool = False
    ) -> bool:
        """Whether the report was applied. One that is refused ends the stream, as its handler does."""
        is_current = stream is self.current
        refusal = self._refusal(stream, report)
        if refusal:
            assert not is_current or follows_lost, f"a report of the current stream was refused: {refusal}"
            if is_current:
                self.expire_time = self.now + TTL
            stream.real.close()
            self._end_stream(stream)
            return False
        assert is_current, "a report of a stream that was replaced was applied"
        assert not follows_lost, "a report was applied although the one before it is missing"
        self.expire_time = self.now + TTL
        if not repeated:
            stream.reported.append(frozenset(self.held[stream.process]))
        return not repeated

    def _refusal(self, stream: Stream, report: pb.ReportRequest) -> str:
        """Applies a report; why it was refused, empty if it was not."""
        try:
            stream.real.apply(report, self.now)
        except (ResyncRequired, InstanceNotFound, StaleEpoch) as error:
            return str(error)
        return ""

    def _end_stream(self, stream: Stream) -> None:
        self.streams = [one for one in self.streams if one is not stream]
        if stream is self.current:
            self.current = None

    def _half_a_lease(self) -> None:
        self.now += TTL / 2

    def _a_lease(self) -> None:
        self.now += TTL

    def _sweep(self) -> None:
        """The coordinator ends the leases that have expired; it may do so late."""
        gone = self.registry.expire(self.now)
        due = bool(self.registered) and self.expire_time <= self.now
        assert bool(gone) == due, "a lease ended at another time than it should"
        if due:
            self._leave()

    # --- Promises ------------------------------------------------------------------------------------------------

    def _instance(self) -> Instance | None:
        return self.registry.instances.find(ID)

    def check(self) -> None:
        self.registry.check()
        instance = self._instance()
        assert (instance is not None) == bool(self.registered)
        if instance is not None:
            assert instance.info.epoch == self.processes[self.registered].epoch, "another epoch is registered"
            assert instance.expire_time == self.expire_time
            assert instance.synced == self.is_synced
        found = {
            key for key in KEYS if any(match.instance_id == ID for match in self.registry.layout.lookup(KEYS[key]))
        }
        assert found == self.installed, f"a lookup finds {sorted(found)}, not {sorted(self.installed)}"
        if self.now >= TTL:
            partial = bool(self.registered) and not self.is_synced
            assert self.registry.is_partial(self.now) == partial, "a lookup says the contrary of whether it is partial"

    def settle(self) -> None:
        self.now += 2 * TTL
        self._sweep()
        self.check()
        assert not len(self.registry.instances), "an instance stays without a lease"
        assert not list(self.registry.instances.budget.items(ID)), "memory stays charged"
        while self.registry.layout.sweep(1000):
            pass
        assert len(self.registry.layout) == 0, "chunks stay without an instance"
        self.streams.clear()
        for action in (("register", "old"), ("open_stream", "old"), ("snapshot", 0)):
            self.apply(action)
            self.check()

    def fingerprint(self) -> object:
        instance = self._instance()
        return (
            self.registered,
            min(self.now, TTL),
            self.registered and max(self.expire_time - self.now, 0.0),
            sorted(self.installed),
            self.is_synced,
            sorted((name, sorted(held)) for name, held in self.held.items()),
            [
                (one.process, len(one.reported), one.real.sequence, one.snapshot_at, one is self.current)
                for one in self.streams
            ],
            instance and (instance.info.epoch, instance.stream is not None),
        )
