"""What identifies an engine's weights, adapters and names, and which heads each rank has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from lmkv_client.connector.identity import HeadShare, lora_identity, model_identity, served_names
from lmkv_client.model_identity import SAMPLE_BYTES, folder_digest
from tests.client.connector.conftest import make_vllm_config


def test_all_names_of_a_model_are_known_the_first_of_them_first(tiny_model: Path) -> None:
    assert served_names(make_vllm_config(tiny_model, served_model_name=["one", "two"]).model_config) == ["one", "two"]
    assert served_names(make_vllm_config(tiny_model, served_model_name="one").model_config) == ["one"]
    assert served_names(make_vllm_config(tiny_model).model_config) == [str(tiny_model)]


@pytest.mark.parametrize(
    ("ranks", "heads", "shares"),
    [
        (1, 8, [(0, True)]),
        (2, 8, [(0, True), (4, True)]),
        (4, 2, [(0, True), (0, False), (1, True), (1, False)]),
        (2, 1, [(0, True), (0, False)]),
    ],
    ids=["one rank", "two ranks", "more ranks than heads", "one latent for all"],
)
def test_every_rank_has_its_heads_and_each_head_one_rank_that_stores_it(
    ranks: int, heads: int, shares: list[tuple[int, bool]]
) -> None:
    found = [HeadShare.of_rank(rank, ranks, heads) for rank in range(ranks)]
    assert [(share.first_head, share.is_writer) for share in found] == shares


def test_the_identity_of_a_model_never_changes(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in keys: after an update, engines would not find what they have stored before."""
    model = make_vllm_config(tiny_model).model_config
    monkeypatch.setattr(type(model.hf_config), "to_dict", lambda self: {"hidden_size": 64, "_name_or_path": "here"})
    assert model_identity(model) == "fda7d7c6ad3c0b35cb0e01ceccf67cf5"


def test_the_identity_does_not_depend_on_where_the_model_is(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    first, second = (model_identity(make_vllm_config(folder).model_config) for folder in (tiny_model, copy))
    assert first == second


# ---- digests of folders


def weights(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_bytes(content)
    return folder


LARGE = bytes(range(256)) * (16 * SAMPLE_BYTES // 256)

Change = Callable[[Path], object]


def flip(at: int) -> Change:
    def change(folder: Path) -> None:
        content = bytearray(LARGE)
        content[at] ^= 1
        (folder / "model.safetensors").write_bytes(content)

    return change


def test_equal_folders_have_equal_digests(tmp_path: Path) -> None:
    one = weights(tmp_path / "one", model_safetensors=LARGE, config_json=b"{}")
    two = weights(tmp_path / "two", model_safetensors=LARGE, config_json=b"other")
    assert folder_digest(one) == folder_digest(two), "only weights count here"


@pytest.mark.parametrize(
    "change",
    [
        flip(0),
        flip(len(LARGE) // 2),
        flip(len(LARGE) - 1),
        lambda folder: (folder / "model.safetensors").write_bytes(LARGE + b"1"),
        lambda folder: (folder / "extra.safetensors").write_bytes(b"1"),
        lambda folder: (folder / "model.safetensors").rename(folder / "renamed.safetensors"),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_folders_that_differ_have_different_digests(tmp_path: Path, change: Change) -> None:
    one = weights(tmp_path / "one", model_safetensors=LARGE)
    two = weights(tmp_path / "two", model_safetensors=LARGE)
    change(two)
    assert folder_digest(one) != folder_digest(two)


def test_an_empty_weight_file_has_a_digest(tmp_path: Path) -> None:
    one = weights(tmp_path / "one", model_safetensors=b"")
    two = weights(tmp_path / "two", model_safetensors=b"1")
    assert folder_digest(one) != folder_digest(two)


def test_two_adapters_of_one_name_are_not_the_same(tmp_path: Path) -> None:
    one = weights(tmp_path / "one", adapter_safetensors=b"1")
    same = weights(tmp_path / "same", adapter_safetensors=b"1")
    two = weights(tmp_path / "two", adapter_safetensors=b"2")
    names = [lora_identity(LoRARequest("adapter", 1, str(folder))) for folder in (one, same, two)]
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("adapter@") for name in names)


def test_adapters_of_other_names_are_not_the_same(tmp_path: Path) -> None:
    folder = str(weights(tmp_path / "one", adapter_safetensors=b"1"))
    assert lora_identity(LoRARequest("a", 1, folder)) != lora_identity(LoRARequest("b", 1, folder))


def test_an_adapter_from_a_hub_goes_by_its_path() -> None:
    names = {lora_identity(LoRARequest("a", 1, path)) for path in ("org/one", "org/two")}
    assert len(names) == 2


def test_an_adapter_that_was_replaced_in_place_is_another(tmp_path: Path) -> None:
    folder = weights(tmp_path / "one", adapter_safetensors=b"1")
    before = lora_identity(LoRARequest("a", 1, str(folder)))
    (folder / "adapter.safetensors").write_bytes(b"22")
    assert lora_identity(LoRARequest("a", 1, str(folder))) != before
