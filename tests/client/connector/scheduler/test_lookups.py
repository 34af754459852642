"""What lookups ask of the node."""

from __future__ import annotations

import time

from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey, KeyChain, as_tokens, split_keys
from lmkv.misses import LossMemory
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.scheduler.lookups import RequestLookups
from lmkv_client.connector.scheduler.request_state import RequestLookup, RequestState
from lmkv_client.engine.counters import Counters
from lmkv_client.engine.session import MAX_ASKED_KEYS, Session
from tests.client.connector.scripted_node import ScriptedNode
from tests.support.specs import make_spec

CHUNK = 2
SPEC = make_spec(model_name="m", model_id="i", kv_dtype="bfloat16", layer_count=1, kv_head_count=1, chunk_size=CHUNK)


def test_a_lookup_fits_into_a_message_however_long_the_prompt() -> None:
    tokens = [number % 1000 for number in range(CHUNK * (MAX_ASKED_KEYS + 5))]
    chain = KeyChain(ChunkKey(bytes(16)), CHUNK)
    prompt = RequestState(SPEC, "r", chain, as_tokens(tokens), tokens, partial=False)
    config, node = ConnectorConfig(), ScriptedNode(SPEC)
    node.prompt = False
    node.attach()
    session = Session[RequestLookup](config, SPEC, node, Counters())  # type: ignore[arg-type]
    list(session.events(0.0))
    RequestLookups(config, session, time.monotonic, LossMemory(4)).start(prompt, [0])
    (act,) = node.unanswered
    assert pb.AttachRequest(acts=[act]).ByteSize() < MAX_MESSAGE_BYTES
    assert split_keys(act.lookup.chunk_keys) == prompt.keys[:MAX_ASKED_KEYS]
    assert len(prompt.keys) == MAX_ASKED_KEYS + 5
