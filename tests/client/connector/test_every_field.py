"""Every field of vLLM that may change KV is in its identity, refused, or harmless for a reason.

The tables have the fields of all supported versions of vLLM. A field that a new version adds fails the test until it is
decided what it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from vllm.config import CacheConfig, ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.request import Request

KEYED = "keyed: "
"""Begins the text of a field that changes keys: by what, or where it is refused."""

MODEL = {
    "model": KEYED + "digest of the weights, or name and commit",
    "model_weights": KEYED + "refused without model_id: the weights are elsewhere",
    "revision": KEYED + "the commit of a hub model",
    "code_revision": KEYED + "model_identity",
    "dtype": KEYED + "model_identity",
    "hf_config": KEYED + "model_identity, all of it but names and versions",
    "hf_text_config": KEYED + "a part of hf_config",
    "hf_config_path": KEYED
    + "the configuration that is read from there is in hf_config; its commit is not the weights'",
    "hf_overrides": KEYED + "have taken effect in hf_config",
    "max_model_len": KEYED + "model_identity, where the rotary embedding depends on it",
    "quantization": KEYED + "model_identity",
    "quantization_config": KEYED + "model_identity",
    "disable_sliding_window": KEYED + "model_identity",
    "model_class_overrides": KEYED + "model_identity",
    "model_impl": KEYED + "model_identity",
    "pooler_config": KEYED + "check_reuse refuses kinds that need the whole prompt; the others read hidden states only",
    "multimodal_config": KEYED + "its fields have a table of their own",
    "runner": "decides what is made of hidden states",
    "convert": "decides what is made of hidden states",
    "tokenizer": "keys are made of token ids",
    "tokenizer_mode": "keys are made of token ids",
    "tokenizer_revision": "keys are made of token ids",
    "skip_tokenizer_init": "keys are made of token ids",
    "trust_remote_code": "the code is among the files that are hashed, or of the commit",
    "seed": "of sampling, and of load_format dummy, which is refused without model_id",
    "is_submodel_config": "says where a configuration comes from",
    "word_embeddings_untied_by_checkpoint": "derived from the weights",
    "allowed_local_media_path": "decides which requests are admitted",
    "allowed_media_domains": "decides which requests are admitted",
    "spec_target_max_model_len": "bounds what a draft model proposes",
    "allow_deprecated_quantization": "decides whether the engine starts",
    "enforce_eager": "the same operations, without graphs",
    "return_sampling_mask": "of sampling",
    "max_logprobs": "of sampling",
    "logprobs_mode": "of sampling",
    "use_fp64_gumbel": "of sampling",
    "enable_trace_replay": "records operations",
    "disable_cascade_attn": "another order of the same sums",
    "enable_prompt_embeds": "requests with embeddings are not cached",
    "served_model_name": "a name",
    "config_format": "what is read is in hf_config",
    "hf_token": "gives access to weights, which are identified",
    "generation_config": "of sampling",
    "override_generation_config": "of sampling",
    "enable_sleep_mode": "weight_updates watches what a sleep discards",
    "sleep_preserve_parameter_names": "weight_updates watches what a sleep discards",
    "sleep_mode_backend": "where weights are kept meanwhile",
    "sleep_mode_offload_cudagraph": "where graphs are kept meanwhile",
    "enable_nccl_comm_suspend": "of communication",
    "enable_cumem_allocator": "where memory comes from",
    "logits_processors": "of sampling",
    "io_processor_plugin": "makes prompts, whose tokens and media are in keys",
    "renderer_num_workers": "a number of threads",
}
MULTIMODAL = {
    "mm_encoder_attn_dtype": KEYED + "model_identity",
    "mm_encoder_fp8_scale_path": KEYED + "refused without model_id",
    "video_pruning_rate": KEYED + "model_identity",
    "video_pruning_method": KEYED + "model_identity",
    "mm_processor_kwargs": KEYED + "have taken effect in the processed tensors, which are hashed",
    "media_io_kwargs": KEYED + "have taken effect in the processed tensors, which are hashed",
    "mm_device_do_normalize": KEYED + "has taken effect in the processed tensors, which are hashed",
    "enable_mm_embeds": KEYED + "embeddings are hashed as other content is",
    "mm_processor_cache_type": KEYED + "with shm the scheduler has no content: such prompts are not cached",
    "language_model_only": "prompts are text then",
    "limit_per_prompt": "decides which requests are admitted",
    "mm_processor_cache_gb": "a size; names of items are not in keys",
    "mm_hasher_algorithm": "of names of items, which are not in keys",
    "mm_shm_cache_max_object_size_mb": "a size",
    "mm_encoder_only": "such an engine keeps no KV cache",
    "mm_encoder_tp_mode": "divides the same work",
    "mm_encoder_attn_backend": "the same operations by another kernel",
    "mm_encoder_fp8_scale_save_path": "writes what was measured",
    "mm_encoder_fp8_scale_save_margin": "of what is written",
    "interleave_mm_strings": "makes prompts, whose tokens are in keys",
    "skip_mm_profiling": "of the start",
    "mm_tensor_ipc": "how tensors travel",
    "allow_missing_mm_embeddings": "such an item has no content in the scheduler: it is not cached",
    "mm_ipc_gpu_memory_gb": "a size",
}
CACHE = {
    "cache_dtype": KEYED + "kv_dtype of each part; check_elements refuses packed kinds",
    "kv_cache_dtype_skip_layers": KEYED + "the caches of these layers have another dtype and are a part of their own",
    "block_size": KEYED + "block_size of native tiles; elsewhere chunks have no blocks",
    "_block_size_resolved": "whether block_size is final",
    "mamba_cache_dtype": KEYED + "dtypes of the states",
    "mamba_ssm_cache_dtype": KEYED + "dtypes of the states",
    "replayssm_buffer_len": KEYED + "shapes of the states",
    "use_replayssm": KEYED + "shapes and kind of the states",
    "use_kda_recoverssm": KEYED + "shapes and kind of the states",
    "kv_sharing_fast_prefill": KEYED + "engine_identity",
    "swa_bounded_replay": KEYED + "check_reuse refuses caches that are not reusable",
    "sliding_window": KEYED + "span of the part",
    "user_specified_block_size": "says where block_size comes from",
    "user_specified_mamba_block_size": "says where mamba_block_size comes from",
    "kv_cache_layout": "the order of pages in memory; copies follow strides",
    "prefix_match_unit": "where vLLM's own hits may end",
    "gpu_memory_utilization": "a size",
    "is_attention_free": "derived from the model",
    "num_gpu_blocks_override": "a size",
    "enable_prefix_caching": "whether vLLM keeps pages itself",
    "prefix_caching_hash_algo": "of vLLM's own keys",
    "prefix_cache_retention_interval": "what vLLM keeps itself",
    "mamba_page_size_padded": "padding between pages",
    "skip_page_size_padded": "padding between pages",
    "mamba_block_size": "where states are kept; chunk_size follows hit_alignment",
    "mamba_cache_mode": "where states are kept; chunk_size follows hit_alignment",
    "enable_mamba_shared_prefix_checkpoint": "what vLLM keeps itself",
    "num_gpu_blocks": "a size",
    "simple_cpu_offload_num_blocks": "a size",
    "num_cpu_blocks": "a size",
    "effective_attention_block_size": "derived from block_size",
    "kv_cache_size_tokens": "a size",
    "kv_cache_max_concurrency": "a size",
    "hash_block_size": "of vLLM's own keys",
    "cache_hit_alignment_tokens": "where hits may end: chunk_size",
    "kv_cache_memory_bytes": "a size",
    "kv_offloading_size": "another connector's",
    "kv_offloading_backend": "another connector's",
}
LORA = {
    "lora_name": KEYED + "Adapter.identity",
    "lora_path": KEYED + "digest of the files as they were loaded",
    "lora_int_id": KEYED + "by it vLLM finds what is in memory: Adapters",
    "load_inplace": KEYED + "Adapters identify the files again",
    "is_3d_lora_weight": KEYED + "Adapter.identity",
    "tensorizer_config_dict": KEYED + "Adapters refuse it: the weights are elsewhere (vLLM 0.31)",
    "base_model_name": "a name",
}
FEATURE = {
    "data": KEYED + "content of the item",
    "modality": KEYED + "content of the item",
    "mm_position": KEYED + "place in the chunk, and which placeholders are of the item",
    "identifier": "a name that callers may choose",
    "mm_hash": "a name that callers may choose",
}
REQUEST = {
    "prompt_token_ids": KEYED + "tokens",
    "prompt_embeds": KEYED + "such a request is not cached",
    "prompt_is_token_ids": KEYED + "only together with prompt_embeds",
    "mm_features": KEYED + "their fields have a table of their own",
    "lora_request": KEYED + "its fields have a table of their own",
    "cache_salt": KEYED + "root of the keys",
    "resumable": KEYED + "such a request is not cached",
    "sampling_params": "of sampling; skip_reading_prefix_cache is respected",
    "pooling_params": "of what is made of hidden states; skip_reading_prefix_cache is respected",
    "request_id": "a name",
    "client_index": "where the answer goes",
    "arrival_time": "a time",
    "priority": "an order",
    "trace_headers": "of traces",
    "block_hasher": "of vLLM's own keys",
    "session_id": "a name; a session whose prompt grows is resumable",
    "reasoning_ended": "of sampling",
    "reasoning_parser_kwargs": "of sampling",
    "abort_immediately": "ends the request",
    "kv_hints": "what caches should do",
}
ATTENTION = {
    "block_size": KEYED + "block_size of native tiles",
    "num_kv_heads": KEYED + "kv_head_count",
    "head_size": KEYED + "head_size",
    "dtype": KEYED + "kv_dtype",
    "head_size_v": KEYED + "check_elements refuses another size than that of keys",
    "kv_quant_mode": KEYED + "kv_dtype; check_elements refuses packed kinds",
    "num_head_slots": KEYED + "check_elements refuses packed pages",
    "state_content_bytes": KEYED + "check_elements refuses packed pages",
    "tokens_per_state": KEYED + "check_elements refuses all but 1",
    "sliding_window": KEYED + "span of the part; for full attention vLLM's pages have all tokens",
    "attention_chunk_size": KEYED + "span of the part; for full attention vLLM's pages have all tokens",
    "extra_retained_tokens": KEYED + "span of the part",
    "non_causal": KEYED + "check_reuse refuses it",
    "cache_dtype_str": KEYED + "that of CacheConfig.cache_dtype: check_elements",
    "model_version": KEYED + "check_elements refuses DeepSeek V4",
    "alignment": KEYED + "of DeepSeek V4, which check_elements refuses",
    "storage_block_size": KEYED + "of DeepSeek V4, which check_elements refuses",
    "cache_role": KEYED + "layers of another role have other names: layers of the part",
    "is_draft": "whose layer it is; a draft model is in the identity",
    "topk_buffer_width": "a size of a buffer; how many tokens are chosen is in hf_config",
    "is_index_group_leader": "which layer computes an index for others",
    "non_causal_multi_token_decode": "of drafts",
    "dcp_sharded": "context parallelism is refused",
    "block_stride_alignment": "padding between pages",
    "max_tp_shards": "which ranks have copies of the same heads",
    "page_size_padded": "padding between pages",
}
STATES = {
    "shapes": KEYED + "layers of the part",
    "dtypes": KEYED + "layers of the part",
    "mamba_type": KEYED + "layers of the part",
    "tp_replicated": KEYED + "kv_head_count",
    "block_size": "where states are kept; chunk_size follows hit_alignment",
    "mamba_cache_mode": "where states are kept; chunk_size follows hit_alignment",
    "page_size_padded": "padding between pages",
    "num_speculative_blocks": "pages of drafts",
    "is_draft": "whose layer it is; a draft model is in the identity",
    "num_prefill_checkpoint_blocks": "where states are kept",
    "prefill_checkpoint_alignment": "where states are kept",
    "num_heads": "1 for all",
    "tokens_per_state": "-1 for all",
    "dcp_sharded": "context parallelism is refused",
    "block_stride_alignment": "padding between pages",
}


def names_of(kind: Any) -> set[str]:
    """The fields of a class, or what its constructor takes."""
    if kind is Request:
        return set(inspect.signature(kind.__init__).parameters) - {"self"}
    return set(kind.__struct_fields__) if kind is LoRARequest else {one.name for one in fields(kind)}


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (ModelConfig, MODEL),
        (MultiModalConfig, MULTIMODAL),
        (CacheConfig, CACHE),
        (LoRARequest, LORA),
        (MultiModalFeatureSpec, FEATURE),
        (Request, REQUEST),
        (kinds.FullAttentionSpec, ATTENTION),
        (kinds.MLAAttentionSpec, ATTENTION),
        (kinds.SlidingWindowSpec, ATTENTION),
        (kinds.ChunkedLocalAttentionSpec, ATTENTION),
        (kinds.MambaSpec, STATES),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else "",
)
def test_it_is_decided_of_every_field_whether_it_changes_kv(kind: Any, table: Mapping[str, str]) -> None:
    unknown = names_of(kind) - table.keys()
    assert not unknown, f"new in {kind.__name__}: put each into the identity, refuse it, or write why it is harmless"
    assert all(len(reason) > 5 for reason in table.values())
