"""What a prompt offers to vLLM, which keys it has, and what of it still needs storing."""

from __future__ import annotations

import pytest

from lmkv.keys import ChunkKey, KeyChain, as_tokens, chunk_keys
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.scheduler.request_state import RequestLookup, RequestState
from lmkv_client.engine.session import LookupState, PartialChunk
from tests.support.specs import make_spec

ROOT = ChunkKey(bytes(16))
CHUNK = 64
SPEC = make_spec(model_name="m", model_id="i", kv_dtype="bfloat16", layer_count=1, kv_head_count=1, chunk_size=CHUNK)


def prompt_of(token_count: int, *, partial: bool = False) -> RequestState:
    return growing(list(range(token_count)), partial=partial)


def growing(all_tokens: list[int], *, partial: bool = False) -> RequestState:
    """A prompt whose request continues with `all_tokens`."""
    return RequestState(SPEC, "r", KeyChain(ROOT, CHUNK), as_tokens(all_tokens), all_tokens, partial=partial)


def partial_chunk(index: int, token_count: int) -> PartialChunk:
    """A partial chunk of other prompts."""
    return PartialChunk(key=ChunkKey(b"p" * 16), index=index, token_count=token_count)


def answer(
    prompt: RequestState, own: int, peer: int = 0, partial: PartialChunk | None = None, *, now: float = 5.0
) -> None:
    """Looks the prompt up, and answers."""
    prompt.lookup = RequestLookup(request=prompt, account=prompt.account, keys=prompt.keys, lookup_id="1")
    prompt.lookup.state = LookupState.ASKED
    found = pb.FoundChunks(
        own=[pb.HeldChunk(token_count=CHUNK, generation=index) for index in range(own)],
        runs=[pb.Run(tier="peers", chunk_count=peer)] if peer else [],
        peer_instance_id="other" if peer else "",
    )
    if partial:
        found.partial_key, found.partial_token_count = partial.key, partial.token_count
    prompt.lookup.answer(found, now)
    prompt.mark_held(prompt.lookup.hit_count(pool_only=True))


HITS = [
    # prompt, chunks, request, sync, hit
    (200, 0, 200, False, 0),
    (200, 1, 200, False, 64),
    (200, 3, 200, False, 192),  # full chunks only: the rest is computed
    (192, 3, 192, False, 192),  # all of the request: vLLM computes its last token again
    (192, 3, 192, True, 191),  # a synchronous load leaves at least one token
    (193, 3, 193, True, 192),
    (193, 3, 193, False, 192),
    (64, 1, 64, True, 63),
    (64, 1, 64, False, 64),
    (32, 0, 32, True, 0),
    (192, 2, 192, True, 128),
    (192, 3, 195, False, 192),  # preempted after three tokens of output
    (192, 3, 195, True, 192),
    (1, 0, 1, True, 0),
]
PARTIAL_HITS = [
    (200, 4, 200, False, 200),  # the partial chunk ends the request
    (200, 4, 201, False, 200),  # it no longer does: one token of output
    (200, 4, 200, True, 199),  # a synchronous load may not take all
    (200, 4, 201, True, 200),
    (200, 3, 200, False, 192),
    (12, 1, 12, False, 12),
    (12, 1, 12, True, 11),
    (12, 1, 13, False, 12),
    (63, 1, 63, True, 62),
]
FOUND_HITS = [
    # prompt, full chunks before, tokens of the partial chunk, chunks, sync, hit
    (200, 3, 5, 4, False, 197),
    (200, 3, 5, 4, True, 197),
    (200, 3, 5, 3, False, 192),  # the partial chunk is not to be had
    (500, 1, 10, 2, False, 74),  # in the middle of the prompt
    (65, 0, 63, 1, True, 63),
    (64, 0, 63, 1, True, 63),
    (63, 0, 62, 1, False, 62),
]


@pytest.mark.parametrize(("token_count", "chunk_count", "request_tokens", "sync", "hit"), HITS)
@pytest.mark.parametrize("partial", [False, True])
def test_full_chunks_are_offered_to_their_last_token(
    token_count: int, chunk_count: int, request_tokens: int, sync: bool, hit: int, partial: bool
) -> None:
    prompt = prompt_of(token_count, partial=partial)
    assert prompt.lookup.hit_tokens(chunk_count, request_tokens, sync=sync) == hit


@pytest.mark.parametrize(("token_count", "chunk_count", "request_tokens", "sync", "hit"), PARTIAL_HITS)
def test_the_prompts_own_partial_chunk_is_offered_to_its_last_token(
    token_count: int, chunk_count: int, request_tokens: int, sync: bool, hit: int
) -> None:
    prompt = prompt_of(token_count, partial=True)
    assert prompt.lookup.hit_tokens(chunk_count, request_tokens, sync=sync) == hit


@pytest.mark.parametrize(("token_count", "index", "rest", "chunk_count", "sync", "hit"), FOUND_HITS)
@pytest.mark.parametrize("partial", [False, True])
def test_a_partial_chunk_of_another_prompt_is_offered_to_its_last_token(
    token_count: int, index: int, rest: int, chunk_count: int, sync: bool, hit: int, partial: bool
) -> None:
    prompt = prompt_of(token_count, partial=partial)
    answer(prompt, index + 1, 0, partial_chunk(index, rest))
    assert prompt.lookup.hit_tokens(chunk_count, token_count, sync=sync) == hit


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_an_offer_is_always_one_that_vllm_takes(sync: bool, partial: bool) -> None:
    for token_count in range(1, 260):
        prompt = prompt_of(token_count, partial=partial)
        for chunk_count in range(len(prompt.keys) + 1):
            for request_tokens in (token_count, token_count + 1, token_count + 40):
                hit = prompt.lookup.hit_tokens(chunk_count, request_tokens, sync=sync)
                assert 0 <= hit <= prompt.tokens_in(chunk_count) <= token_count
                assert hit < request_tokens or not sync


def test_keys_are_those_of_the_tokens_and_the_partial_one_comes_last() -> None:
    tokens = as_tokens(range(200))
    assert prompt_of(200).keys == chunk_keys(tokens, ROOT, CHUNK)
    assert prompt_of(200, partial=True).keys == chunk_keys(tokens, ROOT, CHUNK, partial=True)
    assert len(prompt_of(200, partial=True).keys) == 4
    assert prompt_of(192, partial=True).keys == prompt_of(192).keys
    assert prompt_of(5).keys == []


def test_decoded_tokens_get_keys_once_they_fill_a_chunk() -> None:
    tokens = list(range(100))
    prompt = growing(tokens)
    assert prompt.keys_up_to(2) == 1
    tokens += range(100, 127)
    assert prompt.keys_up_to(2) == 1
    tokens.append(127)
    assert prompt.keys_up_to(2) == 2
    assert prompt.chain.keys == chunk_keys(as_tokens(range(128)), ROOT, CHUNK)
    assert len(prompt.keys) == 1, "lookups name the prompt only"
    assert prompt.keys_up_to(1) == 1


def test_what_the_node_holds_needs_no_storing() -> None:
    prompt = prompt_of(200, partial=True)
    assert prompt.unstored_count == 3
    prompt.mark_held(2)
    assert (prompt.store.stored_count, prompt.store.partial_is_stored, prompt.unstored_count) == (2, False, 1)
    prompt.mark_held(1)
    assert prompt.store.stored_count == 2
    prompt.mark_held(4)
    assert (prompt.store.stored_count, prompt.store.partial_is_stored, prompt.unstored_count) == (3, True, 0)


def test_a_found_partial_chunk_stores_nothing_of_the_prompt_but_the_chunks_before_it() -> None:
    prompt = prompt_of(200, partial=True)
    chunk = partial_chunk(3, 5)
    answer(prompt, 4, 0, chunk)
    assert (prompt.store.stored_count, prompt.store.partial_is_stored, prompt.unstored_count) == (3, False, 0)
    assert prompt.lookup.hit_keys == [*prompt.keys[:3], chunk.key]
    assert prompt.store.partials == {}, "with a longer chunk, whose tokens behind these five are others"
    prompt.mark_held(4)
    assert not prompt.store.partial_is_stored, "four chunks of the hit, not of the prompt"
    exact = PartialChunk(key=prompt.key_behind(3, 5), index=3, token_count=5)
    answer(prompt, 4, 0, exact)
    assert (prompt.store.partials, prompt.store.partial_is_stored) == ({3: exact.key}, False)


def test_a_longer_chunk_that_begins_as_the_prompt_ends_stands_for_the_end_of_the_prompt() -> None:
    prompt = prompt_of(200, partial=True)
    answer(prompt, 4, 0, partial_chunk(3, 8))
    assert (prompt.store.stored_count, prompt.store.partial_is_stored, prompt.store.partials) == (3, True, {})
    assert prompt.lookup.hit_tokens(4, 200, sync=False) == 200


def test_the_next_answer_replaces_a_found_partial_chunk() -> None:
    prompt = prompt_of(200, partial=True)
    answer(prompt, 4, 0, partial_chunk(3, 5))
    answer(prompt, 4)
    assert (prompt.lookup.hit_tokens(4, 200, sync=False), prompt.lookup.hit_keys) == (200, prompt.keys)
    assert (prompt.store.partial_is_stored, prompt.store.partials) == (True, {3: prompt.partial_key})


def test_the_key_of_decoded_tokens_is_that_of_a_prompt_with_them() -> None:
    tokens = list(range(100))
    prompt = growing(tokens)
    tokens += range(100, 150)
    assert prompt.keys_up_to(2) == 2
    assert prompt.key_behind(2, 22) == chunk_keys(as_tokens(range(150)), ROOT, CHUNK, partial=True)[-1]
    assert prompt.key_behind(0, 10) == chunk_keys(as_tokens(range(10)), ROOT, CHUNK, partial=True)[-1]


def test_decoded_chunks_do_not_count_as_unstored() -> None:
    prompt = prompt_of(64)
    prompt.mark_held(1)
    prompt.store.stored_count = 3
    assert prompt.unstored_count == 0


def test_an_answer_with_anything_in_it_is_found() -> None:
    for own, peer in ((1, 0), (0, 2), (1, 2)):
        answer(prompt := prompt_of(200), own, peer)
        lookup = prompt.lookup
        assert (lookup.state, lookup.lookup_id) == (LookupState.FOUND, "1")
        assert (len(lookup.chunks), lookup.absent_count, lookup.found_at) == (own, peer, 5.0)
        assert lookup.peer_id == ("other" if peer else "")
        assert prompt.store.stored_count == own


def test_an_answer_with_nothing_in_it_is_over() -> None:
    answer(prompt := prompt_of(200), 0)
    assert prompt.lookup.state is LookupState.OVER


def test_over_forgets_what_was_held() -> None:
    answer(prompt := prompt_of(200), 2, 1)
    prompt.lookup.end()
    assert (prompt.lookup.state, prompt.lookup.chunks, prompt.lookup.absent_count) == (LookupState.OVER, [], 0)
    assert prompt.store.stored_count == 2, "what was held a moment ago need not be stored again"
