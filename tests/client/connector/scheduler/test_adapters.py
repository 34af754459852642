"""Requests of a LoRA adapter whose files change: KV is used only if its keys name what it was computed with."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from lmkv_client.file_digests import Stamp
from tests.client.connector.scheduler.serving import COLD, HIT, PROMPT, MakeEngine, forget_pages
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK
from tests.waiting import wait_until


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The folder of an adapter."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return tmp_path


def train(adapter: Path) -> None:
    """Another training run replaces the adapter's files."""
    weights = adapter / "adapter_model.safetensors"
    changed = Stamp.of(weights).ctime_ns
    wait_until(lambda: time.time_ns() > changed + 20_000_000, "the clock of the file system has ticked")
    weights.write_bytes(b"2")


def with_adapter(engine: SimulatedEngine, adapter: Path, request_id: str, *, number: int = 1, output: int = 2) -> int:
    """Answers the prompt, and says how many tokens had to be computed."""
    add(engine, adapter, request_id, number=number, output=output)
    engine.run(request_id)
    return engine.scheduled_tokens[request_id]


def add(engine: SimulatedEngine, adapter: Path, request_id: str, *, number: int = 1, output: int = 2) -> None:
    engine.node.on_commit = lambda *_: None  # a check that knows keys without adapters only
    engine.add(request_id, PROMPT, output=output, lora_request=LoRARequest("tuned", number, str(adapter)))


def test_a_prompt_of_an_adapter_is_found_again_with_this_adapter_only(make_engine: MakeEngine, adapter: Path) -> None:
    engine = make_engine()
    assert with_adapter(engine, adapter, "a") == COLD
    forget_pages(engine)
    assert with_adapter(engine, adapter, "b") == HIT
    forget_pages(engine)
    assert engine.serve("c", PROMPT) == COLD
    engine.check_nothing_is_left()


def test_once_the_files_have_changed_nothing_is_loaded_or_stored(make_engine: MakeEngine, adapter: Path) -> None:
    engine = make_engine()
    assert with_adapter(engine, adapter, "a") == COLD
    train(adapter)
    before = len(engine.node.commits)
    forget_pages(engine)
    assert with_adapter(engine, adapter, "b") == COLD
    assert len(engine.node.commits) == before
    forget_pages(engine)
    engine.side.pages_cleared()
    assert with_adapter(engine, adapter, "c", number=2) == COLD
    assert len(engine.node.commits) == before + len(PROMPT) // CHUNK
    forget_pages(engine)
    assert with_adapter(engine, adapter, "d", number=2) == HIT
    engine.check_nothing_is_left()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_what_was_computed_while_the_files_changed_is_not_committed(
    make_engine: MakeEngine, adapter: Path, steps: int
) -> None:
    """vLLM may have dropped the adapter and read it again."""
    engine = make_engine(step_tokens=CHUNK)
    add(engine, adapter, "a", output=3 * CHUNK)
    for _ in range(steps):
        engine.step()
    before = len(engine.node.commits)

    def change() -> None:
        train(adapter)
        engine.during_step = lambda: None

    engine.during_step = change
    engine.run("a")
    assert len(engine.node.commits) == before
    engine.check_nothing_is_left()


def test_what_an_adapter_had_computed_before_it_was_loaded_in_place_is_not_continued(
    make_engine: MakeEngine, adapter: Path
) -> None:
    """vLLM does not drop the pages of the earlier weights."""
    engine = make_engine()
    with_adapter(engine, adapter, "a")
    train(adapter)
    engine.side.adapters.loading(LoRARequest("tuned", 1, str(adapter), load_inplace=True))
    before = len(engine.node.commits)
    assert with_adapter(engine, adapter, "b") < COLD, "vLLM takes its pages for those of the new weights"
    assert len(engine.node.commits) == before
    forget_pages(engine)
    engine.side.pages_cleared()
    assert with_adapter(engine, adapter, "c") == COLD
    assert len(engine.node.commits) > before
    engine.check_nothing_is_left()


def test_a_request_that_waits_while_the_adapter_changes_loads_nothing(make_engine: MakeEngine, adapter: Path) -> None:
    engine = make_engine()
    with_adapter(engine, adapter, "a")
    forget_pages(engine)
    add(engine, adapter, "b")
    train(adapter)
    engine.run("b")
    assert engine.scheduled_tokens["b"] == COLD
    engine.check_nothing_is_left()
