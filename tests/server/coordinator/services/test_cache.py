"""`CacheService` over a socket: what is found, and every error that its page promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import pytest

from lmkv.errors import LmkvError
from lmkv.internal.v1.report_service_pb2 import ChunkChange, ReportRequest
from lmkv.keys import (
    KEY_BYTES,
    MAX_KEYS,
    PAGE_HASH_SCHEME,
    ChunkKey,
    as_tokens,
    join_keys,
    page_keys,
    page_seed,
    root_key,
    split_keys,
)
from lmkv.rpc.error_status import from_rpc_error, from_status
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.spec import MAX_IDENTITY_BYTES, MAX_NAME_BYTES, MAX_SERVED_MODELS, KvSpec
from lmkv.tiers import DISK, GPU, HOST, REMOTE
from lmkv.v1 import chunk_pb2
from lmkv.v1.cache_service_pb2 import (
    LookupRequest,
    LookupResponse,
    LookupStreamRequest,
)
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_server.coordinator.registry.selection import MAX_NAMESPACES
from lmkv_server.coordinator.services.lookups import MAX_ANSWERS
from tests.server.coordinator.cases import LLAMA_FLOAT, PROMPT, QWEN, keys_of
from tests.support.node_stub import registration
from tests.support.prompts import with_prompt
from tests.support.specs import LLAMA

ROOT = root_key(LLAMA.fingerprint, secret=b"hush")


async def holds(
    registry: Any,
    instance_id: str,
    keys: Sequence[ChunkKey],
    spec: KvSpec = LLAMA,
    last_tokens: int = 0,
    served: Mapping[str, str] | None = None,
    parent: bytes = b"",
) -> Any:
    """Registers an instance that holds chunks in host memory; returns its stream, which must stay referenced.

    `parent` is what the last chunk is reported to follow.
    `served` are LoRA identities by served name, empty for further names of the model.
    """
    instance = Instance(
        instance_id=instance_id,
        epoch=1,
        peer_address="127.0.0.1:7000",
        specs=[spec.to_proto()],
        served_models=[
            chunk_pb2.ServedModel(name=name, fingerprint=spec.fingerprint, lora_identity=identity)
            for name, identity in (served or {}).items()
        ],
    )
    await registry.Register(registration(instance), timeout=60)
    change = ChunkChange(
        tier=HOST,
        fingerprint=spec.fingerprint,
        admitted_keys=join_keys(keys),
        partial_token_counts={len(keys) - 1: last_tokens} if last_tokens else {},
        partial_parent_keys={len(keys) - 1: parent} if parent else {},
    )
    stream = registry.Report()
    await stream.write(
        ReportRequest(instance_id=instance_id, epoch=1, sequence=1, snapshot=True, snapshot_end=True, changes=[change])
    )
    assert (await stream.read()).acked_sequence == 1
    return stream


async def lookup(cache: Any, **fields: Any) -> LookupResponse:
    response: LookupResponse = await cache.Lookup(LookupRequest(**with_prompt(**fields)), timeout=60)
    return response


async def refused(cache: Any, **fields: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await lookup(cache, **fields)
    return from_rpc_error(caught.value)


def found(response: LookupResponse) -> dict[str, tuple[int, int]]:
    return {h.instance_id: (h.matched_chunk_count, h.matched_token_count) for h in response.holders}


async def test_tokens_find_every_holder_with_its_tier(registry: Any, cache: Any) -> None:
    keys = keys_of(PROMPT)
    _a = await holds(registry, "a", keys, last_tokens=8)
    _b = await holds(registry, "b", keys[:1])
    response = await lookup(cache, tokens=PROMPT)
    assert [h.instance_id for h in response.holders] == ["a", "b"]
    assert found(response) == {"a": (3, 40), "b": (1, 16)}
    holder = response.holders[0]
    assert (holder.epoch, holder.peer_address) == (1, "127.0.0.1:7000")
    (run,) = holder.runs
    assert run.tier == HOST
    assert (run.chunk_count, run.token_count) == (3, 40)
    assert response.revision > 0


async def test_twelve_tokens_are_found_where_partial_chunks_are_kept(registry: Any, cache: Any) -> None:
    prompt = [128000, 849, 21435, 279, 26431, 315, 85748, 6636, 304, 4221, 4211, 13]
    _a = await holds(registry, "a", keys_of(prompt), last_tokens=12)
    response = await lookup(cache, tokens=prompt)
    assert found(response) == {"a": (1, 12)}
    assert response.holders[0].runs[0].tier == HOST


@pytest.mark.parametrize("page_count", [2, 300], ids=["at once", "in slices"])
async def test_pages_that_an_engine_names_itself_are_found_by_tokens(
    registry: Any, cache: Any, page_count: int
) -> None:
    spec = dataclasses.replace(LLAMA, hash_scheme=PAGE_HASH_SCHEME)
    prompt = [token % 1000 for token in range(16 * page_count + 5)]  # the rest of a page has no key
    root = root_key(spec.fingerprint, secret=b"hush")
    keys = split_keys(page_keys(as_tokens(prompt), root, 16)[0])
    salted = split_keys(page_keys(as_tokens(prompt), root, 16, page_seed("tenant-a"))[0])
    assert len(keys) == page_count
    _a = await holds(registry, "a", keys, spec)
    _b = await holds(registry, "b", salted[:1], spec)
    assert found(await lookup(cache, tokens=prompt)) == {"a": (page_count, 16 * page_count)}
    assert found(await lookup(cache, tokens=prompt, cache_salt="tenant-a")) == {"b": (1, 16)}
    assert found(await lookup(cache, chunk_keys=join_keys(keys))) == {"a": (page_count, 16 * page_count)}


async def test_engines_of_two_kinds_that_serve_one_model_are_both_found(registry: Any, cache: Any) -> None:
    spec = dataclasses.replace(LLAMA, hash_scheme=PAGE_HASH_SCHEME)
    pages = split_keys(page_keys(as_tokens(PROMPT), root_key(spec.fingerprint, secret=b"hush"), 16)[0])
    _a = await holds(registry, "a", keys_of(PROMPT), last_tokens=8)
    _b = await holds(registry, "b", pages, spec)
    assert found(await lookup(cache, tokens=PROMPT, model_name="llama")) == {"a": (3, 40), "b": (2, 32)}


async def test_keys_find_the_same_as_tokens(registry: Any, cache: Any) -> None:
    keys = keys_of(PROMPT)
    _a = await holds(registry, "a", keys, last_tokens=8)
    assert (await lookup(cache, chunk_keys=join_keys(keys))).holders == (await lookup(cache, tokens=PROMPT)).holders


async def test_tokens_find_the_partial_chunk_of_a_prompt_that_they_continue(registry: Any, cache: Any) -> None:
    keys, other = keys_of(PROMPT), keys_of([*PROMPT[:36], 1, 2])
    _a = await holds(registry, "a", keys, last_tokens=8, parent=keys[1])
    _b = await holds(registry, "b", other, last_tokens=6, parent=keys[1])
    _c = await holds(registry, "c", keys_of(PROMPT[:5]), last_tokens=5, parent=ROOT)
    longer = [*PROMPT, *range(50)]
    response = await lookup(cache, tokens=longer)
    assert found(response) == {"a": (3, 40), "b": (2, 32), "c": (1, 5)}
    assert [one.instance_id for one in response.holders] == ["a", "b", "c"]
    assert [(run.chunk_count, run.token_count) for run in response.holders[0].runs] == [(3, 40)]
    assert found(await lookup(cache, tokens=longer, excluded_instance_id="a")) == {"b": (2, 32), "c": (1, 5)}


@pytest.mark.parametrize(("index", "parent", "reason"), [(0, bytes(16), "BAD_MESSAGE"), (1, b"short", "BAD_CHUNK_KEY")])
async def test_parents_that_are_of_no_partial_chunk_or_no_key_end_the_stream(
    registry: Any, cache: Any, index: int, parent: bytes, reason: str
) -> None:
    stream = await holds(registry, "a", keys_of(PROMPT[:16]))
    change = ChunkChange(
        tier=HOST,
        fingerprint=LLAMA.fingerprint,
        admitted_keys=join_keys(keys_of(PROMPT)[1:]),
        partial_token_counts={1: 8},
        partial_parent_keys={index: parent},
    )
    await stream.write(ReportRequest(instance_id="a", epoch=1, sequence=2, changes=[change]))
    with pytest.raises(grpc.RpcError) as caught:
        await stream.read()
    assert from_rpc_error(caught.value).reason == reason


async def test_who_asks_can_leave_itself_out(registry: Any, cache: Any) -> None:
    keys = keys_of(PROMPT)
    _a = await holds(registry, "a", keys)
    _b = await holds(registry, "b", keys[:1])
    assert found(await lookup(cache, chunk_keys=join_keys(keys), excluded_instance_id="a")) == {"b": (1, 16)}
    assert found(await lookup(cache, tokens=PROMPT, excluded_instance_id="a")) == {"b": (1, 16)}


async def test_nothing_asked_nothing_found(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT))
    assert found(await lookup(cache)) == {}
    assert found(await lookup(cache, chunk_keys=b"unknown 16 bytes")) == {}
    assert found(await lookup(cache, tokens=[1, 2, 3])) == {}


async def test_nothing_registered_nothing_found(cache: Any) -> None:
    assert found(await lookup(cache, tokens=PROMPT)) == {}


async def test_salt_and_lora_are_kept_apart(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT, cache_salt="tenant"))
    _b = await holds(registry, "b", keys_of(PROMPT, lora="adapter@1"), served={"adapter": "adapter@1"})
    assert found(await lookup(cache, tokens=PROMPT)) == {}
    assert list(found(await lookup(cache, tokens=PROMPT, cache_salt="tenant"))) == ["a"]
    assert list(found(await lookup(cache, tokens=PROMPT, lora_name="adapter"))) == ["b"]
    assert found(await lookup(cache, tokens=PROMPT, lora_name="adapter", cache_salt="tenant")) == {}


ADAPTER = {"adapter": "adapter@1", "other": "other@1", "nickname": ""}


@pytest.mark.parametrize(
    "names",
    [
        {"model_name": "adapter"},
        {"lora_name": "adapter"},
        {"lora_name": "adapter@1"},
        {"model_name": "llama", "lora_name": "adapter"},
        {"model_name": "nickname", "lora_name": "adapter"},
        {"model_name": "adapter", "lora_name": "adapter"},
        {"model_name": "llama", "lora_name": "adapter@1"},
    ],
)
async def test_an_adapter_is_found_by_every_name_of_it(registry: Any, cache: Any, names: dict[str, str]) -> None:
    keys = keys_of(PROMPT, lora="adapter@1")
    _a = await holds(registry, "a", keys, last_tokens=8, served=ADAPTER)
    _b = await holds(registry, "b", keys_of(PROMPT), served=ADAPTER)
    assert found(await lookup(cache, tokens=PROMPT, **names)) == {"a": (3, 40)}


async def test_further_names_of_a_model_are_names_of_it(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT), last_tokens=8, served=ADAPTER)
    _b = await holds(registry, "b", keys_of(PROMPT, QWEN), QWEN)
    assert found(await lookup(cache, tokens=PROMPT, model_name="nickname")) == {"a": (3, 40)}


async def test_an_adapter_of_two_versions_is_found_where_each_is(registry: Any, cache: Any) -> None:
    old, new = ({"adapter": f"adapter@{version}"} for version in (1, 2))
    _a = await holds(registry, "a", keys_of(PROMPT, lora="adapter@1"), last_tokens=8, served=old)
    _b = await holds(registry, "b", keys_of(PROMPT, lora="adapter@2")[:1], served=new)
    assert found(await lookup(cache, tokens=PROMPT, model_name="adapter")) == {"a": (3, 40), "b": (1, 16)}


async def test_a_lookup_is_made_under_a_bounded_number_of_versions(registry: Any, cache: Any) -> None:
    count = MAX_NAMESPACES + 1
    streams = [
        await holds(registry, f"i-{n}", keys_of(PROMPT, lora=f"adapter@{n}"), served={"adapter": f"adapter@{n}"})
        for n in range(count)
    ]
    assert len(found(await lookup(cache, tokens=PROMPT, model_name="adapter"))) == MAX_NAMESPACES == len(streams) - 1


async def test_an_adapter_that_no_engine_has_registered_is_refused(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT), served=ADAPTER)
    error = await refused(cache, tokens=PROMPT, lora_name="adaptor")
    assert (error.code, error.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert error.metadata["known_models"] == "adapter, other"
    _b = await holds(registry, "b", keys_of(PROMPT, QWEN), QWEN, served={"foreign": "foreign@1"})
    error = await refused(cache, tokens=PROMPT, model_name="llama", lora_name="foreign")
    assert error.reason == "MODEL_NOT_FOUND", "it is of another model"


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([("", LLAMA.fingerprint, "")], "name"),
        ([("n" * (MAX_NAME_BYTES + 1), LLAMA.fingerprint, "")], "name"),
        ([("a\nb", LLAMA.fingerprint, "")], "name"),
        ([("a", LLAMA.fingerprint, "i" * (MAX_IDENTITY_BYTES + 1))], "lora_identity"),
        ([("a", QWEN.fingerprint, "")], "fingerprint"),
        (
            [(f"a-{number}", LLAMA.fingerprint, "") for number in range(MAX_SERVED_MODELS + 1)],
            f"{MAX_SERVED_MODELS + 1}",
        ),
    ],
)
async def test_served_models_are_bounded_and_of_the_instance(
    registry: Any, models: list[tuple[str, bytes, str]], said: str
) -> None:
    served = [chunk_pb2.ServedModel(name=name, fingerprint=of, lora_identity=lora) for name, of, lora in models]
    instance = Instance(
        instance_id="a", epoch=1, peer_address="127.0.0.1:1", specs=[LLAMA.to_proto()], served_models=served
    )
    with pytest.raises(grpc.RpcError) as caught:
        await registry.Register(registration(instance), timeout=60)
    error = from_rpc_error(caught.value)
    assert error.reason == "BAD_KV_SPEC"
    assert said in str(error)


async def test_keys_under_another_secret_are_not_found(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT, secret=b"other"))
    assert found(await lookup(cache, tokens=PROMPT)) == {}


async def test_one_model_name_over_several_specs_finds_the_holders_of_each(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT)[:2])
    _b = await holds(registry, "b", keys_of(PROMPT, LLAMA_FLOAT), LLAMA_FLOAT, last_tokens=8)
    assert found(await lookup(cache, tokens=PROMPT, model_name="llama")) == {"b": (3, 40), "a": (2, 32)}


async def test_every_tier_is_found(registry: Any, cache: Any) -> None:
    keys = keys_of(range(64))
    stream = await holds(registry, "a", keys[:1])
    changes = [
        ChunkChange(tier=tier, fingerprint=LLAMA.fingerprint, admitted_keys=key)
        for tier, key in (
            (GPU, keys[1]),
            (DISK, keys[2]),
            (REMOTE, keys[3]),
        )
    ]
    await stream.write(ReportRequest(instance_id="a", epoch=1, sequence=2, changes=changes))
    await stream.write(ReportRequest(instance_id="a", epoch=1, sequence=3))
    await stream.read()
    (holder,) = (await lookup(cache, chunk_keys=join_keys(keys))).holders
    assert [run.tier for run in holder.runs] == [
        "host",
        "gpu",
        "disk",
        "remote",
    ]


@pytest.mark.parametrize("size", [0, 1, 15, 17, 32])
async def test_a_broken_key_is_refused(registry: Any, cache: Any, size: int) -> None:
    error = await refused(cache, chunk_keys=[bytes(16), bytes(size)])
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "BAD_CHUNK_KEY")
    assert error.metadata["size_bytes"] == str(size)


async def test_tokens_beyond_the_vocabulary_are_refused(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT))
    for bad in ([128_256], [1, 2, -1], [-2]):
        error = await refused(cache, tokens=bad)
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "BAD_TOKENS")
    assert found(await lookup(cache, tokens=PROMPT)) == {"a": (3, 48)}


async def test_negative_tokens_are_refused_even_if_nothing_is_registered(cache: Any) -> None:
    assert (await refused(cache, tokens=[-5])).reason == "BAD_TOKENS"


async def test_more_tokens_than_keys_may_be_are_refused(registry: Any, cache: Any) -> None:
    tiny = dataclasses.replace(LLAMA, chunk_size=1)
    _a = await holds(registry, "a", [], tiny)
    assert (await refused(cache, tokens=[1] * (MAX_KEYS + 1))).reason == "BAD_TOKENS"


async def test_several_specs_need_a_model_name(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT))
    _b = await holds(registry, "b", keys_of(PROMPT, QWEN), QWEN, last_tokens=8)
    error = await refused(cache, tokens=PROMPT)
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "MODEL_AMBIGUOUS")
    assert error.metadata["known_models"] == "llama, qwen"
    assert found(await lookup(cache, tokens=PROMPT, model_name="qwen")) == {"b": (2, 40)}
    assert found(await lookup(cache, chunk_keys=join_keys(keys_of(PROMPT, QWEN)))) == {"b": (2, 40)}


async def test_an_unknown_model_is_refused_and_the_known_ones_are_named(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT))
    error = await refused(cache, model_name="mistral", tokens=PROMPT)
    assert (error.code, error.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert error.metadata == {"model_name": "mistral", "known_models": "llama"}
    assert (await refused(cache, tokens=PROMPT, model_name=100_000 * "x")).reason == "MODEL_NOT_FOUND"


async def test_an_oversized_message_is_refused_and_the_next_one_served(
    registry: Any, cache: Any, boundless: grpc.aio.Channel
) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT))
    with pytest.raises(grpc.RpcError) as caught:
        await lookup(CacheServiceStub(boundless), chunk_keys=bytes(KEY_BYTES * (MAX_KEYS + 1)))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found(await lookup(cache, tokens=PROMPT)) == {"a": (3, 48)}


async def test_many_lookups_in_one_message_are_answered_in_parts(cache: Any) -> None:
    stream = cache.LookupStream(timeout=60)
    await stream.write(LookupStreamRequest(requests=[LookupRequest()] * 1000))
    await stream.done_writing()
    parts = [len(message.results) async for message in stream]
    assert sum(parts) == 1000
    assert max(parts) <= MAX_ANSWERS, "the coordinator does nothing else while it makes one"


async def test_a_stream_answers_each_lookup_in_order_and_continues_after_an_error(registry: Any, cache: Any) -> None:
    _a = await holds(registry, "a", keys_of(PROMPT), last_tokens=8)
    stream = cache.LookupStream(timeout=60)
    requests = [
        LookupRequest(prompt=by_tokens(PROMPT)),
        LookupRequest(prompt=by_tokens([-1])),
        LookupRequest(prompt=by_tokens(PROMPT, model_name="gpt")),
        LookupRequest(prompt=by_keys(keys_of(PROMPT)[:1])),
    ]
    for part in (requests[:1], requests[1:]):
        await stream.write(LookupStreamRequest(requests=part))
    await stream.done_writing()
    answers = [result async for message in stream for result in message.results]
    assert [answer.WhichOneof("result") for answer in answers] == ["response", "error", "error", "response"]
    assert found(answers[0].response) == {"a": (3, 40)}
    assert [from_status(answer.error).reason for answer in answers[1:3]] == ["BAD_TOKENS", "MODEL_NOT_FOUND"]
    assert found(answers[3].response) == {"a": (1, 16)}
