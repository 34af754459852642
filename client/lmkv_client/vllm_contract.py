"""Everything in vLLM that lmkv relies on, compared with an installed vLLM: names, attributes, hooks and calls.

An engine with a newer vLLM than lmkv was tested with runs `moved` at its start (`lmkv_client.plugin`). `make
verify-vllm` runs this file with the newest vLLM for CPUs, and it prints what moved, one line each. It needs vLLM only:
neither lmkv nor a model. What lmkv imports is read from the modules that import it; the tables have the rest.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CLIENT = Path(__file__).parent
IMPORTERS = (
    CLIENT / "connector" / "vllm_api.py",
    CLIENT / "connector" / "encoder" / "ec_api.py",
    CLIENT / "plugin.py",
)

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
BASE = f"{CONNECTOR}.v1.base.KVConnectorBase_V1"
ENCODER_CACHE = "vllm.distributed.ec_transfer"
ENCODER_BASE = f"{ENCODER_CACHE}.ec_connector.base.ECConnectorBase"
OF_ENCODER_CACHE = (ENCODER_CACHE, "vllm.config.ECTransferConfig", "vllm.v1.outputs.ECConnectorOutput")
"""Names that only the connector of the encoder cache uses."""
SPECS = "vllm.v1.kv_cache_interface"
OUTPUT = "vllm.v1.core.sched.output"

SINCE = {
    **dict.fromkeys(OF_ENCODER_CACHE, (0, 32)),
    "vllm.v1.metrics.cache_hit_source": (0, 32),
    f"{BASE}.get_external_cache_hit_sources": (0, 32),
    f"{BASE}.restore_kv_caches": (0, 33),
    f"{BASE}.unregister_kv_caches": (0, 33),
    f"{SPECS}.KVCacheConfig.cache_hit_alignment_tokens": (0, 32),
    f"{SPECS}.KVCacheConfig.hash_block_size": (0, 32),
    "vllm.v1.engine.core.EngineCore.set_weight_version": (0, 32),
    "vllm.v1.kv_hints.KvHintsEnvelope": (0, 32),
    "vllm.v1.kv_hints.KvHintAction": (0, 32),
    "vllm.v1.request.Request.kv_hints": (0, 32),
}
"""The first version that has a name, where that is not the oldest supported one; lmkv works without it before."""

ATTRIBUTES = {
    BASE: "_kv_transfer_config requires_kv_delivery",
    f"{CONNECTOR}.v1.base.KVConnectorTransferResults": "failed_recving finished_recving finished_sending",
    f"{CONNECTOR}.v1.KVConnectorRole": "SCHEDULER",
    f"{CONNECTOR}.v1.metrics.KVConnectorStats": "data",
    f"{CONNECTOR}.v1.metrics.KVConnectorPromMetrics": "_counter_cls _gauge_cls _labelnames",
    f"{CONNECTOR}.factory.KVConnectorFactory": "_registry",
    ENCODER_BASE: "is_consumer is_producer",
    f"{ENCODER_CACHE}.ec_connector.base.ECConnectorRole": "SCHEDULER",
    f"{ENCODER_CACHE}.ec_connector.metrics.ECConnectorStats": "data",
    f"{ENCODER_CACHE}.ec_connector.metrics.ECConnectorPromMetrics": "_counter_cls",
    f"{ENCODER_CACHE}.ec_connector.factory.ECConnectorFactory": "_registry",
    "vllm.config.ECTransferConfig": "ec_connector_extra_config mm_encoder_output_widths",
    "vllm.v1.outputs.ECConnectorOutput": "ec_connector_worker_meta",
    "vllm.config.VllmConfig": "attention_config cache_config device_config ec_transfer_config kv_events_config "
    "kv_transfer_config load_config lora_config mamba_config model_config observability_config parallel_config "
    "scheduler_config speculative_config",
    "vllm.config.AttentionConfig": "disable_flashinfer_q_quantization indexer_kv_dtype indexer_sparse_logits "
    "use_non_causal use_prefill_query_quantization",
    "vllm.config.CacheConfig": "cache_dtype kv_sharing_fast_prefill",
    "vllm.config.DeviceConfig": "device_type",
    "vllm.config.KVEventsConfig": "enable_kv_cache_events",
    "vllm.config.KVTransferConfig": "is_kv_consumer is_kv_producer kv_connector kv_connector_extra_config "
    "kv_load_failure_policy",
    "vllm.config.LoRAConfig": "enable_moe_shared_loras enable_tower_connector_lora lora_dtype max_cpu_loras "
    "target_modules",
    "vllm.config.MambaConfig": "enable_stochastic_rounding",
    "vllm.config.LoadConfig": "download_dir load_format model_loader_extra_config",
    "vllm.config.ModelConfig": "attn_type code_revision disable_sliding_window dtype hf_config hf_config_path "
    "hf_text_config is_diffusion is_encoder_decoder is_prefix_caching_supported max_model_len model "
    "model_class_overrides model_impl multimodal_config pooler_config quantization quantization_config revision "
    "served_model_name use_mla",
    "vllm.config.MultiModalConfig": "mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_method "
    "video_pruning_rate",
    "vllm.config.ObservabilityConfig": "otlp_traces_endpoint",
    "vllm.config.ParallelConfig": "decode_context_parallel_size pipeline_parallel_size prefill_context_parallel_size "
    "tensor_parallel_size world_size",
    "vllm.config.SchedulerConfig": "max_num_batched_tokens",
    "vllm.config.SpeculativeConfig": "draft_model_config",
    "vllm.engine.arg_utils.EngineArgs": "create_model_config served_model_name",
    "vllm.distributed.parallel_state.GroupCoordinator": "rank_in_group",
    "vllm.distributed.kv_events.BlockStored": "block_hashes block_size extra_keys group_idx lora_id lora_name medium "
    "parent_block_hash token_ids",
    "vllm.distributed.kv_events.BlockRemoved": "block_hashes group_idx medium",
    "vllm.lora.request.LoRARequest": "adapter_id is_3d_lora_weight load_inplace lora_int_id lora_name lora_path name",
    "vllm.multimodal.inputs.MultiModalFeatureSpec": "data identifier modality mm_position",
    "vllm.multimodal.inputs.PlaceholderRange": "is_embed length offset",
    f"{SPECS}.KVCacheConfig": "cache_hit_alignment_tokens hash_block_size kv_cache_groups",
    f"{SPECS}.KVCacheGroupSpec": "kv_cache_spec layer_names",
    f"{SPECS}.KVCacheSpec": "block_size prefix_cacheable",
    f"{SPECS}.KVQuantMode": "FP8_PER_TENSOR",
    f"{SPECS}.AttentionSpec": "dtype head_size head_size_v kv_quant_mode num_head_slots num_kv_heads "
    "state_content_bytes tokens_per_state",
    f"{SPECS}.SlidingWindowSpec": "extra_retained_tokens sliding_window",
    f"{SPECS}.ChunkedLocalAttentionSpec": "attention_chunk_size",
    f"{SPECS}.MambaSpec": "dtypes mamba_type shapes state_content_size_bytes tp_replicated",
    f"{OUTPUT}.SchedulerOutput": "kv_connector_block_state num_scheduled_tokens scheduled_cached_reqs "
    "scheduled_new_reqs total_num_scheduled_tokens",
    f"{OUTPUT}.NewRequestData": "num_computed_tokens req_id",
    f"{OUTPUT}.CachedRequestData": "num_computed_tokens req_ids",
    f"{OUTPUT}.KVConnectorBlockState": "boundary_state_offloads",
    "vllm.v1.outputs.KVConnectorOutput": "kv_connector_worker_meta",
    "vllm.v1.metrics.cache_hit_source.CacheHitSource": "DISK EXTERNAL_UNSPECIFIED HOST P2P",
    "vllm.v1.core.sched.scheduler.Scheduler": "connector",
    "vllm.v1.engine.core.EngineCore": "scheduler",
    f"{CONNECTOR}.v1.multi_connector.MultiConnector": "_connectors",
    "vllm.v1.request.Request": "all_token_ids block_hashes cache_salt kv_hints kv_transfer_params lora_request "
    "mm_features num_computed_tokens num_in_flight_tokens num_preemptions num_tokens prompt_embeds prompt_token_ids "
    "request_id resumable skip_reading_prefix_cache status trace_headers",
    "vllm.v1.kv_hints.KvHintsEnvelope": "actions message_id protocol_version",
    "vllm.v1.kv_hints.KvHintAction": "action_id action_type action_version payload",
    "vllm.v1.request.RequestStatus": "FINISHED_ABORTED FINISHED_ERROR FINISHED_IGNORED",
}
"""The attributes of vLLM's objects that lmkv reads, by class."""

HOOKS = {
    f"{BASE}.build_connector_meta": "scheduler_output",
    f"{BASE}.build_connector_worker_meta": "",
    f"{BASE}.build_kv_connector_stats": "data",
    f"{BASE}.build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
    f"{BASE}.get_block_ids_with_load_errors": "",
    f"{BASE}.get_external_cache_hit_sources": "request num_external_tokens",
    f"{BASE}.get_finished": "finished_req_ids",
    f"{BASE}.get_kv_connector_stats": "",
    f"{BASE}.get_num_new_matched_tokens": "request num_computed_tokens",
    f"{BASE}.get_transfer_results": "finished_req_ids",
    f"{BASE}.handle_preemptions": "kv_connector_metadata",
    f"{BASE}.has_pending_push_work": "",
    f"{BASE}.on_new_request": "request",
    f"{BASE}.register_kv_caches": "kv_caches",
    f"{BASE}.request_finished": "request block_ids",
    f"{BASE}.reset_cache": "",
    f"{BASE}.restore_kv_caches": "",
    f"{BASE}.save_kv_layer": "layer_name kv_layer attn_metadata kwargs",
    f"{BASE}.shutdown": "",
    f"{BASE}.start_load_kv": "forward_context kwargs",
    f"{BASE}.take_events": "",
    f"{BASE}.unregister_kv_caches": "",
    f"{BASE}.update_connector_output": "connector_output",
    f"{BASE}.update_state_after_alloc": "request blocks num_external_tokens",
    f"{BASE}.wait_for_layer_load": "layer_name",
    f"{BASE}.wait_for_save": "",
    f"{ENCODER_BASE}.build_connector_meta": "scheduler_output",
    f"{ENCODER_BASE}.build_connector_worker_meta": "",
    f"{ENCODER_BASE}.build_ec_connector_stats": "data",
    f"{ENCODER_BASE}.build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
    f"{ENCODER_BASE}.ensure_cache_available": "request num_computed_tokens",
    f"{ENCODER_BASE}.get_ec_connector_stats": "",
    f"{ENCODER_BASE}.has_cache_item": "identifier",
    f"{ENCODER_BASE}.request_finished": "request",
    f"{ENCODER_BASE}.save_caches": "encoder_cache mm_hash kwargs",
    f"{ENCODER_BASE}.shutdown": "",
    f"{ENCODER_BASE}.start_load_caches": "encoder_cache kwargs",
    f"{ENCODER_BASE}.update_connector_output": "connector_output",
    f"{ENCODER_BASE}.update_state_after_alloc": "request index",
    f"{ENCODER_CACHE}.ec_connector.base.ECConnectorWorkerMetadata.aggregate": "other",
    f"{ENCODER_CACHE}.ec_connector.metrics.ECConnectorStats.aggregate": "other",
    f"{ENCODER_CACHE}.ec_connector.metrics.ECConnectorStats.is_empty": "",
    f"{ENCODER_CACHE}.ec_connector.metrics.ECConnectorStats.reduce": "",
    f"{ENCODER_CACHE}.ec_connector.metrics.ECConnectorStats.reset": "",
    f"{ENCODER_CACHE}.ec_connector.metrics.ECConnectorPromMetrics.observe": "transfer_stats_data engine_idx",
    f"{CONNECTOR}.v1.base.SupportsHMA.request_finished_all_groups": "request block_ids",
    f"{CONNECTOR}.v1.base.KVConnectorWorkerMetadata.aggregate": "other",
    f"{CONNECTOR}.v1.metrics.KVConnectorStats.aggregate": "other",
    f"{CONNECTOR}.v1.metrics.KVConnectorStats.is_empty": "",
    f"{CONNECTOR}.v1.metrics.KVConnectorStats.reduce": "",
    f"{CONNECTOR}.v1.metrics.KVConnectorStats.reset": "",
    f"{CONNECTOR}.v1.metrics.KVConnectorPromMetrics.observe": "transfer_stats_data engine_idx",
}
"""Methods that vLLM calls and lmkv overrides, with all their parameters but `self` and `cls`."""

CALLS = {
    f"{BASE}.__init__": "vllm_config role kv_cache_config",
    f"{BASE}._get_connector_metadata": "",
    f"{CONNECTOR}.v1.metrics.KVConnectorPromMetrics.__init__": "vllm_config metric_types labelnames "
    "per_engine_labelvalues",
    f"{CONNECTOR}.factory.KVConnectorFactory.register_connector": "name module_path class_name",
    f"{ENCODER_BASE}.__init__": "vllm_config role",
    f"{ENCODER_BASE}._get_connector_metadata": "",
    f"{ENCODER_CACHE}.ec_connector.metrics.ECConnectorPromMetrics.__init__": "vllm_config metric_types labelnames "
    "per_engine_labelvalues",
    f"{ENCODER_CACHE}.ec_connector.factory.ECConnectorFactory.register_connector": "name module_path class_name",
    "vllm._custom_ops.cpu_attn_reshape_and_cache": "key value key_cache value_cache slot_mapping isa",
    "vllm.config.ModelConfig.get_inputs_embeds_size": "",
    "vllm.config.ModelConfig.get_total_num_hidden_layers": "",
    "vllm.multimodal.inputs.PlaceholderRange.get_num_embeds": "",
    "vllm.config.ModelConfig.get_total_num_kv_heads": "",
    "vllm.config.ModelConfig.get_vocab_size": "",
    "vllm.config.SpeculativeConfig.uses_draft_kv_cache": "",
    "vllm.distributed.parallel_state.get_pp_group": "",
    "vllm.distributed.parallel_state.get_tensor_model_parallel_rank": "",
    "vllm.distributed.utils.get_pp_indices": "num_hidden_layers pp_rank pp_size",
    "vllm.logger.init_logger": "name",
    "vllm.v1.attention.backends.cpu_attn._get_attn_isa": "dtype block_size head_size kv_cache_dtype",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids": "",
    "vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys": "request",
    "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys": "request start_token_idx end_token_idx start_mm_idx",
    "vllm.v1.core.kv_cache_utils.maybe_convert_block_hash": "hash_bytes",
    "vllm.v1.core.kv_cache_utils.to_event_extra_keys": "extra_keys",
    "vllm.v1.engine.core.EngineCore.add_lora": "lora_request",
    "vllm.v1.engine.core.EngineCore.collective_rpc": "method timeout args",
    "vllm.v1.engine.core.EngineCore.remove_lora": "lora_id",
    "vllm.v1.engine.core.EngineCore.reset_prefix_cache": "",
    "vllm.v1.engine.core.EngineCore.set_weight_version": "weight_version",
    "vllm.v1.engine.core.EngineCore.sleep": "level",
    f"{OUTPUT}.KVConnectorBlockState.get_block_ids": "req_id",
}
"""Functions that lmkv calls, with the parameters that it gives in this order; vLLM may have optional ones behind."""


class Moved(Exception):
    """Something is not where lmkv expects it."""


def moved(*, encoder_cache: bool = True) -> list[str]:
    """Returns a line for each thing that the installed vLLM does not have, or has otherwise.

    `encoder_cache`: whether what only the connector of the encoder cache relies on counts.
    """
    lines = []
    for check, name, expected in checks():
        if not is_expected(name) or (not encoder_cache and name.startswith(OF_ENCODER_CACHE)):
            continue
        try:
            check(name, expected)
        except Moved as what:
            lines.append(str(what))
    return list(dict.fromkeys(lines))


def is_expected(name: str) -> bool:
    """Whether the installed version is to have a name."""
    version = tuple(int(number) for number in re.findall(r"\d+", importlib.import_module("vllm").__version__)[:2])
    return all(version >= since for late, since in SINCE.items() if f"{name}.".startswith(f"{late}."))


def checks() -> Iterator[tuple[Any, str, list[str]]]:
    """Every check, with the name that it is for and what it expects of it."""
    for file in IMPORTERS:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                for alias in node.names:
                    yield check_name, f"{node.module}.{alias.name}", []
    for owner, names in ATTRIBUTES.items():
        for name in names.split():
            yield check_attribute, f"{owner}.{name}", []
    tables: Mapping[Any, Mapping[str, str]] = {check_hook: HOOKS, check_call: CALLS}
    for check, table in tables.items():
        for name, parameters in table.items():
            yield check, name, parameters.split()
    for base in (BASE, ENCODER_BASE):
        yield check_abstract_methods, base, [name.removeprefix(f"{base}.") for name in HOOKS]


def find(name: str) -> Any:
    """The module, class or function of this name."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 1):
        if not hasattr(found, part) and inspect.ismodule(found):
            try:
                importlib.import_module(".".join(parts[: at + 1]))
            except ModuleNotFoundError as error:
                if error.name != ".".join(parts[: at + 1]):  # it has the module, which needs another
                    raise Moved(f"{'.'.join(parts[: at + 1])} cannot be imported: {error}") from error
            except Exception as error:
                raise Moved(f"{'.'.join(parts[: at + 1])} cannot be imported: {error}") from error
        if not hasattr(found, part):
            raise Moved(f"{'.'.join(parts[:at])} has no attribute {part}")
        found = getattr(found, part)
    return found


def check_name(name: str, _: list[str]) -> None:
    """Raises `Moved` if there is no such name."""
    find(name)


def check_attribute(name: str, _: list[str]) -> None:
    """Raises `Moved` if instances of a class have no such attribute: on the class, as a field, or set by `__init__`."""
    path, attribute = name.rsplit(".", 1)
    owner = find(path)
    if hasattr(owner, attribute):
        return
    for base in owner.__mro__:
        if attribute in inspect.get_annotations(base):
            return
        try:
            if re.search(rf"\bself\.{attribute}\b(:[^=]*)?\s*=[^=]", inspect.getsource(base.__init__)):
                return
        except (OSError, TypeError):  # no source: `object`, or a generated `__init__`
            continue
    raise Moved(f"{path} has no attribute {attribute}")


def check_hook(name: str, expected: list[str]) -> None:
    """Raises `Moved` unless the method has exactly these parameters: vLLM gives all of them."""
    if (actual := [parameter.name for parameter in parameters_of(name)]) != expected:
        raise Moved(f"{name} takes ({', '.join(actual)}), lmkv expects ({', '.join(expected)})")


def check_call(name: str, expected: list[str]) -> None:
    """Raises `Moved` unless the function can be called with these parameters."""
    parameters = parameters_of(name)
    actual = [parameter.name for parameter in parameters]
    rest = parameters[len(expected) :]
    required = [
        one for one in rest if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if actual[: len(expected)] != expected or required:
        raise Moved(f"{name} takes ({', '.join(actual)}), lmkv calls it with ({', '.join(expected)})")


def parameters_of(name: str) -> list[inspect.Parameter]:
    """The parameters of a function but `self` and `cls`."""
    parameters = inspect.signature(find(name)).parameters.values()
    return [parameter for parameter in parameters if parameter.name not in ("self", "cls")]


def check_abstract_methods(name: str, implemented: list[str]) -> None:
    """Raises `Moved` if a subclass must define a method that lmkv does not."""
    if missing := sorted(find(name).__abstractmethods__ - set(implemented)):
        raise Moved(f"{name} has abstract methods that lmkv does not define: {', '.join(missing)}")


def main() -> int:
    """Prints what moved; 1 if anything did."""
    version = importlib.import_module("vllm").__version__
    lines = moved()
    lines.append(f"vLLM {version}: {len(lines)} of {len(list(checks()))} names that lmkv relies on have moved")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if len(lines) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
