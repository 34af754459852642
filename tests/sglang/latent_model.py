"""A small DeepSeek-V2 with random weights and dense layers only: its KV cache is latents (MLA)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, HEADS, VOCABULARY = 128, 256, 4, 4, 512
LATENT, ROTATED, PLAIN, VALUE = 64, 32, 32, 32
"""Elements: of the latent, and of a head's rotated keys, other keys, and values."""

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "q_lora_rank": None,
    "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": PLAIN,
    "v_head_dim": VALUE,
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": INNER,
    "moe_layer_freq": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_parameters": {  # the one rotary embedding of MLA that SGLang has on CPUs
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


def make_latent_model(folder: Path) -> Path:
    """Writes the model into `folder`, which is made, and returns it. The same bytes on every machine."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=random) * deviation if deviation else torch.ones(shape)
        for name, shape, deviation in _parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    return folder


def _parameters() -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and standard deviation of each tensor; 0 for a tensor of ones.

    Queries and keys are sharper than usual, so that every greedy token depends on the whole prompt.
    """
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), 1.0
    for layer in range(LAYERS):
        attention, block = f"model.layers.{layer}.self_attn", f"model.layers.{layer}"
        yield f"{attention}.q_proj.weight", (HEADS * (PLAIN + ROTATED), HIDDEN), 2.0 * HIDDEN**-0.5
        yield f"{attention}.kv_a_proj_with_mqa.weight", (LATENT + ROTATED, HIDDEN), 2.0 * HIDDEN**-0.5
        yield f"{attention}.kv_a_layernorm.weight", (LATENT,), 0.0
        yield f"{attention}.kv_b_proj.weight", (HEADS * (PLAIN + VALUE), LATENT), 2.0 * LATENT**-0.5
        yield f"{attention}.o_proj.weight", (HIDDEN, HEADS * VALUE), (HEADS * VALUE) ** -0.5
        yield f"{block}.mlp.gate_proj.weight", (INNER, HIDDEN), HIDDEN**-0.5
        yield f"{block}.mlp.up_proj.weight", (INNER, HIDDEN), HIDDEN**-0.5
        yield f"{block}.mlp.down_proj.weight", (HIDDEN, INNER), INNER**-0.5
        yield f"{block}.input_layernorm.weight", (HIDDEN,), 0.0
        yield f"{block}.post_attention_layernorm.weight", (HIDDEN,), 0.0
    yield "model.norm.weight", (HIDDEN,), 0.0
    yield "lm_head.weight", (VOCABULARY, HIDDEN), 4.0 * HIDDEN**-0.5
