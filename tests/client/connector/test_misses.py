"""What clients learn of misses, and how prompts differ from earlier ones that began alike."""

from __future__ import annotations

from lmkv.keys import ChunkKey, as_tokens
from lmkv.misses import MissReason, reason_to_proto
from lmkv.v1.chunk_pb2 import PromptSpan
from lmkv_client.connector.misses import MAX_BEGINNINGS, Beginnings, spans_in_answer


def test_an_answer_has_the_spans_as_json() -> None:
    evicted = PromptSpan(reason=reason_to_proto(MissReason.EVICTED_BY_STORE), tier="own", token_count=5)
    evicted.remove_time.FromSeconds(1_700_000_000)
    assert spans_in_answer([PromptSpan(tier="disk", token_count=8), evicted]) == [
        {"token_count": 8, "tier": "disk"},
        {
            "token_count": 5,
            "tier": "own",
            "reason": "evicted_by_store",
            "remove_time": "2023-11-14T22:13:20Z",
        },
    ]


def test_an_answer_does_not_show_clients_that_there_are_other_salts() -> None:
    other = PromptSpan(reason=reason_to_proto(MissReason.OTHER_SALT), token_count=5)
    never = PromptSpan(reason=reason_to_proto(MissReason.NEVER_STORED), token_count=5)
    assert spans_in_answer([other]) == spans_in_answer([never])


def test_the_same_beginning_is_known_from_another_root_or_another_salt() -> None:
    beginnings, tokens = Beginnings(), as_tokens([1, 2, 3, 4])
    base, adapter, salted = (ChunkKey(bytes([number] * 16)) for number in range(3))
    assert beginnings.note("", tokens, b"", base) is None
    assert beginnings.note("", tokens, b"", base) is None
    assert beginnings.note("", tokens, b"", adapter) is MissReason.OTHER_NAMESPACE
    assert beginnings.note("other", tokens, b"", salted) is MissReason.OTHER_SALT
    assert beginnings.note("", tokens, b"", base) is MissReason.OTHER_NAMESPACE
    assert beginnings.note("", tokens, b"image", base) is None
    assert beginnings.note("", as_tokens([1, 2, 3]), b"", base) is None


def test_the_beginnings_that_were_noted_first_are_forgotten() -> None:
    beginnings, tokens, root = Beginnings(), as_tokens([1, 2, 3, 4]), ChunkKey(bytes(16))
    beginnings.note("", tokens, b"", root)
    for number in range(MAX_BEGINNINGS):
        beginnings.note(f"salt {number}", as_tokens([number]), b"", root)
    assert beginnings.note("other", tokens, b"", root) is None
    assert len(beginnings._salts) == len(beginnings._roots) == MAX_BEGINNINGS
