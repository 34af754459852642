"""The models that the demo and the tests with engines run on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmkv_client.demo.model import LLAMA_VOCAB, SHAPES, TINY, ModelShape, make_model


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_equal_arguments_make_equal_models(tmp_path: Path) -> None:
    assert files_of(make_model(tmp_path / "a", TINY, 3)) == files_of(make_model(tmp_path / "b", TINY, 3))


def test_another_seed_makes_other_weights_of_the_same_shape(tmp_path: Path) -> None:
    one, other = (files_of(make_model(tmp_path / str(seed), TINY, seed)) for seed in (1, 2))
    assert one["model.safetensors"] != other["model.safetensors"]
    assert len(one["model.safetensors"]) == len(other["model.safetensors"])
    assert one["tokenizer.json"] == other["tokenizer.json"]


def test_a_finished_folder_is_kept_and_an_unfinished_one_is_recreated(tmp_path: Path) -> None:
    weights = make_model(tmp_path) / "model.safetensors"
    weights.write_bytes(b"mine")
    assert make_model(tmp_path) == tmp_path
    assert weights.read_bytes() == b"mine"
    (tmp_path / "config.json").unlink()
    make_model(tmp_path)
    assert weights.read_bytes() != b"mine"


def test_the_weights_are_what_their_header_says(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(make_model(tmp_path) / "model.safetensors")
    assert tensors["model.layers.3.self_attn.k_proj.weight"].shape == (128, 128)
    assert tensors["model.layers.0.input_layernorm.weight"].float().unique().tolist() == [1.0]
    assert tensors["lm_head.weight"].float().std().item() == pytest.approx(4 * 128**-0.5, rel=0.02)
    assert tensors["model.embed_tokens.weight"].float().mean().item() == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("name", ["tiny", "llama_vocab"])
def test_every_token_id_has_a_text_of_its_own(name: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(make_model(tmp_path, SHAPES[name]) / "tokenizer.json"))
    size = SHAPES[name].vocab_size
    texts = {tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(size)}
    assert len(texts) == size


def test_any_text_becomes_tokens_and_different_texts_different_ones(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(make_model(tmp_path) / "tokenizer.json"))
    texts = ["Hello", "hello", "Grüße, 世界 \n\t", "", "<300>", "< 300>", "<999999>"]
    encoded = [tuple(tokenizer.encode(text).ids) for text in texts]
    assert len(set(encoded)) == len(texts)
    assert encoded[4] == (300,)
    assert tokenizer.decode(list(encoded[0])) == "Hello"


def test_the_llama_vocabulary_takes_token_ids_of_llama_prompts(tmp_path: Path) -> None:
    config = json.loads((make_model(tmp_path, LLAMA_VOCAB) / "config.json").read_text())
    assert config["vocab_size"] > max([128000, 849, 21435, 279, 26431, 315, 85748, 6636, 304, 4221, 4211, 13])


def test_a_vocabulary_without_room_for_every_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 258"):
        ModelShape(
            hidden_size=64,
            intermediate_size=64,
            layer_count=1,
            head_count=1,
            kv_head_count=1,
            head_size=64,
            vocab_size=257,
        )
