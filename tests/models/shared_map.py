"""Model of the map that two coordinators share: one instance that reports to either, in terms that fence each other.

The scripts that the product sends run in a real server, once for each content of the store: answers are remembered,
so that a replay needs no server. Requests, answers and steps of a load wait until an action lets them continue; a
coordinator that is paused is one whose request waits.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lmkv.config.remote_url import parse_remote_url
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import ChunkKey, join_keys
from lmkv.tiers import HOST
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.layout_store import scripts
from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.publication import Publication
from lmkv_server.coordinator.layout_store.records import ChunkOwner, LogPosition, decode
from lmkv_server.coordinator.layout_store.session import Publisher, SnapshotLoader
from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient
from lmkv_server.coordinator.registry.registry import Registry, ReportStream
from tests.models.explorer import Action
from tests.support.redis_server import RedisServer

OWNER = ChunkOwner("", "i")
FINGERPRINT = b"f" * 16
KEYS = {name: ChunkKey(name.encode() * 16) for name in ("a", "b", "z")}
PREFIX = f"lmkv:{{{OWNER.shard}}}:"
LATE_TERM = 5_000_000_000_000_000
"""Beyond the server's clock in microseconds, so that terms count from here, whenever they begin."""
LATE_ENTRY = (9_999_999_999_999, 0)
"""As above, of positions in the log."""

Content = tuple[tuple[bytes, bytes], ...]
"""Keys of the store, and the serialized value of each."""


class Server:
    """A `redis-server` that runs commands on given contents, which have numbers. Answers are remembered."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._answers: dict[object, tuple[Any, int]] = {}
        self._logs: dict[int, list[tuple[LogPosition, bytes]]] = {}
        self._contents: list[Content] = []
        self._numbers: dict[Content, int] = {}
        self._shas: dict[str, Any] = {}
        client.flushall()
        client.set(f"{PREFIX}id", "map")
        client.set(f"{PREFIX}last_term", LATE_TERM)
        client.xadd(f"{PREFIX}log", {"p": "0-0", "e": b""}, id="-".join(map(str, LATE_ENTRY)))
        self._present = -1
        """The content that the server has now."""
        self.first = self._content()

    def run(self, content: int, script: str, keys: Sequence[bytes], arguments: Sequence[Any]) -> tuple[Any, int]:
        """The answer of a script to a store with this content, and the content afterwards."""
        call = (content, script, tuple(keys), tuple(arguments))
        if call not in self._answers:
            if script not in self._shas:
                self._shas[script] = self._client.script_load(script)
            self._restore(content)
            answer = self._client.evalsha(self._shas[script], len(keys), *keys, *arguments)
            self._answers[call] = answer, self._content()
        return self._answers[call]

    def log(self, content: int) -> list[tuple[LogPosition, bytes]]:
        """All entries of the log but the first."""
        if content not in self._logs:
            self._restore(content)
            found = []
            for at, fields in self._client.xrange(f"{PREFIX}log"):
                milliseconds, number = at.split(b"-")
                found.append(((int(milliseconds), int(number)), fields[b"e"]))
            self._logs[content] = found[1:]
        return self._logs[content]

    def _restore(self, content: int) -> None:
        if content == self._present:
            return
        pipeline = self._client.pipeline()
        pipeline.flushdb()
        for key, value in self._contents[content]:
            pipeline.restore(key, 0, value)
        pipeline.execute()
        self._present = content

    def _content(self) -> int:
        """The number of what the server has now."""
        names = sorted(self._client.keys())
        pipeline = self._client.pipeline()
        for name in names:
            pipeline.dump(name)
        content = tuple(zip(names, pipeline.execute(), strict=True))
        if content not in self._numbers:
            self._numbers[content] = len(self._contents)
            self._contents.append(content)
        self._present = self._numbers[content]
        return self._present


class _Step:
    """Waits until the model lets the coroutine continue."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class StoreClient(ValkeyClient):
    """The product's client; what it sends waits for a step, and then runs in the model's store."""

    def __init__(self, model: SharedMapModel) -> None:
        super().__init__(parse_remote_url("redis://127.0.0.1:1/0"), held_seconds=1_000_000)
        self._model = model

    async def _run(self, script: str, shard: int, keys: Sequence[bytes], *arguments: Any) -> Any:
        await _Step()
        return self._model.run(script, [f"{PREFIX}id".encode(), *keys], [b"map", *arguments])


@dataclass
class Task:
    """A coroutine of a coordinator. It waits to be continued."""

    coroutine: Coroutine[Any, Any, Any]
    seen: list[int]
    """The contents of the store when it was continued."""


class Coordinator:
    """One coordinator: registry, publisher, loader, and how far it has read the log."""

    def __init__(self, model: SharedMapModel) -> None:
        self.store = StoreClient(model)
        self.registry = Registry(lease_ttl=10.0, now=0.0)
        self.publisher = Publisher(self.store, self._refused)
        self.loader = SnapshotLoader(self.store, lambda _: self.position)
        self.position: LogPosition = LATE_ENTRY
        self.stream: ReportStream | None = None
        self.sends_snapshot = False
        """Whether the snapshot of the stream is still to be sent."""
        self.term: Task | None = None
        self.publishing: Task | None = None
        self.loading: Task | None = None
        info = InstanceInfo(instance_id="i", epoch=1, peer_address="i:1")
        self.registry.register(info, 0.0)

    def _refused(self, owner: ChunkOwner, term: int, reply: str) -> None:
        """As `Session`: the instance's stream ends, and it opens another one."""
        publication = self.registry.publications.get(owner.instance_id)
        if publication is not None and publication.term == term:
            self.registry.unpublish(owner.instance_id)
            self.end_stream()

    def end_stream(self) -> None:
        """The stream of reports breaks."""
        if self.stream is not None:
            self.stream.close()
        self.stream = None

    def load(self, follower: InstanceFollower) -> None:
        """Schedules a load, as its `LayoutStore`."""
        self.loader.load(OWNER, follower)

    def held(self) -> set[str]:
        """The chunks that its lookups name."""
        return {name for name, key in KEYS.items() if self.registry.layout.match_at("i", 0, key)[0]}


class SharedMapModel:
    """The instance has reported chunk a to x, which has published it; y follows."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.content = server.first
        self.issued = LATE_TERM
        """The newest term."""
        self.home = ""
        """The coordinator with the instance's newest stream of chunks."""
        self.chunks = {"a"}
        self.coordinators = {name: Coordinator(self) for name in ("x", "y")}
        self._open_at("x")
        self.apply(("snapshot", "x"))
        self.apply(("follow", "y"))
        self._drain()

    def run(self, script: str, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """Runs a script; no entry may be written under another term than the newest."""
        before = len(self._server.log(self.content))
        answer, self.content = self._server.run(self.content, script, keys, arguments)
        if script == scripts.TERM:
            assert int(answer) > self.issued, "a term is not greater than the one before"
            self.issued = int(answer)
        for _, data in self._server.log(self.content)[before:]:
            assert decode(data).term == self.issued, "an old term was written after a newer one had begun"
        return answer

    # --- Actions -------------------------------------------------------------------------------------------------

    def actions(self) -> Sequence[Action]:
        found: list[Action] = []
        for name, one in self.coordinators.items():
            found.append(("continue_term", name) if one.term else ("open_stream", name))
            if one.stream is not None:
                if one.sends_snapshot:
                    found.append(("snapshot", name))
                elif name == self.home:
                    found.append(("evict", name, "b") if "b" in self.chunks else ("store", name, "b"))
                else:
                    found.append(("late_report", name))
            elif name != self.home and one.registry.followers.get("i") is None:
                found.append(("follow", name))
            if one.publishing:
                found.append(("continue_publisher", name))
            elif one.publisher.backlog.size_bytes:
                found.append(("publish", name))
            if one.loading:
                found.append(("continue_loader", name))
            elif self._next_load(one) is not None:
                found.append(("load", name))
            if self._unread(one):
                found.append(("read_log", name))
        return found

    def apply(self, action: Action) -> None:
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)

    def _open_stream(self, name: str) -> None:
        """The instance calls `Report`; the coordinator asks the store for a term."""
        one = self.coordinators[name]
        one.term = Task(one.store.next_term(OWNER), [])
        self._continue(one.term)

    def _continue_term(self, name: str) -> None:
        one = self.coordinators[name]
        assert one.term is not None
        done, term = self._continue(one.term)
        assert done
        one.term = None
        publication = Publication(OWNER, 1, term, one.publisher.backlog)
        one.stream, one.sends_snapshot = one.registry.open_stream("i", 1, 0.0, publication), True
        self.home = name

    def _follow(self, name: str) -> None:
        """The instance informs a coordinator that it reports to the other one."""
        one = self.coordinators[name]
        one.registry.follow("i", 1, 0.0, one)

    def _snapshot(self, name: str) -> None:
        self.coordinators[name].sends_snapshot = False
        held = sorted(self.chunks) if name == self.home else ["z"]
        self._report(name, pb.ReportRequest(snapshot=True, snapshot_end=True), admitted=held)

    def _store(self, name: str, key: str) -> None:
        self.chunks.add(key)
        self._report(name, pb.ReportRequest(), admitted=[key])

    def _evict(self, name: str, key: str) -> None:
        self.chunks.remove(key)
        self._report(name, pb.ReportRequest(), evicted=[key])

    def _late_report(self, name: str) -> None:
        """A report of an old stream, of a chunk that the instance does not hold any more."""
        self._report(name, pb.ReportRequest(), admitted=["z"])

    def _report(
        self, name: str, report: pb.ReportRequest, admitted: Sequence[str] = (), evicted: Sequence[str] = ()
    ) -> None:
        stream = self.coordinators[name].stream
        assert stream is not None
        report.instance_id, report.epoch, report.sequence = "i", 1, stream.sequence + 1
        report.changes.add(
            tier=HOST,
            fingerprint=FINGERPRINT,
            admitted_keys=join_keys(KEYS[key] for key in admitted),
            evicted_keys=join_keys(KEYS[key] for key in evicted),
            partial_token_counts=dict.fromkeys(range(len(admitted)), 16),
        )
        stream.apply(report, 0.0)

    def _publish(self, name: str) -> None:
        """As `Publisher.run`: sends the next batch."""
        publisher = self.coordinators[name].publisher
        ((shard, batch),) = publisher.backlog.take().items()
        self.coordinators[name].publishing = task = Task(publisher._publish(shard, batch), [])
        self._continue(task)

    def _continue_publisher(self, name: str) -> None:
        one = self.coordinators[name]
        assert one.publishing is not None
        if self._continue(one.publishing)[0]:
            one.publishing = None

    def _load(self, name: str) -> None:
        """As `SnapshotLoader.run`."""
        one = self.coordinators[name]
        follower = self._next_load(one)
        assert follower is not None
        one.loading = Task(one.loader._load(OWNER, follower), [])
        self._continue_loader(name)

    def _continue_loader(self, name: str) -> None:
        one = self.coordinators[name]
        assert one.loading is not None
        if self._continue(one.loading)[0]:
            one.loading = None

    def _next_load(self, one: Coordinator) -> InstanceFollower | None:
        follower = one.registry.followers.get("i")
        return follower if follower is not None and follower.needs_load and not follower.is_closed else None

    def _read_log(self, name: str) -> None:
        """As `LogReader` and `Session`: one entry."""
        one = self.coordinators[name]
        one.position, data = self._unread(one)[0]
        follower = one.registry.followers.get("i")
        if follower is not None:
            follower.handle_entry(decode(data))
        one.loader.advance(OWNER.shard)

    def _unread(self, one: Coordinator) -> Sequence[tuple[LogPosition, bytes]]:
        return [entry for entry in self._server.log(self.content) if entry[0] > one.position]

    def _continue(self, task: Task) -> tuple[bool, Any]:
        """Whether the coroutine has ended, and its result."""
        task.seen.append(self.content)
        try:
            task.coroutine.send(None)
        except StopIteration as stop:
            return True, stop.value
        return False, None

    # --- Promises ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for one in self.coordinators.values():
            one.registry.check()

    def _open_at(self, name: str) -> None:
        if self.coordinators[name].term is None:
            self._open_stream(name)
        self._continue_term(name)

    def _drain(self) -> None:
        """Lets everything continue until nothing waits."""
        quiet = ("open_stream", "follow", "snapshot", "store", "evict", "late_report")
        for _ in range(500):
            waiting = [action for action in self.actions() if action[0] not in quiet]
            if not waiting:
                return
            self.apply(waiting[0])
        raise AssertionError("coordinators do not come to rest")

    def settle(self) -> None:
        """All coordinators continue, and the instance, which knows its home, reports there once more if it has to."""
        for one in self.coordinators.values():
            if one.loading:
                one.loading.coroutine.close()
                one.loading = None
                for follower in one.registry.followers.values():
                    follower.request_load()
        self._drain()
        home = self.coordinators[self.home]
        if home.stream is None:
            self._open_at(self.home)
        if home.sends_snapshot:
            self._snapshot(self.home)
        self._drain()
        if home.stream is None:
            self._open_at(self.home)
            self._snapshot(self.home)
        (other,) = (name for name in self.coordinators if name != self.home)
        self.coordinators[other].end_stream()
        self._follow(other)
        self._drain()
        self.check()
        for name, one in self.coordinators.items():
            assert one.held() == self.chunks, f"{name} names {sorted(one.held())}, held are {sorted(self.chunks)}"
            assert not one.registry.is_partial(10.0), f"{name} does not end its doubts"

    def fingerprint(self) -> object:
        return self.content, self.home, sorted(self.chunks), [self._shown(one) for one in self.coordinators.values()]

    def _shown(self, one: Coordinator) -> object:
        follower = one.registry.followers.get("i")
        publication = one.registry.publications.get("i")
        instance = one.registry.instances.find("i")
        tasks = [task and task.seen for task in (one.term, one.publishing, one.loading)]
        queued = [entry.entry for batch in one.publisher.backlog._by_shard.values() for entry in batch]
        return (
            one.position,
            sorted(one.held()),
            one.stream is not None,
            one.sends_snapshot,
            instance is not None and instance.synced,
            publication and (publication.term, publication.is_complete),
            queued,
            tasks,
            follower
            and (
                follower.term,
                follower.needs_load,
                follower._is_behind,
                follower._complete_term,
                follower._ended_term,
                follower._doubted_term,
                follower._resynced_term,
                follower._load is not None
                and (follower._load.term, follower._load.end_position, follower._load.buffered),
            ),
        )


@contextmanager
def shared_map() -> Iterator[Any]:
    """Makes models; their server lives as long as the context."""
    with RedisServer() as server, server.client() as client:
        store = Server(client)
        yield lambda: SharedMapModel(store)
