"""The hints of one engine's stream. Used by `EngineStream`."""

from __future__ import annotations

from lmkv.errors import BadChunkKey, BadMessage
from lmkv.hints import HintAction, HintReason, HintResult, reject
from lmkv.rpc.hint_messages import to_proto
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.engines.outbox import Outbox
from lmkv_server.node.engines.request_tasks import RequestTasks
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.hints.prompt_hint import MAX_ID_BYTES, PromptHint
from lmkv_server.node.sessions.session import EngineSession

MAX_LOOKUPS = 64
"""Most prefetches of one engine that wait for their answers."""


class EngineHints:
    """Answers each hint. A malformed one is rejected, and does not end the stream."""

    def __init__(self, session: EngineSession, executor: HintExecutor, outbox: Outbox) -> None:
        self._session = session
        self._executor = executor
        self._outbox = outbox
        self._lookups = RequestTasks()

    def hint(self, message: pb.HintChunks) -> None:
        """Carries out a hint; a prefetch is answered when it is known what can be brought."""
        session = self._session
        try:
            hint = PromptHint.read(
                message, session.spec, engine_id=session.engine_id, owner=message.root_key, is_running=message.running
            )
        except (BadMessage, BadChunkKey) as error:
            self._answer(message, reject("", "", HintReason.MALFORMED, str(error)))
            return
        if hint.action is not HintAction.PREFETCH:
            self._answer(message, self._executor.apply(hint))
        elif len(self._lookups) >= MAX_LOOKUPS:
            self._answer(message, hint.rejected(HintReason.QUOTA, f"{MAX_LOOKUPS} prefetches of this engine wait"))
        else:
            self._lookups.cancel(hint.hint_id)
            self._lookups.start(hint.hint_id, self._prefetch(message, hint))

    def close(self) -> None:
        """Ends what still waits for an answer. Prefetches that have begun continue."""
        self._lookups.close()

    async def _prefetch(self, message: pb.HintChunks, hint: PromptHint) -> None:
        self._answer(message, await self._executor.prefetch(hint))

    def _answer(self, message: pb.HintChunks, result: HintResult) -> None:
        answer = pb.HintedChunks(hint_id=message.hint_id[:MAX_ID_BYTES], result=to_proto(result))
        self._outbox.put(pb.Event(hinted=answer))
