"""Hints of a coordinator's clients, which arrive as orders. Used by `OrderRunner`."""

from __future__ import annotations

from lmkv.errors import BadChunkKey, BadMessage
from lmkv.hints import HintAction, HintOutcome, HintReason, HintResult, reject
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.hints.prompt_hint import PromptHint
from lmkv_server.node.sessions.sessions import EngineSessions


async def carry_out(order: pb.HintOrder, executor: HintExecutor, engines: EngineSessions) -> HintResult:
    """The result of a hint about chunks of any spec with which an engine has attached; a malformed one is rejected.

    Raises nothing but for cancellation.
    """
    spec = engines.spec(order.fingerprint)
    if spec is None:
        return HintResult(action_id="", action="", outcome=HintOutcome.MISSING)
    try:
        hint = PromptHint.read(order, spec, owner=order.owner)
    except (BadMessage, BadChunkKey) as error:
        return reject("", "", HintReason.MALFORMED, str(error))
    return await executor.prefetch(hint) if hint.action is HintAction.PREFETCH else executor.apply(hint)
