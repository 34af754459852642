"""Every variable and option of vLLM that may change KV is in its identity, refused, or harmless for a reason.

As `test_every_field.py`, whose tables have what requests, models and caches consist of.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from vllm import config as configs
from vllm import envs
from vllm.config.compilation import PassConfig

from lmkv_client.connector.identity import ADAPTED_BY, AITER, OPTIONS, VARIABLES, changed_modes
from tests.client.connector.conftest import make_vllm_config
from tests.client.connector.test_every_field import KEYED


def of_one_kind(reason: str, names: str) -> dict[str, str]:
    """A table of names that have one reason."""
    return dict.fromkeys(names.split(), reason)


HARMLESS_VARIABLES = {
    "of building and installing": (
        "CMAKE_BUILD_TYPE CUDA_HOME MAX_JOBS NVCC_THREADS VERBOSE VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE "
        "VLLM_BUILD_URL VLLM_DOCKER_BUILD_CONTEXT VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION "
        "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_TARGET_DEVICE VLLM_USE_PRECOMPILED "
        "VLLM_USE_PRECOMPILED_RUST"
    ),
    "logs, metrics and traces": (
        "FORCE_COLOR NO_COLOR VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_DUMP_PATH "
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_DISABLE_LOG_LOGO "
        "VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH "
        "VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL "
        "VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_MOONCAKE_STORE_TIER_LOG VLLM_NO_USAGE_STATS "
        "VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PATTERN_MATCH_DEBUG VLLM_PROCESS_NAME_PREFIX "
        "VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_REQUEST_BODY_LOG_LEVEL VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE "
        "VLLM_USAGE_STATS_SERVER"
    ),
    "where libraries and caches of compiled code are": (
        "LD_LIBRARY_PATH VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CACHE_ROOT "
        "VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH "
        "VLLM_DISABLE_COMPILE_CACHE VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR "
        "VLLM_HAS_FLASHINFER_CUBIN VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_TUNED_CONFIG_FOLDER "
        "VLLM_XLA_CACHE_PATH"
    ),
    "processes, devices, addresses, and how they reach each other": (
        "CUDA_VISIBLE_DEVICES LOCAL_RANK VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_DISABLE_PYNCCL "
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL "
        "VLLM_DP_SIZE VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH "
        "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_GPU_NIC_PCIE_MAPPING VLLM_HOST_IP VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
        "VLLM_LOOPBACK_IP VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NIC_SELECTION_VARS "
        "VLLM_PORT VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS "
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS "
        "VLLM_RPC_BASE_PATH VLLM_SKIP_P2P_CHECK VLLM_TPU_USING_PATHWAYS VLLM_USE_NCCL_SYMM_MEM "
        "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM "
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_SPINLOOP_EXT "
        "VLLM_WORKER_MULTIPROC_METHOD"
    ),
    "sizes and times": (
        "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU "
        "VLLM_CPU_OMP_THREADS_BIND VLLM_DBO_COMM_SMS VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_ENABLE_STARTUP_PLAN "
        "VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS "
        "VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE "
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_SPARSE_INDEXER_MAX_LOGITS_MB "
        "VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS "
        "VLLM_XGRAMMAR_CACHE_MB"
    ),
    "of the HTTP API: which requests it admits, and what it makes of answers": (
        "VLLM_API_KEY VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENABLE_COHERE_API "
        "VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_HTTP_MAX_REQUEST_BODY_SIZE "
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE "
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES "
        "VLLM_MAX_STOP_STRINGS VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE "
        "VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY "
        "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND"
    ),
    "make prompts, whose tokens are in keys": (
        "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_CHAT_TEMPLATE_FUEL VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS "
        "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_SYSTEM_START_DATE VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT "
        "VLLM_USE_FASTOKENS"
    ),
    "fetch media, whose processed tensors are in keys": (
        "VLLM_AUDIO_FETCH_TIMEOUT VLLM_IMAGE_FETCH_TIMEOUT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB "
        "VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS "
        "VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB "
        "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MEDIA_CACHE "
        "VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_CONNECTOR "
        "VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS "
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_VIDEO_FETCH_TIMEOUT VLLM_VIDEO_LOADER_BACKEND"
    ),
    "find weights, which are identified": (
        "S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VLLM_ALLOW_RUNTIME_LORA_UPDATING "
        "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MODEL_REDIRECT_PATH"
    ),
    "of other connectors": (
        "MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_EC_SIDE_CHANNEL_HOST "
        "VLLM_EC_SIDE_CHANNEL_PORT VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT "
        "VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO "
        "VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT "
        "VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST "
        "VLLM_P2P_SIDE_CHANNEL_PORT VLLM_USE_SIMPLE_KV_OFFLOAD"
    ),
    "the format of vLLM's own events": "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
    "where memory comes from, and where weights are kept": (
        "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY "
        "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY"
    ),
    "graphs and compilation of the same operations": (
        "VLLM_CPU_CI_ENV VLLM_DEEP_GEMM_WARMUP VLLM_ENABLE_CUDAGRAPH_GC "
        "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE "
        "VLLM_ENABLE_PREGRAD_PASSES VLLM_FORCE_AOT_LOAD VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH "
        "VLLM_USE_BYTECODE_HOOK VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_STANDALONE_COMPILE "
        "VLLM_XLA_CHECK_RECOMPILATION VLLM_XLA_USE_SPMD"
    ),
    "another order of the same sums, or the same operations by another kernel, as on other hardware": (
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD "
        "VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_CPU_ATTN_SPLIT_KV VLLM_DISABLED_KERNELS "
        "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_DISABLE_SHARED_EXPERTS_STREAM "
        "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS "
        "VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_GDN_DECODE_KERNEL VLLM_HUMMING_MOE_GEMM_TYPE VLLM_KIMI_K3_GEMM_AR "
        "VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM "
        "VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MOE_SKIP_PADDING VLLM_MOE_USE_DEEP_GEMM "
        "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD "
        "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_REPLICATE_EMBED VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
        "VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TRITON_USE_TD VLLM_USE_DEEP_GEMM "
        "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_FUSED_MOE_GROUPED_TOPK "
        "VLLM_USE_HW_AGNOSTIC VLLM_USE_OINK_OPS VLLM_USE_TRITON_AWQ VLLM_USE_V2_MODEL_RUNNER "
        "VLLM_ZENTORCH_WEIGHT_PREPACK"
    ),
    "the same of ROCm; what quantizes besides is keyed": (
        "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_ASM_PADDING "
        "VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_PADDING "
        "VLLM_ROCM_MOE_PADDING VLLM_ROCM_MONO_DECODE VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB "
        "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB "
        "VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR "
        "VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA "
        "VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM "
        "VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA "
        "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_SKINNY_GEMM"
    ),
    "how ranks divide and exchange the same work": (
        "VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM "
        "VLLM_DCP_Q_REPLICATE VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL "
        "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_FLASHINFER_ALLREDUCE_BACKEND "
        "VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER"
    ),
    "quantizes activations before they are sent instead of afterwards": "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "of devices that lmkv refuses": (
        "VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND VLLM_XPU_PP_MICROBATCH VLLM_XPU_USE_SAMPLER_KERNEL"
    ),
    "of sampling": (
        "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS "
        "VLLM_USE_FLASHINFER_SAMPLER VLLM_V1_USE_OUTLINES_CACHE"
    ),
    "of batches that have no request": "VLLM_RANDOMIZE_DP_DUMMY_INPUTS",
    "decides whether the engine starts; max_model_len is keyed where it counts": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "which plug-ins are loaded: what one changes is for its user to name in model_id": "VLLM_PLUGINS",
    "read by vLLM's own tests only": "VLLM_TEST_FORCE_LOAD_FORMAT",
}
"""Names of variables, by the reason."""
SEEN_ELSEWHERE = {
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "kinds of the caches: parts",
    "VLLM_KV_CACHE_LAYOUT": "the order of pages in memory; copies follow strides",
    "VLLM_MLA_DISABLE": "mla, and the shape of the caches",
    "VLLM_PP_LAYER_PARTITION": "the layers of each stage: first_layer",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "refused",
    "VLLM_SSM_CONV_STATE_LAYOUT": "shapes of the states: layers of the part",
    "VLLM_USE_MODELSCOPE": "refused without model_id, unless the model is a folder",
}
"""Variables that change KV, or its form, and where lmkv sees it."""

ENGINE = {
    "model_config": KEYED + "its fields are in test_every_field.py",
    "cache_config": KEYED + "its fields are in test_every_field.py",
    "lora_config": KEYED + "its fields have a table of their own",
    "attention_config": KEYED + "its fields have a table of their own",
    "mamba_config": KEYED + "its fields have a table of their own",
    "load_config": KEYED + "its fields have a table of their own",
    "speculative_config": KEYED + "its fields have a table of their own",
    "quant_config": KEYED + "made of quantization and quantization_config",
    "diffusion_config": KEYED + "check_reuse refuses diffusion",
    "parallel_config": "divides the work; context parallelism is refused, ranks are in the parts",
    "device_config": KEYED + "other devices than cpu and cuda are refused",
    "compilation_config": "the same operations, in graphs or fused",
    "kernel_config": "the same operations by another kernel; the engines of a P/D pair often differ in it",
    "scheduler_config": "the order of requests, and the size of steps",
    "offload_config": "where weights are kept",
    "engram_config": "where embeddings are kept",
    "aux_output_config": "what else is returned",
    "ec_transfer_config": "such items have no content in the scheduler: they are not cached",
    "ec_manager_config": "a size",
    "structured_outputs_config": "of sampling",
    "watermark_config": "of sampling",
    "reasoning_config": "of sampling",
    "observability_config": "logs, metrics and traces",
    "logging_config": "logs, metrics and traces",
    "profiler_config": "logs, metrics and traces",
    "kv_transfer_config": "how lmkv itself is configured",
    "kv_events_config": "vLLM's own events",
    "additional_config": "of plug-ins: what one changes is for its user to name in model_id",
    "instance_id": "a name",
    "optimization_level": "the same operations, in graphs or fused",
    "performance_mode": "the size of steps, and graphs",
    "weight_transfer_config": "how weights come; weight_updates watches it",
    "shutdown_timeout": "a time",
    "watchdog_config": "a time, and what happens after it",
}
ATTENTION = {
    "use_non_causal": KEYED + "check_reuse refuses it",
    "indexer_kv_dtype": KEYED + "OPTIONS",
    "indexer_sparse_logits": KEYED + "OPTIONS",
    "use_prefill_query_quantization": KEYED + "OPTIONS",
    "disable_flashinfer_q_quantization": KEYED + "OPTIONS",
    "backend": "the same operations by another kernel; native tiles are of one",
    "backend_per_kind": "the same operations by another kernel; native tiles are of one",
    "minimax_m3_msa_decode_backend": "the same operations by another kernel",
    "mla_prefill_backend": "the same operations by another kernel",
    "use_trtllm_attention": "the same operations by another kernel",
    "flash_attn_version": "the same operations by another kernel",
    "sparse_mla_force_mqa": "the same operations by another kernel",
    "flash_attn_max_num_splits_for_cuda_graph": "another order of the same sums",
    "tokenspeed_mla_min_split_kv": "another order of the same sums",
    "tq_max_kv_splits_for_cuda_graph": "of TurboQuant, which check_elements refuses",
    "hisparse_config": "of another connector",
    "sparse_mla_prefill_workspace_factor": "a size",
    "trtllm_ragged_backend": "the same operations by another kernel",
    "indexer_tp_shard_min_rows": "divides the same work",
    "minimax_m3_indexer_cp": "divides the same work",
    "flex_attn_block_m": "a size of tiles",
    "flex_attn_block_n": "a size of tiles",
    "flex_attn_q_block_size": "a size of tiles",
    "flex_attn_kv_block_size": "a size of tiles",
}
MAMBA = {
    "enable_stochastic_rounding": KEYED + "OPTIONS",
    "stochastic_rounding_philox_rounds": "the quality of random numbers",
    "backend": "the same operations by another kernel",
    "ssu_algorithm": "the same operations by another kernel",
}
LORA = {
    "lora_dtype": KEYED + "ADAPTED_BY",
    "target_modules": KEYED + "ADAPTED_BY",
    "enable_tower_connector_lora": KEYED + "ADAPTED_BY",
    "enable_moe_shared_loras": KEYED + "ADAPTED_BY",
    "default_mm_loras": KEYED + "vLLM names the adapter in the request",
    "enable_mixed_moe_lora_format": "the same operations by another kernel",
    "max_lora_rank": "a size: vLLM refuses larger adapters",
    "max_loras": "a size",
    "max_cpu_loras": "a size",
    "max_lora_cls_labels": "a size, of what is made of hidden states",
    "fully_sharded_loras": "divides the same work",
    "specialize_active_lora": "graphs",
}
LOAD = {
    "load_format": KEYED + "formats that read other files are refused without model_id",
    "model_loader_extra_config": KEYED + "options that are not known to be harmless are refused without model_id",
    "download_dir": KEYED + "where the commit of a branch is looked up",
    "ignore_patterns": "of weights that exist twice; vLLM refuses a model that lacks some",
    "device": "where weights are read to",
    "pt_load_map_location": "where weights are read to",
    "safetensors_load_strategy": "how files are read",
    "safetensors_prefetch_block_size": "how files are read",
    "safetensors_prefetch_num_threads": "how files are read",
    "use_tqdm_on_load": "a progress bar",
}
DRAFTS = (
    "of drafts, which the model verifies; layers of drafts that are cached are a model of their own in the identity"
)
SPECULATIVE = {
    "draft_model_config": KEYED + "model_identity",
    "draft_load_config": KEYED + "model_identity",
    "model": KEYED + "in draft_model_config",
    "quantization": KEYED + "in draft_model_config",
    "revision": KEYED + "in draft_model_config",
    "code_revision": KEYED + "in draft_model_config",
    "kv_cache_dtype": KEYED + "the caches of the draft's layers have this dtype",
    "method": KEYED + "architecture of draft_model_config",
    "parallel_drafting": KEYED + "in the configuration of draft_model_config",
    "target_model_config": KEYED + "the model itself",
} | of_one_kind(
    DRAFTS,
    "attention_backend disable_eagle_block_drop disable_lookahead_block_hashes draft_lm_head_quantization "
    "fly_entropy_threshold fly_entropy_top_k fly_window_size xpress_topc "
    "disable_padded_drafter_batch draft_parallel_config draft_sample_method "
    "draft_tensor_parallel_size dspark_draft_topk enable_adaptive_verification enforce_eager "
    "index_share_for_mtp_iteration max_model_len moe_backend num_speculative_tokens "
    "num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min rejection_sample_method "
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth "
    "suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates target_parallel_config "
    "tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction",
)
FUSIONS = of_one_kind(
    "the same operations, fused",
    "eliminate_noops enable_qk_norm_rope_fusion fi_allreduce_fusion_max_size_mb fuse_act_padding fuse_act_quant "
    "fuse_allreduce_rms fuse_attn_quant fuse_mla_dual_rms_norm fuse_norm_quant fuse_qk_norm_rope_kvcache "
    "fuse_rope_kvcache fuse_rope_kvcache_cat_mla rope_kvcache_fusion_max_token_num enable_sp fuse_gemm_comms "
    "sp_min_token_num",
)


def test_it_is_decided_of_every_variable_whether_it_changes_kv() -> None:
    harmless = [name for names in HARMLESS_VARIABLES.values() for name in names.split()]
    decided = [*harmless, *SEEN_ELSEWHERE, *VARIABLES]
    assert len(decided) == len(set(decided)), "some are decided twice"
    unknown = sorted(set(envs.environment_variables) - set(decided))
    assert not unknown, "new: put each into VARIABLES, or write why it is harmless"


def test_what_enters_no_identity_is_what_vllm_does_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(AITER, raising=False)
    read = [name for name in VARIABLES if name == AITER or not name.startswith(AITER)]
    own = {name: envs.environment_variables[name]() for name in read if name in envs.environment_variables}
    assert own == {name: VARIABLES[name] for name in own}
    assert not set(os.environ) & set(VARIABLES)


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (configs.VllmConfig, ENGINE),
        (configs.AttentionConfig, ATTENTION),
        (configs.MambaConfig, MAMBA),
        (configs.LoRAConfig, LORA),
        (configs.LoadConfig, LOAD),
        (configs.SpeculativeConfig, SPECULATIVE),
        (PassConfig, FUSIONS),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else "",
)
def test_it_is_decided_of_every_option_whether_it_changes_kv(kind: Any, table: Mapping[str, str]) -> None:
    unknown = {one.name for one in fields(kind)} - table.keys()
    assert not unknown, f"new in {kind.__name__}: put each into the identity, refuse it, or write why it is harmless"


def test_what_the_tables_say_of_options_is_what_the_identity_reads() -> None:
    def reads(table: Mapping[str, str], where: str) -> set[str]:
        return {name for name, reason in table.items() if reason == KEYED + where}

    assert reads(ATTENTION, "OPTIONS") == set(OPTIONS["attention_config"])
    assert reads(MAMBA, "OPTIONS") == set(OPTIONS["mamba_config"])
    assert reads(LORA, "ADAPTED_BY") == set(ADAPTED_BY)


def test_variables_of_aiter_count_only_where_it_computes(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no effect without it, and other values by themselves in other versions of vLLM."""
    config = make_vllm_config(tiny_model)
    monkeypatch.setenv("VLLM_ROCM_USE_AITER_FP8BMM", "0")
    assert changed_modes(config) == []
    monkeypatch.setenv(AITER, "1")
    assert {f"{AITER}=True", "VLLM_ROCM_USE_AITER_FP8BMM=False"} <= set(changed_modes(config))
