"""What lookups ask of the node."""

from __future__ import annotations

import time

from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey, KeyChain, as_tokens, split_keys
from lmkv.misses import LossMemory
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.scheduler.lookups import RequestLookups
from lmkv_client.connector.scheduler.request_state import RequestState
from lmkv_client.connector.stats import ConnectorCounters
from lmkv_client.engine.prompts.lookup_message import MAX_ASKED_KEYS
from lmkv_client.engine.prompts.prefill_rate import PrefillRate

CHUNK = 2


def test_a_lookup_fits_into_a_message_however_long_the_prompt() -> None:
    tokens = [number % 1000 for number in range(CHUNK * (MAX_ASKED_KEYS + 5))]
    prompt = RequestState("r", as_tokens(tokens), tokens, KeyChain(ChunkKey(bytes(16)), CHUNK), partial=False)
    sent: list[pb.Act] = []
    searches = RequestLookups(
        ConnectorConfig(),
        lambda *acts: sent.extend(acts),
        ConnectorCounters(),
        time.monotonic,
        PrefillRate(CHUNK),
        LossMemory(4),
    )
    searches.start(prompt, lambda: [0])
    (act,) = sent
    assert pb.AttachRequest(acts=[act]).ByteSize() < MAX_MESSAGE_BYTES
    assert split_keys(act.lookup.chunk_keys) == prompt.keys[:MAX_ASKED_KEYS]
    assert len(prompt.keys) == MAX_ASKED_KEYS + 5
