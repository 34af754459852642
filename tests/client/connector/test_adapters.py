"""What identifies a LoRA adapter, and when it is known that vLLM has exactly this one in memory."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from lmkv_client.connector import adapters as module
from lmkv_client.connector.adapters import Adapter, Adapters
from lmkv_client.connector.identity import adapter_options
from lmkv_client.connector.vllm_api import adapter_pages
from lmkv_client.file_digests import REMEMBERED_BYTES, Stamp
from tests.waiting import wait_until

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj"]}


def adapter(folder: Path, weights: bytes = b"1", **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def request(folder: Path | str, number: int = 1, name: str = "adapter", **options: Any) -> LoRARequest:
    return LoRARequest(name, number, str(folder), **options)


def identity(folder: Path, **options: Any) -> str:
    found = Adapters(options.pop("engine", "")).of_request(request(folder, **options))
    return found.identity if found else ""


def replace(folder: Path, weights: bytes = b"2") -> None:
    """Changes the weights of an adapter in place, at a later time."""
    weights_file = folder / "adapter_model.safetensors"
    changed = Stamp.of(weights_file).ctime_ns
    wait_until(lambda: time.time_ns() > changed + 20_000_000, "the clock of the file system has ticked")
    weights_file.write_bytes(weights)


def test_equal_adapters_have_one_identity_wherever_they_are(tmp_path: Path) -> None:
    one, same = adapter(tmp_path / "one"), adapter(tmp_path / "same", base_model_name_or_path="/elsewhere")
    assert identity(one) == identity(same, number=2)
    assert identity(one).startswith("adapter@")
    assert identity(one) != identity(one, name="other")


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": 64},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"of_a_later_version": 1},
    ],
)
def test_all_of_the_configuration_that_changes_the_result_counts(tmp_path: Path, config: dict[str, Any]) -> None:
    assert identity(adapter(tmp_path / "one")) != identity(adapter(tmp_path / "other", **config))


def test_what_vllm_makes_of_an_adapter_counts(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one")
    assert (
        len({identity(folder), identity(folder, engine="of other options"), identity(folder, is_3d_lora_weight=True)})
        == 3
    )


@pytest.mark.parametrize(
    "options",
    [
        {"lora_dtype": torch.float16},
        {"target_modules": ["o_proj"]},
        {"target_modules": []},
        {"enable_tower_connector_lora": True},
        {"enable_moe_shared_loras": True},
    ],
    ids=str,
)
def test_options_of_the_engine_that_change_what_an_adapter_does_count(options: dict[str, Any]) -> None:
    assert adapter_options(LoRAConfig(**options)) != adapter_options(LoRAConfig())


def test_the_order_of_target_modules_and_sizes_do_not_count() -> None:
    one = LoRAConfig(target_modules=["q_proj", "v_proj"], max_loras=2, max_lora_rank=64)
    assert adapter_options(one) == adapter_options(LoRAConfig(target_modules=["v_proj", "q_proj"]))


def test_further_weights_count(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one")
    before = identity(folder)
    (folder / "new_embeddings.safetensors").write_bytes(b"1")
    assert identity(folder) != before


def test_paths_are_those_that_vllm_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapter(tmp_path / "home" / "one")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    expected = identity(folder)
    assert identity(Path("~/one")) == identity(Path("one")) == expected
    replace(folder)
    assert identity(Path("~/one")) == identity(Path("one")) != expected


@pytest.mark.parametrize("path", ["/not/there", "~/not/there", "not-there"])
def test_an_adapter_that_is_not_there_has_no_identity(tmp_path: Path, path: str) -> None:
    assert identity(Path(path)) == ""
    (tmp_path / "adapter_config.json").write_text("[")
    assert identity(tmp_path) == ""


def test_files_that_change_under_a_loaded_adapter_end_its_use(tmp_path: Path) -> None:
    """vLLM may have the old ones, or have dropped them and read the new ones."""
    folder, adapters = adapter(tmp_path / "one"), Adapters()
    first = adapters.of_request(request(folder))
    assert first is not None
    assert adapters.is_current(first)
    replace(folder)
    assert not adapters.is_current(first)
    assert adapters.of_request(request(folder)) is None
    replace(folder, b"1")
    assert adapters.of_request(request(folder)) is None, "what was read in between is not known"
    other = adapters.of_request(request(folder, number=2))
    assert other is not None
    assert other.identity == first.identity


Reload = Callable[[Adapters, Path], LoRARequest]


def in_place(adapters: Adapters, folder: Path) -> LoRARequest:
    adapters.loading(request(folder, load_inplace=True))
    return request(folder)


def in_place_with_each_request(adapters: Adapters, folder: Path) -> LoRARequest:
    return request(folder, load_inplace=True)


def after_removal(adapters: Adapters, folder: Path) -> LoRARequest:
    adapters.removed(1)
    return request(folder)


def under_another_number(adapters: Adapters, folder: Path) -> LoRARequest:
    return request(folder, number=2)


@pytest.mark.parametrize("reload", [in_place, in_place_with_each_request, after_removal, under_another_number])
@pytest.mark.parametrize("is_seen", [False, True])
def test_an_adapter_that_is_loaded_again_is_what_the_files_are_then(
    tmp_path: Path, reload: Reload, is_seen: bool
) -> None:
    folder, adapters = adapter(tmp_path / "one"), Adapters()
    first = adapters.of_request(request(folder))
    replace(folder)
    if is_seen:
        assert adapters.of_request(request(folder)) is None
    second = adapters.of_request(reload(adapters, folder))
    assert first is not None
    assert second is not None
    assert second.identity != first.identity
    assert reload is under_another_number or not adapters.is_current(first), "its requests run with other weights"
    assert adapters.has_stale_pages(second), "vLLM has pages of both under one name"
    adapters.pages_cleared()
    assert not adapters.has_stale_pages(second)


def test_the_identity_is_that_of_the_load_and_not_of_the_first_request(tmp_path: Path) -> None:
    folder, adapters = adapter(tmp_path / "one"), Adapters()
    adapters.loading(request(folder))
    replace(folder)
    assert adapters.of_request(request(folder)) is None


def test_a_load_that_failed_leaves_it_unknown_what_is_in_memory(tmp_path: Path) -> None:
    folder, adapters = adapter(tmp_path / "one"), Adapters()
    assert adapters.of_request(request(folder))
    replace(folder)
    adapters.loading(request(folder, load_inplace=True))
    adapters.failed(1)
    assert adapters.of_request(request(folder)) is None


def test_one_number_with_two_paths_is_not_known(tmp_path: Path) -> None:
    """vLLM keeps what it has under a number, but reads the later path if it has dropped it."""
    adapters = Adapters()
    assert adapters.of_request(request(adapter(tmp_path / "one")))
    assert adapters.of_request(request(adapter(tmp_path / "two"))) is None
    assert adapters.of_request(request(tmp_path / "one")) is None


def test_adapters_of_other_paths_share_pages_only_where_vllm_knows_them_by_name(tmp_path: Path) -> None:
    adapters = Adapters()
    one, two = request(adapter(tmp_path / "one")), request(adapter(tmp_path / "two", b"2"), number=2)
    assert adapters.of_request(one)
    second = adapters.of_request(two)
    assert second is not None
    assert adapters.has_stale_pages(second) == (adapter_pages(one) == adapter_pages(two))


def test_a_large_adapter_is_read_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where its digest is remembered
    folder, adapters = adapter(tmp_path / "one"), Adapters()
    os.truncate(folder / "adapter_model.safetensors", REMEMBERED_BYTES)
    adapters.loading(request(folder))
    wait_until(lambda: adapters.of_request(request(folder)), "the adapter has an identity")


def test_the_number_of_adapters_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS", 3)
    folder, adapters = adapter(tmp_path / "one"), Adapters()
    used = [adapters.of_request(request(folder, number=number, name=f"a-{number}")) for number in range(1, 6)]
    current = [each for each in used if isinstance(each, Adapter) and adapters.is_current(each)]
    assert [each.number for each in current] == [3, 4, 5]
    more = Adapters(kept_count=4)
    used = [more.of_request(request(folder, number=number)) for number in range(1, 6)]
    assert sum(more.is_current(each) for each in used if each) == 4, "vLLM keeps these in memory"


# ---- adapters of a hub


def publish(hub: Path, commit: str, weights: bytes) -> None:
    """Makes a commit the one that was downloaded last."""
    adapter(hub / "models--org--tuned" / "snapshots" / commit, weights)
    (hub / "models--org--tuned" / "refs").mkdir(exist_ok=True)
    (hub / "models--org--tuned" / "refs" / "main").write_text(commit)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_an_adapter_of_a_hub_is_what_was_downloaded(hub: Path) -> None:
    publish(hub, "a" * 40, b"1")
    adapters = Adapters()
    first = adapters.of_request(request("org/tuned"))
    assert first is not None
    assert first.identity == identity(hub / "models--org--tuned" / "snapshots" / ("a" * 40))
    publish(hub, "b" * 40, b"2")
    assert not adapters.is_current(first), "vLLM would read the new commit if it had dropped the old one"
    second = adapters.of_request(request("org/tuned", number=2))
    assert second is not None
    assert second.identity != first.identity


@pytest.mark.parametrize("is_updated", [False, True])
def test_an_adapter_that_is_downloaded_at_its_load_is_known_if_there_is_one_commit(hub: Path, is_updated: bool) -> None:
    adapters = Adapters()
    adapters.loading(request("org/tuned"))
    assert adapters.of_request(request("org/tuned")) is None
    publish(hub, "a" * 40, b"1")
    if is_updated:
        publish(hub, "b" * 40, b"2")
    assert (adapters.of_request(request("org/tuned")) is None) == is_updated
    adapters.removed(1)
    adapters.loading(request("org/tuned"))
    assert adapters.of_request(request("org/tuned")) is not None, "vLLM has loaded it again: what is there now"


def test_an_adapter_that_was_known_once_is_known_at_its_next_load(hub: Path) -> None:
    adapters = Adapters()
    adapters.loading(request("org/tuned"))
    publish(hub, "a" * 40, b"1")
    assert adapters.of_request(request("org/tuned")) is not None
    publish(hub, "b" * 40, b"2")
    assert adapters.of_request(request("org/tuned", load_inplace=True)) is not None


def test_a_copy_of_an_adapter_is_the_same(hub: Path, tmp_path: Path) -> None:
    publish(hub, "a" * 40, b"1")
    copy = shutil.copytree(hub / "models--org--tuned" / "snapshots" / ("a" * 40), tmp_path / "copy")
    assert identity(copy) == identity(Path("org/tuned"))
