"""Log entries and chunk records that a coordinator reads from the shared map: any bytes leave its layout map valid.

A call is a number and a frame: an entry of the log, records of a scan, or the end of a scan.
"""

from __future__ import annotations

from lmkv.keys import EMPTY_DIGEST, digest, join_keys
from lmkv_server.coordinator.core.instances import Instance, Instances
from lmkv_server.coordinator.core.layout_map import TIER_COUNT, Change, LayoutMap
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.layout_store.follower import InstanceFollower, SnapshotLoad
from lmkv_server.coordinator.layout_store.layout_store import NoSharedStore
from lmkv_server.coordinator.layout_store.records import (
    MARKER,
    EntryKind,
    LogEntry,
    admissions,
    decode,
    encode,
    has_marker,
)
from tests.fuzz.inputs import Input, calls
from tests.fuzz.promises import refused_as
from tests.server.coordinator.cases import KEYS
from tests.support.specs import LLAMA

COVERS = (
    "lmkv_server.coordinator.layout_store.records",
    "lmkv_server.coordinator.layout_store.records",
    "lmkv_server.coordinator.layout_store.follower",
)
MAX_CALLS = 16
EPOCH, TERM, TIER = 7, 1, 2
CHUNK_SIZE = LLAMA.chunk_size
ENTRY, RECORDS, END = range(3)


def _record(key: bytes, tokens: int = CHUNK_SIZE, tier: int = TIER, parent: bytes = b"") -> bytes:
    value = (tokens | (1 << 31 if parent else 0)).to_bytes(4, "little") + parent
    return bytes([tier]) + LLAMA.fingerprint + key + value


def _entry(
    kind: EntryKind, *changes: Change, term: int = TERM, digests: tuple[tuple[int, int, int], ...] = ()
) -> bytes:
    return encode(LogEntry(kind, "", "a", EPOCH, term, list(changes), list(digests)))


def _change(tier: int = TIER, chunk_size: int = CHUNK_SIZE, keys: bytes = join_keys(KEYS), **fields: object) -> Change:
    return Change(tier, LLAMA.fingerprint, chunk_size, keys, **fields)  # type: ignore[arg-type]


STORED = MARKER + b"".join(map(_record, KEYS[:2])) + _record(KEYS[2], 8, parent=KEYS[1])
_LOADED = ((RECORDS, STORED), (END, b""))
SEEDS = [
    calls((ENTRY, _entry(EntryKind.COMPLETE)), *_LOADED, (ENTRY, _entry(EntryKind.CHANGES, _change(keys=bytes(16))))),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.CHANGES, digests=((TIER, 1, 1),))), (ENTRY, _entry(EntryKind.RELOAD))),
    calls((RECORDS, STORED), (ENTRY, _entry(EntryKind.CHANGES, _change(evicted=KEYS[0]))), (END, b"")),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.GONE)), (ENTRY, _entry(EntryKind.COMPLETE, term=1 << 62))),
    calls((RECORDS, STORED[:-1]), (END, b""), (RECORDS, _record(KEYS[0], tier=200)), (END, b"")),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.CHANGES, _change(tier=-1)))),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.CHANGES, _change(chunk_size=-1)))),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.CHANGES, _change(chunk_size=1 << 62)))),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.CHANGES, _change(keys=KEYS[0][:-1])))),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.CHANGES, _change(partial_token_counts={9: 3})))),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.CHANGES, _change(partial_token_counts={0: -3})))),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.CHANGES, _change(partial_parents={0: KEYS[0]})))),
    calls(*_LOADED, (ENTRY, _entry(EntryKind.CHANGES, _change(partial_token_counts={0: 3}, partial_parents={0: b""})))),
    calls((ENTRY, b"\xc1"), (ENTRY, _entry(EntryKind.CHANGES)[:-1])),
]


class _Follower:
    """One instance that is followed, and the steps by which its chunks are loaded."""

    def __init__(self, layout: LayoutMap, epoch: int) -> None:
        self.epoch = epoch
        self.instance = Instance(InstanceInfo(instance_id="a", epoch=epoch, peer_address="host:1"), 0.0, 1.0)
        self.follower = InstanceFollower(Instances(1.0), layout, self.instance, NoSharedStore())
        self.follower.request_load()
        self._load: SnapshotLoad | None = None
        self._position = (0, 0)

    def read(self, data: bytes) -> None:
        """Reads an entry of the log. One that cannot be decoded makes a load necessary."""
        try:
            entry = decode(data)
        except ValueError:
            self.follower.request_load()
        else:
            assert decode(encode(entry)) == entry
            self.follower.handle_entry(entry)
        self._position = (self._position[0] + 1, 0)
        self.follower.advance(self._position)

    def scan(self, records: bytes) -> None:
        """Reads records, in a load that has begun, or in the one that is requested."""
        if self.follower.needs_load:
            self._load = self.follower.begin_load()
            self.follower.set_term(self._load, (TERM, self.epoch))
        if self._load is not None:
            self.follower.add_records(self._load, records)

    def end_scan(self) -> None:
        if self._load is not None:
            self.follower.finish_scan(self._load, self._position)
            self.follower.advance(self._position)


def run(data: bytes) -> None:
    """After any entries and records, the chunks of a new process of the instance are loaded as they are stored."""
    layout = LayoutMap()
    one = _Follower(layout, EPOCH)
    for number, content in Input(data).calls(MAX_CALLS):
        match number % 3:
            case 0:
                one.read(content)
            case 1:
                _check_records(content)
                one.scan(content)
            case _:
                one.end_scan()
        layout.check()
        assert not one.instance.synced or one.follower.term
    one.follower.close()
    other = _Follower(layout, EPOCH + 1)
    other.scan(STORED)
    other.end_scan()
    assert other.follower.is_current
    for tier in range(1, TIER_COUNT + 1):
        assert layout.digest("a", tier) == (digest(KEYS) if tier == TIER else EMPTY_DIGEST)
    layout.check()


def _check_records(records: bytes) -> None:
    """Records are whole keys, or refused."""
    with refused_as(ValueError):
        has_marker(records)
        for change in admissions(records):
            assert change.tier
            assert len(change.admitted) % 16 == 0
            assert not change.evicted
