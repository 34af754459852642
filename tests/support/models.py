"""Tiny models with random weights of every kind of KV cache that lmkv serves, for tests and benchmarks with engines.

Plain attention has a model in `lmkv_client.demo.model`; the others are made by transformers, so that their folders are
like those of real models. The scale of the weights makes every token depend on what each kind of layers has cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lmkv_client.demo.model import BOS_TOKEN_ID, EOS_TOKEN_ID, TINY, make_model, write_tokenizer

WINDOW = 192
"""Tokens of a sliding window: shorter than the prompts of tests, and no multiple of a chunk or of a block."""
LOCAL_CHUNK = 384
"""Tokens of a local chunk; vLLM wants whole blocks."""

_COMMON: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ALTERNATING = [_SLIDING, _FULL] * 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture: its configuration, and how an engine serves it on a CPU."""

    model_type: str
    config: Mapping[str, Any]
    """Fields besides the common ones, or instead of them."""
    served_as: str = ""
    """vLLM's name of the architecture, where transformers has another."""
    dtype: str = "float32"
    splits_exactly: bool = True
    """Whether vLLM computes the same wherever it splits a prompt, up to the order of sums in float32."""
    steps_exactly: bool = True
    """Whether vLLM computes the same in steps of any size; on CPUs, vLLM 0.32 does not with short convolutions."""
    chunk_size: int = 256
    part_count: int = 2
    """Kinds of layers, which are the parts of a chunk."""
    group_count: int = 2
    """Groups into which vLLM splits them."""


ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma2": Architecture(
        model_type="gemma2",
        config={"sliding_window": WINDOW, "query_pre_attn_scalar": 64, "tie_word_embeddings": True},
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        config={
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 64,
            "num_hidden_layers": 6,
            "layer_types": [_SLIDING] * 5 + [_FULL],
            "tie_word_embeddings": True,
        },
        group_count=6,
    ),
    "mistral": Architecture(model_type="mistral", config={"sliding_window": WINDOW}, part_count=1, group_count=1),
    "ministral": Architecture(
        model_type="ministral",
        config={"sliding_window": WINDOW, "layer_types": _ALTERNATING},
        served_as="MistralForCausalLM",
        chunk_size=128,
    ),
    "gpt_oss": Architecture(
        model_type="gpt_oss",
        config={
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "cohere2": Architecture(
        model_type="cohere2",
        config={"sliding_window": WINDOW, "layer_types": _ALTERNATING, "logit_scale": 1.0, "tie_word_embeddings": True},
    ),
    "llama4": Architecture(
        model_type="llama4_text",
        config={
            "attention_chunk_size": LOCAL_CHUNK,
            "intermediate_size_mlp": 256,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "layer_types": ["chunked_attention"] * 3 + [_FULL],
            "no_rope_layers": [1, 1, 1, 0],
            "attn_temperature_tuning": False,
        },
        chunk_size=128,
        group_count=4,
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        config={
            "num_attention_heads": 2,
            "layer_types": ["conv"] * 3 + [_FULL],
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
        },
        splits_exactly=False,
        steps_exactly=False,
        chunk_size=128,
        group_count=4,
    ),
    "qwen3_next": Architecture(
        model_type="qwen3_next",
        config={
            "layer_types": ["linear_attention"] * 3 + [_FULL],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
        dtype="bfloat16",
        splits_exactly=False,
        group_count=4,
    ),
    "llama": Architecture(model_type="llama", config={}, part_count=1, group_count=1),
}
"""By name: all kinds of KV cache that vLLM serves on a CPU, several of them with more than one architecture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusual:
    """A model that is not a decoder of text alone."""

    classes: str
    """Beginning of the names of its classes in transformers."""
    head: str
    """End of the name of the class of the model."""
    config: Mapping[str, Any]


PICTURE_SIZE = 56
"""Pixels of a side of a picture."""
PICTURE_TOKENS = 32
"""Tokens of a picture, which vLLM puts in front of a prompt."""
_SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_TEXT: Mapping[str, Any] = {name: _COMMON[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}

UNUSUAL: Mapping[str, Unusual] = {
    "prefix_lm": Unusual(  # a prompt's tokens attend to all of the prompt
        classes="HrmText",
        head="ForCausalLM",
        config={
            **_TEXT,
            **_SMALL,
            "hidden_size": 128,
            "head_dim": 64,
            "H_cycles": 1,
            "L_cycles": 2,
            "embedding_scale": 1.0,
        },
    ),
    "encoder": Unusual(  # no layer keeps a KV cache
        classes="Bert", head="Model", config={**_SMALL, "vocab_size": 512, "max_position_embeddings": 512}
    ),
    "encoder_decoder": Unusual(  # the decoder attends to what the encoder makes of sound
        classes="Whisper",
        head="ForConditionalGeneration",
        config={
            **_TEXT,
            "d_model": 128,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_mel_bins": 80,
            "pad_token_id": 2,
            "decoder_start_token_id": 3,
        },
    ),
    "mamba": Unusual(  # no attention
        classes="Mamba",
        head="ForCausalLM",
        config={**_TEXT, "hidden_size": 128, "state_size": 16, "num_hidden_layers": 2, "pad_token_id": 2},
    ),
    "pictures": Unusual(  # an encoder of pictures in front of a decoder
        classes="Blip2",
        head="ForConditionalGeneration",
        config={
            "vision_config": {**_SMALL, "image_size": PICTURE_SIZE, "patch_size": 14},
            "qformer_config": {
                **_SMALL,
                "vocab_size": 32,
                "encoder_hidden_size": 64,
                "cross_attention_frequency": 1,
            },
            "text_config": {
                **_TEXT,
                "model_type": "opt",
                "hidden_size": 128,
                "word_embed_proj_dim": 128,
                "num_hidden_layers": 4,
                "ffn_dim": 256,
                "num_attention_heads": 2,
                "max_position_embeddings": 2048,
                "pad_token_id": 2,
            },
            "num_query_tokens": PICTURE_TOKENS,
            "image_token_index": _COMMON["vocab_size"] - 1,
            "image_text_hidden_size": 64,
        },
    ),
}
"""Models by name that lmkv refuses, or whose prompts have more than text."""


def configuration(name: str, **changes: Any) -> dict[str, Any]:
    """The configuration of the model of this name, with these changes."""
    return {**_COMMON, **ARCHITECTURES[name].config, **changes}


def make_architecture(folder: Path, name: str, **changes: Any) -> Path:
    """Writes the model of this name with its tokenizer into `folder`, and returns `folder`.

    `changes` are other values of the configuration.
    """
    if name == "llama":
        return make_model(folder, TINY)
    architecture = ARCHITECTURES[name]
    make_decoder(folder, architecture.model_type, configuration(name, **changes), architecture.dtype)
    if architecture.served_as:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture.served_as]}))
    return folder


def make_plain(folder: Path, model_type: str, **changes: Any) -> Path:
    """Writes a model of this type whose layers all have full attention, with its tokenizer, and returns `folder`.

    `changes` are other values of the configuration.
    """
    return make_decoder(folder, model_type, {**_COMMON, **changes}, "float32")


def make_decoder(folder: Path, model_type: str, values: Mapping[str, Any], dtype: str) -> Path:
    """Writes a model of a type of transformers with random weights, and its tokenizer; returns `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **values)
    return _write(folder, lambda: AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)))


def make_unusual(folder: Path, name: str, **changes: Any) -> Path:
    """Writes the model of `UNUSUAL` of this name with its tokenizer into `folder`, and returns `folder`.

    `changes` are other values of the configuration.
    """
    import torch
    import transformers

    kind = UNUSUAL[name]
    values = {**kind.config, **changes}
    config = getattr(transformers, f"{kind.classes}Config")(**values)
    _write(folder, lambda: getattr(transformers, kind.classes + kind.head)(config).to(torch.float32))
    if kind.classes == "Whisper":
        transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    elif kind.classes == "Blip2":
        file = folder / "tokenizer.json"
        file.write_text(file.read_text().replace(f"<{_COMMON['vocab_size'] - 1}>", "<image>"))
        size = values["vision_config"]["image_size"]
        pictures = transformers.BlipImageProcessorPil(size={"height": size, "width": size})
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        transformers.Blip2Processor(pictures, tokenizer, num_query_tokens=values["num_query_tokens"]).save_pretrained(
            folder
        )
    return folder


def _write(folder: Path, make: Callable[[], Any]) -> Path:
    """Gives a model random weights, the same for every run, and writes it and its tokenizer."""
    import torch

    torch.manual_seed(0)
    model = make()
    model_type = model.config.model_type
    with torch.no_grad():
        for parameter_name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, _gain(parameter_name) * weights.shape[-1] ** -0.5)
            elif parameter_name.endswith("A_log"):
                weights.fill_(-6.0)  # states that forget slowly
            elif "post_" in parameter_name and model_type.startswith("gemma"):
                weights.fill_(3.0)  # layers that outweigh the embedding, which is that of the output too
    model.save_pretrained(folder)
    write_tokenizer(folder, _COMMON["vocab_size"], _COMMON["max_position_embeddings"])
    return folder


def _gain(name: str) -> float:
    """How much larger weights are than those that keep the size of what passes through them, as in `make_model`."""
    if "lm_head" in name:
        return 4.0
    return 2.0 if "_proj" in name else 1.0


def make_adapter(folder: Path, seed: int, alpha: int = 16) -> Path:
    """Writes a LoRA adapter with random weights for the tiny model, strong enough to change what it says."""
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": alpha, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    choose = np.random.default_rng(seed)
    tensors = {}
    for layer in range(TINY.layer_count):
        for name, heads in (("q_proj", TINY.head_count), ("v_proj", TINY.kv_head_count)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (8, TINY.hidden_size)), ("B", (heads * TINY.head_size, 8))):
                tensors[f"{prefix}.lora_{part}.weight"] = choose.standard_normal(shape, dtype=np.float32) / 10
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
