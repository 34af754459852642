"""Loads return what was stored, and only to clients that may have it.

`owner` starts the node, all others attach to it too: `checker` and `halting-checker` verify what they load, the latter
synchronously, and the former applies adapters in part; `stranger` has another cluster secret; `writer` and `reader`
have vLLM's roles of that kind.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.engines.llm import LlmFleet, LlmProcess, Nursery, auditing, poison
from tests.support.models import make_adapter

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """All engines, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs")) as fleet:
        shared = {"node_address": str(fleet.runtime_dir / "owner" / "engine.sock")}
        fleet.add("owner", {"cluster_secret": "one"}, enable_lora=True, max_lora_rank=8)
        fleet.start()
        fleet.add("stranger", shared | {"cluster_secret": "another"})
        shared["cluster_secret"] = "one"
        partly: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["o_proj"]}
        fleet.add("checker", shared | {"verify_loads": "true"}, **partly)
        fleet.add("halting-checker", shared | {"verify_loads": "true", "enable_async_loading": "false"})
        for name, role in (("writer", "kv_producer"), ("reader", "kv_consumer")):
            fleet.add(name, shared, transfer_config={"kv_connector": "LMKVConnector", "kv_role": role})
        fleet.start()
        yield fleet


@pytest.fixture(scope="module")
def owner(fleet: LlmFleet) -> LlmProcess:
    """The engine of most tests."""
    return fleet.engines["owner"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters of equal shape."""
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / str(seed), seed) for seed in (1, 2)]


def test_changed_bytes_in_the_pool_change_the_completion(fleet: LlmFleet, owner: LlmProcess, prompt: list[int]) -> None:
    expected = owner.ask(prompt).token_ids
    poison(fleet.node_pid("owner"))
    poisoned = owner.ask_again(prompt)
    poison(fleet.node_pid("owner"))  # negative twice is as it was
    assert poisoned.loaded_tokens == 768
    assert poisoned.token_ids != expected, "what was loaded is not what was computed with"
    assert owner.ask_again(prompt).token_ids == expected


def test_engines_that_attach_to_one_node_share_what_it_holds(
    fleet: LlmFleet, owner: LlmProcess, prompt: list[int]
) -> None:
    expected = owner.ask(prompt).token_ids
    answers = fleet.engines["checker"].ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.stored_tokens) == (expected, 768, 0)


@pytest.mark.parametrize("name", ["checker", "halting-checker"])
def test_an_engine_that_verifies_computes_what_is_damaged(
    fleet: LlmFleet, owner: LlmProcess, prompt: list[int], name: str
) -> None:
    expected = owner.ask(prompt).token_ids
    checker = fleet.engines[name]
    poison(fleet.node_pid("owner"))
    answers = checker.ask(prompt)
    poison(fleet.node_pid("owner"))
    assert (answers.token_ids, answers.loaded_tokens) == (expected, 0)
    assert answers.grown["lmkv:load_failures_total"] == 1, answers.grown
    checker.forget()
    assert checker.ask(prompt).token_ids == expected
    again = checker.ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens) == (expected, 768), "good chunks have replaced the damaged ones"


def test_an_engine_with_another_cluster_secret_finds_nothing(
    fleet: LlmFleet, owner: LlmProcess, prompt: list[int]
) -> None:
    expected = owner.ask(prompt).token_ids
    stranger = fleet.engines["stranger"]
    first = stranger.ask(prompt)
    assert (first.token_ids, first.cached_tokens, first.stored_tokens) == (expected, 0, 768)
    assert stranger.ask_again(prompt).loaded_tokens == 768, "its own chunks are there"


def test_an_engine_that_only_produces_does_not_load_and_one_that_only_consumes_does_not_store(
    fleet: LlmFleet, prompt: list[int]
) -> None:
    writer, reader = fleet.engines["writer"], fleet.engines["reader"]
    unstored = reader.ask(prompt)
    assert (unstored.cached_tokens, unstored.stored_tokens) == (0, 0)
    stored = writer.ask(prompt)
    assert (stored.token_ids, stored.stored_tokens) == (unstored.token_ids, 768)
    assert writer.ask_again(prompt).cached_tokens == 0
    loaded = reader.ask_again(prompt)
    assert (loaded.token_ids, loaded.loaded_tokens) == (unstored.token_ids, 768)


def test_prompts_under_different_salts_are_different_prompts(owner: LlmProcess, prompt: list[int]) -> None:
    expected = owner.ask(prompt).token_ids
    for salt in ("tenant-1", "tenant-2"):
        first = owner.ask_again(prompt, salt=salt)
        assert (first.token_ids, first.cached_tokens, first.stored_tokens) == (expected, 0, 768)
        again = owner.ask_again(prompt, salt=salt)
        assert (again.token_ids, again.loaded_tokens) == (expected, 768)


def test_prompts_under_different_adapters_are_different_prompts(
    owner: LlmProcess, adapters: list[Path], prompt: list[int]
) -> None:
    completions = [owner.ask(prompt).token_ids]
    for number, adapter in enumerate(adapters, 1):
        lora = ("adapter", str(number), str(adapter))  # of one name, as after a new training run
        first = owner.ask_again(prompt, lora=lora)
        assert (first.cached_tokens, first.stored_tokens) == (0, 768)
        again = owner.ask_again(prompt, lora=lora)
        assert (again.token_ids, again.loaded_tokens) == (first.token_ids, 768)
        completions.append(first.token_ids)
    assert len({completion[0] for completion in completions}) == 3, "the adapters make no difference"
    assert owner.ask_again(prompt).token_ids == completions[0]


def test_prompts_with_salts_and_adapters_are_audited(
    owner: LlmProcess, adapters: list[Path], prompt: list[int]
) -> None:
    lora = ("audited", "51", str(adapters[0]))
    options: list[dict[str, Any]] = [{"salt": "tenant"}, {"lora": lora}, {"lora": lora, "salt": "tenant"}]
    for number, option in enumerate(options):
        owner.ask(prompt, **option)
        assert owner.ask_again(prompt, **option, **auditing(f"isolated {number}")).audited_chunks == {"equal": 3}


def test_adapters_that_differ_in_their_scale_only_are_different(
    owner: LlmProcess, tmp_path: Path, prompt: list[int]
) -> None:
    completions = []
    for number, alpha in ((11, 16), (12, 64)):
        lora = ("scaled", str(number), str(make_adapter(tmp_path / str(alpha), 1, alpha)))
        first = owner.ask_again(prompt, lora=lora)
        assert (first.cached_tokens, first.stored_tokens) == (0, 768)
        completions.append(first.token_ids)
    assert completions[0] != completions[1], "the scale makes no difference"


def test_an_adapter_of_which_an_engine_applies_a_part_is_another_one_there(
    fleet: LlmFleet, owner: LlmProcess, tmp_path: Path, prompt: list[int]
) -> None:
    """`lora_target_modules` leaves nothing of this adapter."""
    lora = ("partly", "41", str(make_adapter(tmp_path / "adapter", 1)))
    whole = owner.ask_again(prompt, lora=lora)
    assert (whole.cached_tokens, whole.stored_tokens) == (0, 768)
    checker = fleet.engines["checker"]
    right = checker.compute(prompt)
    assert whole.token_ids != right, "the adapter makes no difference"
    partly = checker.ask_again(prompt, lora=lora)
    assert (partly.token_ids, partly.cached_tokens, partly.stored_tokens) == (right, 0, 768)
    again = checker.ask_again(prompt, lora=lora)
    assert (again.token_ids, again.loaded_tokens) == (right, 768)


def test_an_adapter_is_what_the_engine_has_loaded_and_not_what_is_on_the_disk(
    owner: LlmProcess, tmp_path: Path, prompt: list[int]
) -> None:
    folder = make_adapter(tmp_path / "adapter", 1)
    lora = ("replaced", "21", str(folder))
    old = owner.ask_again(prompt, lora=lora).token_ids
    shutil.copytree(make_adapter(tmp_path / "new", 2), folder, dirs_exist_ok=True)
    unknown = owner.ask_again(prompt, lora=lora)
    assert (unknown.token_ids, unknown.cached_tokens, unknown.stored_tokens) == (old, 0, 0)
    lora = ("replaced", "22", str(folder))  # the new files
    first = owner.ask_again(prompt, lora=lora)
    assert (first.cached_tokens, first.stored_tokens) == (0, 768)
    assert first.token_ids != old
    again = owner.ask_again(prompt, lora=lora)
    assert (again.token_ids, again.loaded_tokens) == (first.token_ids, 768)


def test_an_adapter_in_the_home_folder_is_what_its_files_are(
    owner: LlmProcess, tmp_path: Path, prompt: list[int]
) -> None:
    """vLLM resolves `~`."""
    completions = []
    with TemporaryDirectory(prefix="lmkv-test-", dir=Path.home()) as home:
        folder = Path(home)
        for number, seed in ((31, 1), (32, 2)):
            shutil.copytree(make_adapter(tmp_path / str(seed), seed), folder, dirs_exist_ok=True)
            lora = ("at-home", str(number), f"~/{folder.name}")
            first = owner.ask_again(prompt, lora=lora)
            assert (first.cached_tokens, first.stored_tokens) == (0, 768)
            again = owner.ask_again(prompt, lora=lora)
            assert (again.token_ids, again.loaded_tokens) == (first.token_ids, 768)
            completions.append(first.token_ids)
    assert completions[0] != completions[1]


def test_a_reset_of_vllms_cache_alone_leaves_ours_and_one_with_the_connector_does_not(
    owner: LlmProcess, prompt: list[int]
) -> None:
    expected = owner.ask(prompt).token_ids
    assert owner.ask_again(prompt).loaded_tokens == 768
    owner.forget(external=True)
    answers = owner.ask(prompt)
    assert (answers.token_ids, answers.cached_tokens, answers.stored_tokens) == (expected, 0, 768)
    assert owner.ask_again(prompt).loaded_tokens == 768
