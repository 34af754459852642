"""Models of tails, the partial chunks of a prompt: in the index of a node, and in the map of a coordinator.

The prompt has one full chunk, f, and behind it two partial ones, of which the longer supersedes the shorter: s and l.
In the node a chunk o of another prompt takes room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lmkv.keys import ChunkKey, chunk_keys, partial_keys, root_key
from lmkv.misses import MissReason
from lmkv.prompt import Prompt
from lmkv.tiers import HOST
from lmkv_server.coordinator.core.match import with_tails
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.registry.registry import Registry, ReportStream
from lmkv_server.node.cache.events import PartialChunks
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fleet.reports import ChunkChanges, HeldChunk
from lmkv_server.node.lookup.lookup import PromptLookup
from lmkv_server.node.sessions.session import EngineSession
from tests.models.explorer import Action
from tests.models.pool import PAGE, SPEC, order

DISK = "disk"
PAGES = 3
TOKENS = np.arange(1, 25, dtype=np.uint32)  # a chunk of 16 tokens, and 8 more
ROOT = root_key(SPEC.fingerprint)
(F,) = chunk_keys(TOKENS[:16], ROOT, SPEC.chunk_size)
LENGTHS = {"s": 4, "l": 8}
KEYS: Mapping[str, ChunkKey] = {"f": F, "o": ChunkKey(b"o" * 16)} | {
    name: key for name, (_, key) in zip(LENGTHS, partial_keys(F, TOKENS[16:], list(LENGTHS.values())), strict=True)
}
NAMES: Mapping[bytes, str] = {key: name for name, key in KEYS.items()}


@dataclass(frozen=True)
class DiskChunk:
    """A partial chunk on the disk."""

    key: ChunkKey
    token_count: int
    parent: ChunkKey | None = F
    fingerprint: bytes = SPEC.fingerprint
    prefix_digests: bytes = b""


class NodeTailModel:
    """The pool has chunk f, and room for two more; the disk takes partial chunks."""

    def __init__(self) -> None:
        self.index = PartialChunks()
        self.tier = HostTier(PAGES * PAGE, self.index)
        self.disk: dict[str, DiskChunk] = {}
        self.index.add_tier("host", self.tier)
        self.index.add_spec(SPEC)
        self.knows_spec = True
        self.session = EngineSession("engine", SPEC, self.tier, 1)
        self.lease: list[str] | None = None
        """The chunks that the engine's lookup holds."""
        self.superseded: set[str] = set()
        """Those that were not used since."""
        self.apply(("store", "f"))

    # --- Actions -------------------------------------------------------------------------------------------------

    def actions(self) -> Sequence[Action]:
        found: list[Action] = [("drop" if self.tier.get(KEYS[name]) else "store", name) for name in KEYS]
        found += [("disk_evict" if name in self.disk else "disk_store", name) for name in LENGTHS]
        found.append(("lookup",) if self.lease is None else ("release",))
        found.append(("remove_spec",) if self.knows_spec else ("add_spec",))
        return found

    def apply(self, action: Action) -> None:
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)

    def _store(self, name: str) -> None:
        before = {NAMES[chunk.key]: chunk for chunk in self.tier}
        first = {one for one in self.superseded if not before[one].holds}
        reserved = self.session.reserve(1)
        evicted = before.keys() - {NAMES[chunk.key] for chunk in self.tier}
        assert not evicted or not first or evicted <= first, (
            f"{evicted} was evicted before {first}, which is superseded"
        )
        self.superseded -= evicted
        if not reserved:
            return
        tokens = LENGTHS.get(name, SPEC.chunk_size)
        written = Chunk(
            key=KEYS[name],
            fingerprint=SPEC.fingerprint,
            offset=reserved[0].offset,
            size_bytes=SPEC.size_bytes(tokens),
            checksum=1,
            token_count=tokens,
            parent=F if name in LENGTHS else None,
        )
        self.session.commit(written, superseded=KEYS["s"] if name == "l" else None)
        if name == "l" and self.tier.get(KEYS["s"]):
            self.superseded.add("s")

    def _drop(self, name: str) -> None:
        assert self.tier.drop([KEYS[name]]) == 1
        self.superseded.discard(name)

    def _disk_store(self, name: str) -> None:
        self.disk[name] = DiskChunk(KEYS[name], LENGTHS[name])
        self.index.stored(DISK, self.disk[name])

    def _disk_evict(self, name: str) -> None:
        self.index.removed(DISK, self.disk.pop(name), MissReason.DROPPED)

    def _lookup(self) -> None:
        """As an engine's lookup of the prompt: it holds the full chunk, and the tail if the pool has it."""
        lease = self.session.begin("r")
        found = self._lookup_in_pool().result()
        self.session.keep(lease, found.items.keys, found.own)
        self.lease = [NAMES[chunk.key] for chunk in lease.chunks]
        self.superseded -= set(self.lease)

    def _release(self) -> None:
        self.session.release("r")
        self.lease = None

    def _remove_spec(self) -> None:
        """There are too many specs."""
        self.index.remove_spec(SPEC.fingerprint)
        self.knows_spec = False

    def _add_spec(self) -> None:
        """An engine of the spec attaches again: the chunks of all tiers are read."""
        self.index.add_tier(DISK, list(self.disk.values()))
        self.index.add_spec(SPEC)
        self.knows_spec = True

    def _lookup_in_pool(self) -> PromptLookup:
        prompt = Prompt(SPEC, [F], root=ROOT, tokens=TOKENS)
        return PromptLookup(self.tier, self.index, prompt, self.tier.size_bytes)

    # --- Promises ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.tier.check(self._dropped_on_hold())
        self.index.check()
        tail = self._lookup_in_pool().result(is_use=False).hit.tail if self.tier.get(F) else None
        found = NAMES[tail.key] if tail else ""
        held = [name for name in LENGTHS if self.tier.get(KEYS[name])]
        assert not tail or found in held, f"a lookup finds tail {found}, which the pool does not hold"
        if self.knows_spec and self.tier.get(F):
            assert found == (held[-1] if held else ""), f"a lookup finds tail {found!r} of {held}"
        if self.knows_spec:
            assert self.index.chunk_count == len(held) + len(self.disk), "the index has other chunks than the tiers"
        assert self.index.chunk_count <= len(held) + len(self.disk), "the index keeps a chunk that no tier holds"

    def _dropped_on_hold(self) -> Sequence[Chunk]:
        lease = self.session.lease("r")
        return [chunk for chunk in lease.chunks if chunk.dropped] if lease else ()

    def settle(self) -> None:
        if self.lease is not None:
            self._release()
        for chunk in list(self.tier):
            self._drop(NAMES[chunk.key])
        for name in list(self.disk):
            self._disk_evict(name)
        self.check()
        assert self.tier.used_bytes == 0, "bytes of the pool are lost"

    def fingerprint(self) -> object:
        return (
            sorted((NAMES[one.key], one.offset, one.holds) for one in self.tier),
            order(self.tier),
            sorted(self.disk),
            self.lease,
            [(NAMES[chunk.key], chunk.offset) for chunk in self._dropped_on_hold()],
            self.knows_spec,
            sorted((tier, NAMES[key]) for tier, key in self.index.index),
            sorted(self.superseded),
        )


@dataclass
class Holder:
    """An instance that reports its chunks."""

    chunks: set[str]
    stream: ReportStream
    changes: ChunkChanges | None = None
    """Those that are not reported yet; None until its snapshot is sent."""
    reported: frozenset[str] = field(default_factory=frozenset)
    """What lookups must find."""


class MapTailModel:
    """Instance a has reported chunk f. It and instance b gain and lose partial chunks, leave, and report snapshots."""

    def __init__(self) -> None:
        self.registry = Registry(lease_ttl=10.0, now=0.0)
        self.holders: dict[str, Holder] = {}
        for action in (("join", "a"), ("end_snapshot", "a")):
            self.apply(action)

    # --- Actions -------------------------------------------------------------------------------------------------

    def actions(self) -> Sequence[Action]:
        found: list[Action] = []
        for instance_id in ("a", "b"):
            holder = self.holders.get(instance_id)
            if holder is None:
                found.append(("join", instance_id))
                continue
            found += [("evict" if name in holder.chunks else "store", instance_id, name) for name in ("s", "l")]
            found += [("resync", instance_id), ("leave", instance_id)]
            if holder.changes is None:
                found.append(("end_snapshot", instance_id))
            elif len(holder.changes):
                found.append(("report", instance_id))
        return found

    def apply(self, action: Action) -> None:
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)

    def _join(self, instance_id: str) -> None:
        info = InstanceInfo(instance_id=instance_id, epoch=1, peer_address=f"{instance_id}:1", specs=(SPEC,))
        self.registry.register(info, 0.0)
        self.holders[instance_id] = Holder({"f"}, self.registry.open_stream(instance_id, 1, 0.0))

    def _resync(self, instance_id: str) -> None:
        holder = self.holders[instance_id]
        holder.stream, holder.changes = self.registry.open_stream(instance_id, 1, 0.0), None

    def _end_snapshot(self, instance_id: str) -> None:
        holder = self.holders[instance_id]
        self._send(instance_id, ChunkChanges(self._held(name) for name in sorted(holder.chunks)), snapshot=True)

    def _report(self, instance_id: str) -> None:
        changes = self.holders[instance_id].changes
        assert changes is not None
        self._send(instance_id, changes)

    def _store(self, instance_id: str, name: str) -> None:
        holder = self.holders[instance_id]
        holder.chunks.add(name)
        if holder.changes is not None:
            holder.changes.admitted(self._held(name))

    def _evict(self, instance_id: str, name: str) -> None:
        holder = self.holders[instance_id]
        holder.chunks.remove(name)
        if holder.changes is not None:
            holder.changes.evicted(HOST, SPEC.fingerprint, KEYS[name])

    def _leave(self, instance_id: str) -> None:
        self.registry.deregister(instance_id, 1)
        del self.holders[instance_id]

    def _held(self, name: str) -> HeldChunk:
        tokens = LENGTHS.get(name, SPEC.chunk_size)
        parent = F if name in LENGTHS else None
        return HeldChunk(HOST, SPEC.fingerprint, KEYS[name], tokens, parent)

    def _send(self, instance_id: str, changes: ChunkChanges, *, snapshot: bool = False) -> None:
        holder = self.holders[instance_id]
        (report,) = changes.reports({SPEC.fingerprint: SPEC.chunk_size})
        report.instance_id, report.epoch, report.sequence = instance_id, 1, holder.stream.sequence + 1
        report.snapshot = report.snapshot_end = snapshot
        digest = ChunkChanges(self._held(name) for name in holder.chunks).digests([HOST])
        report.digests.extend(digest)
        holder.stream.apply(report, 0.0)
        holder.changes, holder.reported = ChunkChanges(), frozenset(holder.chunks)

    # --- Promises ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.registry.check()
        layout = self.registry.layout
        found_chunks = layout.lookup(F)
        matches = with_tails(layout, Prompt(SPEC, F, root=ROOT, tokens=TOKENS), found_chunks, found_chunks, "")
        found = {match.instance_id: (match.chunk_count, match.token_count) for match in matches}
        expected = {}
        for instance_id, holder in self.holders.items():
            tails = [LENGTHS[name] for name in LENGTHS if name in holder.reported]
            if "f" in holder.reported:
                expected[instance_id] = 1 + bool(tails), SPEC.chunk_size + max(tails, default=0)
        assert found == expected, f"a lookup names {found}, but {expected} is held"

    def settle(self) -> None:
        """All leave, without naming their chunks. Another instance's chunks have them looked at, and removed."""
        for instance_id in list(self.holders):
            self._leave(instance_id)
        self._join("c")
        self._end_snapshot("c")
        holder = self.holders["c"]
        for number in range(2):
            key = ChunkKey(bytes([number]) * 16)
            held = HeldChunk(HOST, SPEC.fingerprint, key, 4, F)
            (report,) = ChunkChanges([held]).reports({SPEC.fingerprint: SPEC.chunk_size})
            report.instance_id, report.epoch, report.sequence = "c", 1, holder.stream.sequence + 1
            holder.stream.apply(report, 0.0)
        assert len(self.registry.layout._partials) <= 2, "the map keeps a partial chunk that no instance holds"

    def fingerprint(self) -> object:
        partials = self.registry.layout._partials
        return (
            [
                (
                    name,
                    sorted(holder.chunks),
                    sorted(holder.reported),
                    holder.changes is not None
                    and sorted(
                        (NAMES[key], kept > 0) for one in holder.changes._states.values() for key, kept in one.items()
                    ),
                )
                for name, holder in sorted(self.holders.items())
            ],
            [NAMES[key] for key in partials._queue],
            sorted(NAMES[key] for key in partials.index),
        )
