"""Every argument of SGLang that may change KV is in its identity, refused, or harmless for a reason.

A field that a new version adds fails the test until it is decided what it does.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping

import pytest
from msgspec.structs import fields
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.server_args import ServerArgs

from lmkv_client.sglang import kv_spec

IDENTITY = "identity_of"
REFUSED = "identity_of refuses it without model_id"
ADAPTERS = "adapters_identity"
SHARES = "check_shares refuses it"
ARGUMENTS: Mapping[str, str] = {
    IDENTITY: """
        model_path load_format model_loader_extra_config revision download_dir dtype quantization context_length
        json_model_override_args model_config_parser decrypted_config_file decrypted_draft_config_file model_impl
        is_embedding quantize_and_serve modelopt_quant rl_on_policy_target enable_tf32_matmul
        flashinfer_mxfp4_moe_precision enable_w4a4_mxfp4_megamoe enforce_shared_experts_fusion
        deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type enable_quant_communications kt_method
        kt_num_gpu_experts kt_max_deferred_experts_per_token enable_deepseek_v4_fp4_indexer qsa_indexer_dtype
        enable_hisparse hisparse_config quantization_param_path enable_encoder_swa_bounded_replay
        enable_decoder_swa_bounded_replay dllm_algorithm dllm_algorithm_config mm_process_config
        image_processor_backend disable_fast_image_processor enable_precise_embedding_interpolation
        speculative_draft_model_path speculative_draft_model_revision speculative_draft_load_format
        speculative_draft_model_quantization speculative_draft_kv_cache_dtype speculative_draft_window_size
        speculative_draft_sink_size speculative_enable_w4a4_mxfp4_megamoe enable_multi_layer_eagle
        attention_backend prefill_attention_backend decode_attention_backend
        """,
    REFUSED: """
        modelopt_checkpoint_restore_path rl_quant_profile weight_cache_mode kt_weight_path uno_lora_path forward_hooks
        debug_tensor_dump_input_file
        """,
    ADAPTERS: "lora_paths enable_lora lora_target_modules lora_strict_loading experts_shared_outer_loras",
    SHARES: "enable_kv_cache_sharding enable_dsa_cache_layer_split",
    "in the spec": "kv_cache_dtype page_size served_model_name",
    "ranks with other pages have other specs": "tp_size pp_size dcp_size attn_cp_size node_rank nnodes",
    "what a rank computes is divided in another way": """
        dp_size attn_dp_size moe_dp_size dwdp_size ep_size dcp_comm_backend dcp_replicate_q_proj enable_prefill_cp
        cp_strategy enable_cp_decode_attn_tp enable_dp_attention enable_dp_attention_local_control_broadcast
        enable_dp_lm_head enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered enable_shared_experts_attn_tp
        shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp disable_attn_tp_gather moe_dense_tp_size
        enable_cp_tp_group_sharing enable_scattered_sconv mm_enable_dp_encoder pp_max_micro_batch_size
        pp_async_batch_depth load_balance_method
        """,
    "which rank has which expert": """
        ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
        eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode
        elastic_ep_backend enable_elastic_expert_backup ep_join_mode ep_join_rank_offset elastic_ep_initial_size
        max_ep_size elastic_ep_scale_timeout enable_waterfill enable_paged_experts paged_experts_num_resident
        """,
    "the same operations by another kernel, or in another order": """
        enable_lean_attention enable_nvidia_megakernel enable_amd_monokernel mm_attention_backend
        fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend disable_flashinfer_autotune
        flashinfer_autotune_skip_ops cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        cuda_graph_prefill_max_context cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph
        disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph
        enable_cudagraph_gc debug_cuda_graph enable_nccl_nvls enable_symm_mem triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged
        enable_fused_qk_norm_rope enable_fused_moe_sum_all_reduce disable_custom_all_reduce enable_mscclpp
        enable_torch_symm_mem pre_warm_nccl boundary_reduction speculative_boundary_reduction
        enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode enable_torch_compile enable_torch_compile_debug_mode
        torch_compile_max_bs moe_a2a_backend deepep_v2_mode moe_runner_backend deepep_mode fuseep_mode deepep_config
        disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion enable_megamoe_for_layernorm_sp
        enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
        enable_deterministic_inference device speculative_moe_runner_backend speculative_moe_a2a_backend
        speculative_draft_attention_backend speculative_dsa_topk_backend lora_backend max_lora_chunk_size
        lora_use_virtual_experts enable_p2p_check disable_chunked_prefix_cache enable_mixed_chunk kt_cpuinfer
        kt_threadpool_count
        """,
    "of caches that are not stored: sparse indexers, states, windows in pools of their own": """
        dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
        dsa_triton_union dsv4_attn_backend enable_dsa_fused_indexer c128_page_size swa_full_tokens_ratio
        _swa_full_tokens_ratio_explicitly_set swa_prefix_tails disable_hybrid_swa_memory mamba_backend
        max_mamba_cache_size mamba_ssm_dtype mamba_max_states_per_path enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds mamba_full_memory_ratio mamba_radix_cache_strategy uses_mamba_radix_cache
        mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm
        linear_replayssm_cache_len enable_linear_replayssm_spec prefill_kv_cache_dequant_dtype
        """,
    "how many, how large, where, or when": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
        prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens
        prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
        default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness radix_eviction_policy
        radix_eviction_policy_config _radix_eviction_policy_explicitly_set prefill_only_disable_kv_cache
        disable_radix_cache enable_page_major_kv_layout enable_unified_memory disable_overlap_schedule
        num_continuous_decode_steps scheduler_recv_interval radix_cache_backend enable_session_radix_cache
        enable_streaming_session strip_thinking_cache max_lora_rank max_loaded_loras max_loras_per_batch
        lora_eviction_policy enable_lora_overlap_loading lora_drain_wait_threshold cpu_offload_gb offload_group_size
        offload_num_in_group offload_prefetch_step offload_mode ple_offload_embedding ple_offload_backend
        ple_offload_dir enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
        enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms min_free_slots_delay enable_pdmux pdmux_config_path sm_group_num dllm_fdfo
        watchdog_timeout soft_watchdog_timeout sleep_on_idle numa_node gc_threshold base_gpu_id gpu_id_step
        random_seed use_ray custom_sigquit_handler mlx_enable_sampling allow_auto_truncate
        """,
    "how weights are read, or changed later: sglang_api watches changes": """
        trust_remote_code startup_weight_load_mode custom_weight_loader weight_loader_disable_mmap
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        checkpoint_engine_wait_weights_before_ready model_checksum delete_ckpt_after_loading weight_cache_socket
        weight_cache_timeout modelopt_checkpoint_save_path modelopt_export_path weight_version
        """,
    "of load formats that are refused": """
        remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port modelexpress_config
        """,
    "decides what drafts propose, and which are accepted": """
        speculative_algorithm speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
        speculative_dflash_block_size speculative_dspark_block_size speculative_dspark_sps_table_path
        speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling
        speculative_use_block_verification speculative_token_map speculative_attention_mode speculative_adaptive
        speculative_adaptive_config _speculative_draft_quantization_explicitly_set decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role spec_trace_dir
        speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth speculative_ngram_match_type
        speculative_ngram_max_trie_depth speculative_ngram_capacity speculative_ngram_external_corpus_path
        speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens
        speculative_domino_candidate_pool_size
        """,
    "makes prompts, whose tokens are in page hashes, or of sampling and answers": """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num skip_tokenizer_init
        chat_template trust_request_chat_template hf_chat_template_name completion_template reasoning_parser
        default_chat_template_kwargs enable_strict_thinking tool_call_parser tool_server sampling_defaults
        preferred_sampling_params sampling_backend grammar_backend enable_fp32_lm_head enable_custom_logit_processor
        enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window
        watermark_mixing_probability watermark_max_probability watermark_default_enabled watermark_enforce_all
        enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states aux_hidden_state_capture
        return_aux_hidden_state_layer_ids enable_return_routed_experts enable_return_indexer_topk
        sampling_mask_max_tokens disable_outlines_disk_cache constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode asr_max_buffer_seconds asr_max_concurrent_sessions
        """,
    "SGLang's pages of media are named by a hash of the processed item": """
        enable_multimodal enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_processor_worker_num
        mm_io_worker_num allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb
        limit_mm_data_per_request enable_mm_global_cache mm_global_cache_backend mm_feature_transport encoder_only
        language_only language_model_only encoder_transfer_backend encoder_urls encoder_bootstrap_port
        encoder_register_urls enable_adaptive_dispatch_to_encoder
        """,
    "the operator states that callers' hashes name the content": "trust_mm_content_hashes",
    "SGLang switches its cache off": "enable_mis",
    "another cache, or where it is": """
        enable_hierarchical_cache hicache_host_memory_mode hicache_host_memory_fraction hicache_ratio hicache_size
        hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
        hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        enable_unified_cache_external_linker unified_cache_external_linker_backend unified_cache_external_linker_config
        enable_linker_mla_dedup enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file
        """,
    "where prefill and decode run": """
        disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval optimistic_prefill_attempts disaggregation_enable_kv_checksum
        enable_pd_role_switch disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
        mooncake_ib_device
        """,
    "of connections, logs, metrics and checks": """
        nccl_port dist_timeout dist_init_addr gated_launch_port host port fastapi_root_path smg_grpc_mode grpc_mode
        grpc_port grpc_worker_threads grpc_response_timeout_secs sidecar sidecar_args skip_server_warmup warmups
        enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile
        ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key file_storage_path
        enable_cache_report return_input_ids return_output_ids stream_interval batch_notify_size
        stream_response_default_include_usage incremental_streaming_output log_level log_level_http log_requests
        log_requests_level log_requests_format log_requests_target uvicorn_access_log_exclude_prefixes
        crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port enable_mfu_metrics
        enable_metrics_for_all_schedulers load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
        gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging kv_events_config
        load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
        enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
        export_metrics_to_file_dir stat_loggers enable_layerwise_nvtx_marker kv_canary kv_canary_real_data
        kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers msprobe_dump_config
        enable_response_store enable_http_worker_reuseport
        """,
}
MODEL: Mapping[str, str] = {
    IDENTITY: """
        model_path revision context_length model_override_args is_embedding dtype quantization override_config_file
        model_impl quantize_and_serve is_multi_layer_eagle model_config_parser is_draft_quantization_explicit
        """,
    "harmless as the argument of this name": """
        trust_remote_code enable_multimodal is_draft_model sampling_defaults encoder_only language_only
        language_model_only disable_hybrid_swa_memory speculative_algorithm
        """,
}
STORAGE: Mapping[str, str] = {
    "sglang_api.shards": "tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size dcp_rank dcp_size",
    "in the spec": "is_mla_model model_name logical_page_size",
    "names and shares of other backends": "tp_lcm_size should_split_heads",
    "replicas have the same pages": "dp_rank",
    "settings": "extra_config enable_storage_metrics",
    "the order of bytes is the same for all layouts": "is_page_first_layout",
}
REQUEST: Mapping[str, str] = {
    "tokens of page hashes; those of media are hashes of the item": "origin_input_ids origin_input_ids_unpadded",
    "SGLang seeds page hashes by it": "extra_key cache_salt lora_id",
    "SGLang refuses it while it has a prefix cache": "input_embeds",
    "SGLang switches its cache off for multi-item scoring": "multi_item_delimiter_indices",
    "SGLang keeps such a request out of its prefix cache": "positional_embed_overrides",
    "of cross-encoders, which have no prefix cache": "token_type_ids",
    "of sampling, answers, and where they go": """
        self rid origin_input_text sampling_params return_logprob top_logprobs_num dllm_config token_ids_logprob
        return_sampling_mask sampling_logprobs_mode return_flat_raw_top_logprobs stream session custom_logit_processor
        require_reasoning return_hidden_states return_routed_experts routed_experts_start_len return_indexer_topk
        eos_token_ids bootstrap_host bootstrap_port bootstrap_room disagg_mode routed_dp_rank disagg_prefill_dp_rank
        kv_hints vocab_size priority metrics_collector routing_key dimensions http_worker_ipc time_stats
        return_pooled_hidden_states token_indices_to_pool decision_layout session_id
        """,
}


@pytest.mark.parametrize(
    ("names", "table"),
    [
        ([field.name for field in fields(ServerArgs)], ARGUMENTS),
        (list(inspect.signature(ModelConfig).parameters), MODEL),
        ([field.name for field in dataclasses.fields(HiCacheStorageConfig)], STORAGE),
        (list(inspect.signature(Req.__init__).parameters), REQUEST),
    ],
    ids=["ServerArgs", "ModelConfig", "HiCacheStorageConfig", "Req"],
)
def test_it_is_decided_of_every_field_whether_it_changes_kv(names: Iterable[str], table: Mapping[str, str]) -> None:
    decided = [name for group in table.values() for name in group.split()]
    assert len(decided) == len(set(decided))
    assert set(names) - set(decided) == set(), "put each into the identity, refuse it, or write why it is harmless"
    assert set(decided) - set(names) == set(), "SGLang has it no more"


def test_what_the_table_calls_identified_is_what_the_code_identifies() -> None:
    by_itself = {*kv_spec.OF_CONFIG, *kv_spec.COMPUTED_BY, *kv_spec.ATTENTION_BACKENDS, "context_length"}
    assert by_itself <= set(ARGUMENTS[IDENTITY].split())
    assert set(kv_spec.FILES) <= by_itself
    assert set(kv_spec.ELSEWHERE) == set(ARGUMENTS[REFUSED].split())
    assert {*kv_spec.OF_ADAPTERS, "lora_paths", "enable_lora"} == set(ARGUMENTS[ADAPTERS].split())
    assert set(kv_spec.DIVIDED) == set(ARGUMENTS[SHARES].split())
