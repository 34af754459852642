"""Recompute audits of real engines find KV that is wrong although its checksum is right, and nothing else.

`exact` computes in float32 and `rounding` in bfloat16; both audit every hit. `old` has the same model with other
weights. An engine of the API attaches to their nodes, and stores wrong bytes under right keys.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lmkv_client.demo.model import TINY, make_model
from lmkv_client.engine import Engine, Written
from lmkv_server.node.audits import MIN_WRONG
from tests.engines.llm import Answers, LlmFleet, LlmProcess, Nursery, make_prompt
from tests.engines.parts import HeldItem, NodeParts
from tests.engines.test_architectures import REPRESENTATIVE
from tests.support.models import ARCHITECTURES, Architecture, make_architecture
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

CHUNK = 256
BLOCK = 128
PROMPT_TOKENS = 1000
LAST = PROMPT_TOKENS // CHUNK - 1
"""The last full chunk, which every audit computes."""
HIT_TOKENS = (LAST + 1) * CHUNK

Chunk = NDArray[Any]
"""A chunk as `[layer, head, block, keys or values, element]`, of unsigned integers."""


@pytest.fixture(scope="module")
def fleet(
    nursery: Nursery, tiny_model: Path, other_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlmFleet]:
    """All engines, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("exact", {"audit_rate": "1"})
        fleet.add("rounding", {"audit_rate": "1"}, dtype="bfloat16")
        fleet.add("old", model=other_tiny_model)
        fleet.start()
        yield fleet


class Auditor:
    """An engine that audits, and the chunks that its node has."""

    def __init__(self, fleet: LlmFleet, name: str) -> None:
        self.engine: LlmProcess = fleet.engines[name]
        self._address = str(fleet.runtime_dir / name / "engine.sock")
        self._parts = NodeParts(fleet, name)
        self.engine.ask(make_prompt(1000, CHUNK))  # now the weights are identified
        self._spec = self._parts.spec
        self._element = np.uint32 if self._spec.kv_dtype == "float32" else np.uint16

    def attached(self) -> Engine:
        """A further engine of the same spec."""
        config = {"node_address": self._address, "lookup_timeout": "5", "save_partial_chunks": "false"}
        return Engine.attach(self._spec, config=config)

    def chunks(self, prompt: Sequence[int]) -> list[Chunk]:
        """The chunks of a prompt that the engine has computed and stored."""
        self.engine.ask(prompt)
        with self.attached() as other, other.lookup(other.keys(prompt)) as held:
            shape = (self._spec.layer_count, self._spec.kv_head_count, CHUNK // BLOCK, 2, -1)
            extents = held.load(timeout=10)
            return [np.frombuffer(extent.view, self._element).reshape(shape).copy() for extent in extents]

    def held(self, prompt: Sequence[int]) -> list[HeldItem]:
        """The chunks of the prompt that its node has."""
        return self._parts.held(prompt)

    def plant(self, prompt: Sequence[int], chunk: Chunk) -> None:
        """Stores this chunk under the key of a prompt's last chunk, in the place of that one."""
        self._parts.drop(prompt, part=0)
        with self.attached() as other:
            keys = other.keys(prompt)
            (extent,) = other.reserve(1, timeout=10)
            np.frombuffer(extent.view, self._element)[:] = chunk.ravel()
            other.commit([Written(key=keys[LAST], extent=extent, parent=keys[LAST - 1])])
            assert other.missing(keys, timeout=10) == []

    def audit(self, prompt: Sequence[int]) -> Answers:
        """What the engine says to a prompt when it has no pages of it."""
        return self.engine.ask_again(prompt)


@pytest.fixture(scope="module", params=["exact", "rounding"])
def auditor(fleet: LlmFleet, request: pytest.FixtureRequest) -> Auditor:
    """An engine in each of the element types."""
    return Auditor(fleet, request.param)


def outcomes(answers: Answers) -> dict[str, int]:
    """Audited chunks by outcome, without outcomes of which there are none."""
    name = 'lmkv:audited_chunks_total{outcome="'
    grown: Mapping[str, float] = answers.grown
    return {key[len(name) : -2]: int(count) for key, count in grown.items() if key.startswith(name) and count}


def test_honest_chunks_are_equal_whatever_their_prompts(auditor: Auditor) -> None:
    """Cuts, lengths and batches differ between the first computation and the second."""
    prompts = [make_prompt(seed, length) for seed, length in enumerate((257, 513, 700, 1000, 2300, 4000))]
    for prompt in prompts:
        auditor.engine.ask(prompt)
    for _ in range(4):
        answers = [auditor.audit(prompt) for prompt in prompts]
        answers.append(auditor.engine.ask_again(*prompts))
        assert {outcome for one in answers for outcome in outcomes(one)} == {"equal"}
        assert all(sum(outcomes(one).values()) for one in answers)


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.more_models) for name in ARCHITECTURES
    ]
)
def architecture(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Architecture, LlmProcess]]:
    """A model of another kind, and an engine that audits it."""
    architecture = ARCHITECTURES[request.param]
    model = make_architecture(tmp_path_factory.mktemp("models") / request.param, request.param)
    with LlmFleet(nursery, model, tmp_path_factory.mktemp("logs")) as fleet:
        settings = {"audit_rate": "1", "chunk_size": str(architecture.chunk_size), "save_partial_chunks": "true"}
        fleet.add("auditor", settings, dtype=architecture.dtype)
        fleet.start()
        yield architecture, fleet.engines["auditor"]


def test_honest_chunks_of_every_architecture_are_equal(architecture: tuple[Architecture, LlmProcess]) -> None:
    """With ends of prompts inside chunks, and with several prompts in a batch."""
    kind, engine = architecture
    prompts = [make_prompt(seed, length) for seed, length in enumerate((kind.chunk_size + 1, 700, 1000, 2300))]
    for prompt in prompts:
        engine.ask(prompt)
    counts: Counter[str] = Counter()
    for _ in range(3):
        for answers in (*(engine.ask_again(prompt) for prompt in prompts), engine.ask_again(*prompts)):
            counts.update(outcomes(answers))
    expected = {"equal"} if kind.steps_exactly and kind.model_type != "qwen3_next" else set()
    assert set(counts) == expected, [line for line in engine.log().splitlines() if "differs from" in line]


# ---- faults


def flipped_bit(chunk: Chunk, _: Auditor, __: Sequence[int]) -> Chunk:
    """The highest bit of the exponent of one number; below 2 it becomes huge, above nearly 0."""
    chunk[1, 0, 1, 1, 40] ^= chunk.dtype.type(1 << (8 * chunk.itemsize - 2))
    return chunk


def another_prompt(_: Chunk, auditor: Auditor, __: Sequence[int]) -> Chunk:
    """KV of other tokens."""
    return auditor.chunks(make_prompt(99, PROMPT_TOKENS))[LAST]


def another_prefix(_: Chunk, auditor: Auditor, prompt: Sequence[int]) -> Chunk:
    """KV of the same tokens behind another prefix."""
    return auditor.chunks([*make_prompt(98, CHUNK), *prompt[CHUNK:]])[LAST]


def keys_as_values(chunk: Chunk, _: Auditor, __: Sequence[int]) -> Chunk:
    """Keys and values are swapped."""
    return chunk[:, :, :, ::-1].copy()


def other_heads(chunk: Chunk, _: Auditor, __: Sequence[int]) -> Chunk:
    """Each head has the KV of another one, as of a wrong rank."""
    return np.roll(chunk, 1, axis=1)


def early_page(chunk: Chunk, auditor: Auditor, _: Sequence[int]) -> Chunk:
    """The last page of the last layer was copied before it was written."""
    chunk[-1, :, 1] = auditor.chunks(make_prompt(97, PROMPT_TOKENS))[0][-1, :, 1]
    return chunk


def shifted_positions(chunk: Chunk, auditor: Auditor, prompt: Sequence[int]) -> Chunk:
    """Keys that are rotated as if they were one block further."""
    shifted = auditor.chunks([*prompt[:BLOCK], *prompt, *make_prompt(96, CHUNK)])
    chunk[:, :, 0, 0] = shifted[LAST][:, :, 1, 0]
    chunk[:, :, 1, 0] = shifted[LAST + 1][:, :, 0, 0]
    return chunk


FAULTS = (flipped_bit, another_prompt, another_prefix, keys_as_values, other_heads, early_page, shifted_positions)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_by_the_next_request(
    auditor: Auditor, prompt: list[int], fault: Callable[[Chunk, Auditor, Sequence[int]], Chunk]
) -> None:
    expected = auditor.engine.ask(prompt).token_ids
    chunks = auditor.chunks(prompt)
    wrong = fault(chunks[LAST].copy(), auditor, prompt)
    auditor.plant(prompt, wrong)
    answers = auditor.audit(prompt)
    assert outcomes(answers).get("suspect") == 1
    assert 0 < answers.cached_tokens < HIT_TOKENS
    if auditor.engine.options["dtype"] == "float32":
        assert answers.token_ids == expected


def test_one_layer_of_old_weights_is_found(fleet: LlmFleet, prompt: list[int]) -> None:
    auditor, old = Auditor(fleet, "exact"), Auditor(fleet, "old")
    chunks, others = auditor.chunks(prompt), old.chunks(prompt)
    chunks[LAST][1] = others[LAST][1]
    auditor.plant(prompt, chunks[LAST])
    assert outcomes(auditor.audit(prompt)).get("suspect") == 1


ROPE = "rope_parameters"


@pytest.fixture(params=["a parameter of the rotary embedding", "the weights"])
def confused(
    request: pytest.FixtureRequest, nursery: Nursery, tiny_model: Path, tmp_path: Path
) -> Iterator[tuple[LlmFleet, str]]:
    """Two engines of one node whose keys lack an input in which they differ, and its name in the record.

    `rotary`: the identity lacks it by a fault. `weights`: a person has given both the same `model_id`.
    """
    is_rotary = request.param.endswith("embedding")
    other = tmp_path / "other" / "tiny"
    if is_rotary:
        shutil.copytree(tiny_model, other)
        config = json.loads((other / "config.json").read_text())
        config[ROPE]["rope_theta"] = 500000.0
        (other / "config.json").write_text(json.dumps(config))
    else:
        make_model(other, TINY, seed=1)
    with LlmFleet(nursery, tiny_model, tmp_path) as fleet:
        shared = {"node_address": str(fleet.runtime_dir / "writer" / "engine.sock"), "audit_rate": "1"}
        options: dict[str, Any] = {"unnamed": [ROPE]} if is_rotary else {}
        named = {} if is_rotary else {"model_id": "mine"}
        fleet.add("writer", named, **options)
        fleet.start()
        fleet.add("reader", shared | named, model=other, **options)
        fleet.start()
        yield fleet, f"config.{ROPE}" if is_rotary else "model"


def test_an_input_that_the_keys_lack_is_found_and_named(confused: tuple[LlmFleet, str]) -> None:
    """By the first two hits: the first chunk is suspect, the second computation confirms it."""
    fleet, missing = confused
    writer, reader = fleet.engines["writer"], fleet.engines["reader"]
    prompt = make_prompt(5, PROMPT_TOKENS)
    writer.ask(prompt)
    first = reader.ask(prompt)
    assert first.cached_tokens == LAST * CHUNK, "the reader would have used it"
    assert outcomes(first) == {"suspect": 1}
    assert outcomes(reader.ask_again(prompt)).get("wrong") == 1
    log = (fleet.runtime_dir / "writer" / "node.log").read_text()
    (record,) = (line for line in log.splitlines() if "in which both engines differ" in line)
    names, differing = record.split("in its model_id, ")[1].split(". Inputs that it does not name")
    assert f" {missing} " in differing
    assert missing not in names.split(", ")
    assert "config.hidden_size" not in differing


def test_a_chunk_that_differs_twice_is_dropped_and_a_spec_with_many_of_them_is_not_served(fleet: LlmFleet) -> None:
    """The last test: the node of `exact` finds nothing afterwards."""
    auditor = Auditor(fleet, "exact")
    prompts = [make_prompt(seed, PROMPT_TOKENS) for seed in range(50, 50 + MIN_WRONG)]
    for number, prompt in enumerate(prompts):
        expected = auditor.engine.ask(prompt).token_ids
        auditor.plant(prompt, np.roll(auditor.chunks(prompt)[LAST], 1, axis=1))
        assert outcomes(auditor.audit(prompt)).get("suspect") == 1
        confirming = auditor.audit(prompt)
        assert (confirming.cached_tokens, confirming.token_ids) == (0, expected)
        assert outcomes(confirming).get("wrong") == 1
        assert "is wrong: computed twice, it differs" in auditor.engine.log()
        if number + 1 < MIN_WRONG:
            wait_until(lambda prompt=prompt: len(auditor.held(prompt)) == LAST)  # type: ignore[misc]
    wait_until(lambda: not auditor.held(prompts[0]))
    assert auditor.audit(prompts[0]).cached_tokens == 0
    wait_until(lambda: fleet.coordinator.instances()["exact"].stats.stopped_models == ["tiny"])
