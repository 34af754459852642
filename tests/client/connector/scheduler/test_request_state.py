"""What a prompt offers to vLLM, which keys it has, and what of it still needs storing."""

from __future__ import annotations

import pytest

from lmkv.keys import ChunkKey, KeyChain, as_tokens, chunk_keys
from lmkv.tiers import Run
from lmkv.v1.chunk_pb2 import Extent
from lmkv_client.connector.scheduler.hit_sources import HitSources
from lmkv_client.connector.scheduler.request_state import LookupState, RequestState

ROOT = ChunkKey(bytes(16))
CHUNK = 64
BLOCK = 32


def prompt_of(token_count: int, *, partial: bool = False) -> RequestState:
    return growing(list(range(token_count)), partial=partial)


def growing(all_tokens: list[int], *, partial: bool = False) -> RequestState:
    """A prompt whose request continues with `all_tokens`."""
    return RequestState("r", as_tokens(all_tokens), all_tokens, KeyChain(ROOT, CHUNK), partial=partial)


def extents(count: int) -> list[Extent]:
    return [Extent(offset=index, token_count=CHUNK) for index in range(count)]


HITS = [
    # prompt, chunks, request, sync, hit
    (200, 0, 200, False, 0),
    (200, 1, 200, False, 64),
    (200, 3, 200, False, 192),  # full chunks only: the rest is computed
    (192, 3, 192, False, 192),  # all of the request: vLLM computes its last token again
    (192, 3, 192, True, 160),  # a synchronous load leaves at least one token, and whole blocks
    (193, 3, 193, True, 192),
    (193, 3, 193, False, 192),
    (64, 1, 64, True, 32),
    (64, 1, 64, False, 64),
    (32, 0, 32, True, 0),
    (192, 2, 192, True, 128),
    (192, 3, 195, False, 192),  # preempted after three tokens of output
    (192, 3, 195, True, 192),
    (1, 0, 1, True, 0),
]
PARTIAL_HITS = [
    (200, 4, 200, False, 200),  # the partial chunk ends the request
    (200, 4, 201, False, 192),  # it no longer does: one token of output
    (200, 4, 200, True, 192),  # a synchronous load may not take all
    (200, 3, 200, False, 192),
    (12, 1, 12, False, 12),
    (12, 1, 12, True, 0),
    (12, 1, 13, False, 0),
    (63, 1, 63, True, 0),
]


@pytest.mark.parametrize(("token_count", "chunk_count", "request_tokens", "sync", "hit"), HITS)
@pytest.mark.parametrize("partial", [False, True])
def test_full_chunks_are_offered_in_whole_blocks(
    token_count: int, chunk_count: int, request_tokens: int, sync: bool, hit: int, partial: bool
) -> None:
    prompt = prompt_of(token_count, partial=partial)
    assert prompt.hit_tokens(chunk_count, request_tokens, BLOCK, sync=sync) == hit


@pytest.mark.parametrize(("token_count", "chunk_count", "request_tokens", "sync", "hit"), PARTIAL_HITS)
def test_a_partial_chunk_is_offered_only_where_it_ends_the_request(
    token_count: int, chunk_count: int, request_tokens: int, sync: bool, hit: int
) -> None:
    prompt = prompt_of(token_count, partial=True)
    assert prompt.hit_tokens(chunk_count, request_tokens, BLOCK, sync=sync) == hit


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_an_offer_is_always_one_that_vllm_takes(block_size: int, sync: bool, partial: bool) -> None:
    for token_count in range(1, 260):
        prompt = prompt_of(token_count, partial=partial)
        for chunk_count in range(len(prompt.keys) + 1):
            for request_tokens in (token_count, token_count + 1, token_count + 40):
                hit = prompt.hit_tokens(chunk_count, request_tokens, block_size, sync=sync)
                assert 0 <= hit <= prompt.tokens_in(chunk_count) <= token_count
                assert hit % block_size == 0 or (hit == request_tokens and not sync)
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
    assert prompt.unstored_count == 4
    prompt.mark_held(2)
    assert (prompt.stored_count, prompt.partial_is_stored, prompt.unstored_count) == (2, False, 2)
    prompt.mark_held(1)
    assert prompt.stored_count == 2
    prompt.mark_held(4)
    assert (prompt.stored_count, prompt.partial_is_stored, prompt.unstored_count) == (3, True, 0)


def test_decoded_chunks_do_not_count_as_unstored() -> None:
    prompt = prompt_of(64)
    prompt.mark_held(1)
    prompt.stored_count = 3
    assert prompt.unstored_count == 0


def test_an_answer_with_anything_in_it_is_found() -> None:
    for own, peer in ((1, 0), (0, 2), (1, 2)):
        prompt = prompt_of(200)
        prompt.lookup_state, prompt.lookup_id = LookupState.ASKED, "1"
        prompt.set_found(
            extents(own),
            HitSources(own=own, runs=(Run(tier="peers", chunk_count=peer),) if peer else ()),
            "other",
            now=5.0,
        )
        assert (prompt.lookup_state, prompt.lookup_id) == (LookupState.FOUND, "1")
        assert (len(prompt.own), prompt.absent_count, prompt.peer_id, prompt.found_at) == (own, peer, "other", 5.0)
        assert prompt.stored_count == own


def test_an_answer_with_nothing_in_it_is_over() -> None:
    prompt = prompt_of(200)
    prompt.lookup_state, prompt.lookup_id = LookupState.ASKED, "1"
    prompt.set_found([], HitSources(), "", now=5.0)
    assert (prompt.lookup_state, prompt.lookup_id) == (LookupState.OVER, "")


def test_over_forgets_what_was_held() -> None:
    prompt = prompt_of(200)
    prompt.lookup_id = "1"
    prompt.set_found(extents(2), HitSources(own=2, runs=(Run(tier="peers", chunk_count=1),)), "other", now=0.0)
    prompt.end_lookup()
    assert (prompt.lookup_state, prompt.lookup_id, prompt.own, prompt.absent_count) == (LookupState.OVER, "", [], 0)
    assert prompt.stored_count == 2, "what was held a moment ago need not be stored again"
