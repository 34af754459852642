"""All attached engines of a node, and the names under which they serve. Called by engine service and pool socket.

What an engine was granted ends when the engine returns it, or when its stream has ended and every worker has closed its
connection to the pool socket: only then has the kernel proven that none of its processes touches the pool. A frozen
engine keeps its grants, which are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from lmkv.errors import BadKvSpec, BadMessage, EngineNotFound
from lmkv.kv_inputs import MAX_WRITERS, NO_INPUTS, KvInputs
from lmkv.spec import MAX_SERVED_MODELS, MAX_SPECS, KvSpec, ServedModel
from lmkv.units import format_bytes
from lmkv_server.node.cache.events import PartialChunks
from lmkv_server.node.cache.host import HostTier, Origin
from lmkv_server.node.sessions.session import EngineSession


class ServedModels:
    """Names of engines that are attached, and those of engines that have left: their chunks are still here.

    At most `limit`: a name beyond it replaces the oldest, of engines that have left before of those that are attached.
    """

    def __init__(self, limit: int = MAX_SERVED_MODELS) -> None:
        self._limit = limit
        self._engines: OrderedDict[ServedModel, set[str]] = OrderedDict()
        """Attached engines by what they serve, the oldest announcement first."""

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._engines)

    def announce(self, engine_id: str, models: Iterable[ServedModel]) -> bool:
        """Takes what an attached engine serves; returns whether anything is new.

        A name of the engine that has another identity now replaces the earlier one, unless another engine still has it.
        """
        before = list(self._engines)
        for model in models:
            for other, engines in list(self._engines.items()):
                if (other.name, other.fingerprint) == (model.name, model.fingerprint) and other != model:
                    engines.discard(engine_id)
                    if not engines:
                        del self._engines[other]
            self._engines.setdefault(model, set()).add(engine_id)
        while len(self._engines) > self._limit:
            self._drop_oldest()
        return before != list(self._engines)

    def move(self, engine_id: str, fingerprint: bytes) -> None:
        """The spec of an engine has this fingerprint now: it serves the same names under it, and not under the old."""
        names = [model for model, engines in self._engines.items() if engine_id in engines]
        self.detach(engine_id)
        self.announce(engine_id, [replace(model, fingerprint=fingerprint) for model in names])

    def detach(self, engine_id: str) -> None:
        """The engine has left. Its names stay."""
        for engines in self._engines.values():
            engines.discard(engine_id)

    def _drop_oldest(self) -> None:
        left = (model for model, engines in self._engines.items() if not engines)
        del self._engines[next(left, next(iter(self._engines)))]


MAX_CREDITS = 256
"""Most write credits that one engine may hold at a time."""
CREDIT_SHARE = 3
"""The write credits of one engine take at most 1/3 of the pool."""
KEPT_VERSIONS = 4
"""Versions of a model's weights, besides those of attached engines, whose chunks are kept."""


class EngineSessions:
    """The sessions of a node by engine id, the specs of their engines, and the models that they serve."""

    def __init__(self, tier: HostTier, partial_chunks: PartialChunks | None = None) -> None:
        """`partial_chunks` is the index of partial chunks that has to know the specs."""
        self._tier = tier
        self._partial_chunks = PartialChunks() if partial_chunks is None else partial_chunks
        self._sessions: dict[str, EngineSession] = {}
        self._specs: dict[bytes, KvSpec] = {}
        self._writers: dict[bytes, list[KvInputs]] = {}
        """The inputs of engines by the fingerprint of their spec, the latest first."""
        self.on_take_over: Callable[[], None] = lambda: None
        """Called when a spec is served without an engine of it."""
        self.served = ServedModels()
        """The names under which engines serve."""

    @property
    def specs(self) -> Iterable[KvSpec]:
        """Specs of the engines that have attached, the latest at the end; at most `MAX_SPECS`."""
        return self._specs.values()

    @property
    def attached_count(self) -> int:
        """Engines whose stream is alive."""
        return sum(session.attached for session in self._sessions.values())

    @property
    def mapped_count(self) -> int:
        """Engines whose processes may still touch the pool."""
        return len(self._sessions)

    def spec(self, fingerprint: bytes) -> KvSpec | None:
        """The spec of this fingerprint, if an engine of it has attached."""
        return self._specs.get(fingerprint)

    def writers(self, fingerprint: bytes) -> Sequence[KvInputs]:
        """The inputs of engines that have attached with this spec, the latest first; at most `MAX_WRITERS`."""
        return self._writers.get(fingerprint, ())

    def attached(self, fingerprint: bytes) -> list[EngineSession]:
        """The sessions with this spec whose stream is alive."""
        sessions = self._sessions.values()
        return [one for one in sessions if one.attached and one.spec.fingerprint == fingerprint]

    def session(self, engine_id: str) -> EngineSession:
        """The session of an engine. Raises `EngineNotFound`."""
        session = self._sessions.get(engine_id)
        if session is None:
            raise EngineNotFound(f"engine {engine_id!r} is not attached", engine_id=engine_id)
        return session

    def attach(
        self, engine_id: str, spec: KvSpec, worker_count: int = 1, *, inputs: KvInputs = NO_INPUTS
    ) -> EngineSession:
        """Begins a session of an engine with these inputs of its KV.

        Raises `BadMessage` if the id is in use, `BadKvSpec` if not even two chunks fit.
        """
        if not engine_id or engine_id in self._sessions:
            raise BadMessage(f"engine_id {engine_id!r} is empty or in use", engine_id=engine_id)
        capacity = self._tier.size_bytes // spec.chunk_bytes
        if capacity < 2:
            raise BadKvSpec(
                f"a chunk has {format_bytes(spec.chunk_bytes)}, the pool has {format_bytes(self._tier.size_bytes)}; "
                "raise max_local_cpu_size or lower chunk_size",
                field="chunk_size",
            )
        limit = max(1, min(MAX_CREDITS, capacity // CREDIT_SHARE))
        session = EngineSession(engine_id, spec, self._tier, limit, worker_count=worker_count)
        session.origin = Origin(writers=(inputs,) if inputs else ())
        self._sessions[engine_id] = session
        self._add_spec(spec)
        self._add_writer(session)
        return session

    def take_over(self, spec: KvSpec) -> bool:
        """Serves a spec without an engine of it, if there are no engines: a standby node. Whether it is served now."""
        if spec.fingerprint in self._specs:
            return True
        if self._sessions or self._tier.size_bytes < 2 * spec.chunk_bytes:
            return False
        self._add_spec(spec)
        self.on_take_over()
        return True

    def change_weights(self, session: EngineSession, weight_version: str) -> None:
        """The weights of an engine have changed. What it was granted stays valid: only the version of its spec differs.

        Raises `BadKvSpec` if the version is too long.
        """
        session.spec = replace(session.spec, weight_version=weight_version)
        self.served.move(session.engine_id, session.spec.fingerprint)
        self._add_spec(session.spec)
        self._add_writer(session)

    def drop_old_versions(self, spec: KvSpec) -> list[KvSpec]:
        """Drops specs that differ from this one in the version of the weights alone and that no engine has, and returns
        them: all private ones, and of the others all but the `KEPT_VERSIONS` that were attached last."""
        in_use = {session.spec.fingerprint for session in self._sessions.values()}
        unversioned = replace(spec, weight_version="").fingerprint
        old = [
            one
            for one in self._specs.values()
            if one.fingerprint not in in_use and replace(one, weight_version="").fingerprint == unversioned
        ]
        named = [one for one in old if not one.is_private]
        dropped = [one for one in old if one.is_private] + named[: max(0, len(named) - KEPT_VERSIONS)]
        for one in dropped:
            del self._specs[one.fingerprint]
            self._writers.pop(one.fingerprint, None)
            self._partial_chunks.remove_spec(one.fingerprint)
        return dropped

    def detach(self, session: EngineSession) -> None:
        """Ends a session whose stream has ended; its grants stay until its workers have unmapped the pool."""
        session.attached = False
        self.served.detach(session.engine_id)
        self._revoke_if_gone(session)

    def worker_connected(self, engine_id: str, rank: int) -> None:
        """Counts a worker that maps the pool. Raises `EngineNotFound` if its engine is no longer attached."""
        self.session(engine_id).workers[rank] += 1

    def worker_disconnected(self, engine_id: str, rank: int) -> None:
        """Counts a worker that has unmapped the pool, or ended."""
        session = self._sessions.get(engine_id)
        if session and session.workers[rank]:
            session.workers[rank] -= 1
            self._revoke_if_gone(session)

    def _add_spec(self, spec: KvSpec) -> None:
        self._specs.pop(spec.fingerprint, None)
        self._specs[spec.fingerprint] = spec
        self._partial_chunks.add_spec(spec)
        if len(self._specs) > MAX_SPECS:
            self._drop_oldest_spec()

    def _add_writer(self, session: EngineSession) -> None:
        known = self._writers.get(session.spec.fingerprint, [])
        new = list(session.origin.writers)
        self._writers[session.spec.fingerprint] = [*new, *(one for one in known if one not in new)][:MAX_WRITERS]

    def _drop_oldest_spec(self) -> None:
        """Drops the oldest spec that no engine has; its chunks can be found again once an engine of it attaches."""
        in_use = {session.spec.fingerprint for session in self._sessions.values()}
        oldest = next((one for one in self._specs if one not in in_use), next(iter(self._specs)))
        del self._specs[oldest]
        self._writers.pop(oldest, None)
        self._partial_chunks.remove_spec(oldest)

    def _revoke_if_gone(self, session: EngineSession) -> None:
        gone = not session.attached and not session.workers.total()
        if gone and self._sessions.get(session.engine_id) is session:
            del self._sessions[session.engine_id]
            session.revoke()
