"""What docs/guides/vllm.md says of vLLM's features is shown by tests."""

from __future__ import annotations

import re
from pathlib import Path

SHOWN_BY = {
    "prefix caching, and `--no-enable-prefix-caching`": (
        "tests/engines/test_outputs.py::test_blocks_that_vllm_has_itself_are_not_loaded"
    ),
    "chats, agents": (
        "tests/engines/test_partial_chunks.py::test_every_turn_of_a_chat_is_loaded_to_the_last_token_that_was_stored"
    ),
    "preemption, chunked prefill": "tests/engines/test_requests.py::test_preempted_requests_resume_where_they_were",
    "speculative decoding with n-grams": (
        "tests/engines/test_features.py::test_drafts_that_are_rejected_are_never_stored"
    ),
    "speculative decoding with a draft model, EAGLE, EAGLE-3, or MTP": (
        "tests/engines/test_draft_models.py::test_a_hit_has_the_drafters_kv"
    ),
    "`--kv-cache-dtype fp8_e4m3`, `fp8_e5m2`": (
        "tests/engines/test_kv_dtypes.py::test_a_prompt_is_stored_and_loaded_again"
    ),
    "`--load-format dummy`, weights at a URL or from a loader's own place": (
        "tests/client/connector/test_identity.py::test_weights_that_are_elsewhere_need_a_name"
    ),
    "LoRA": "tests/engines/test_isolation.py::test_prompts_under_different_adapters_are_different_prompts",
    "LoRA adapters whose files change, `load_inplace`": (
        "tests/engines/test_isolation.py::test_an_adapter_is_what_the_engine_has_loaded_and_not_what_is_on_the_disk"
    ),
    "`--served-model-name`": "tests/engines/test_served_names.py::test_every_name_of_a_model_finds_it",
    "`cache_salt`": "tests/engines/test_isolation.py::test_prompts_under_different_salts_are_different_prompts",
    "images, audio, video": (
        "tests/client/connector/test_multimodal.py::"
        "test_a_prompt_with_the_same_image_is_loaded_and_one_with_another_up_to_it"
    ),
    "encoders run once a fleet ([encoder outputs](encoder-outputs.md))": (
        "tests/engines/test_encoder_cache.py::test_another_engine_loads_from_its_peer"
    ),
    "prompt embeddings, resumable requests": (
        "tests/client/connector/scheduler/test_requests_without_cache.py::"
        "test_what_is_more_than_its_tokens_is_neither_looked_up_nor_loaded_nor_stored"
    ),
    "several samples (`n`), log probabilities": (
        "tests/engines/test_requests.py::test_log_probabilities_of_a_prompt_are_computed_though_it_is_stored"
    ),
    "`kv_load_failure_policy`": (
        "tests/engines/test_features.py::test_a_load_that_fails_is_computed_whatever_the_policy_says"
    ),
    "`kv_role`": (
        "tests/engines/test_isolation.py::"
        "test_an_engine_that_only_produces_does_not_load_and_one_that_only_consumes_does_not_store"
    ),
    "`MultiConnector`": "tests/engines/test_multi_connector.py::test_lmkv_gives_what_it_has_before_nixl_is_asked",
    "tensor parallelism": "tests/engines/test_tensor_parallel.py::test_peers_share_whatever_their_ranks",
    "data parallelism": "tests/engines/test_features_server.py::test_ranks_of_one_server_load_what_either_has_stored",
    "pipeline parallelism, also with tensor parallelism": (
        "tests/engines/test_pipeline_parallel.py::test_peers_share_whatever_their_stages_and_ranks"
    ),
    "context parallelism": (
        "tests/client/connector/test_engine_kv.py::test_tokens_that_are_spread_over_ranks_are_refused_in_one_line"
    ),
    "sliding windows, local attention, states (hybrid models)": (
        "tests/engines/test_architectures.py::test_a_prompt_is_stored_and_loaded_again"
    ),
    "attention sinks, R-SWA, sliding-window MLA": (
        "tests/client/connector/test_engine_kv.py::test_a_kind_of_cache_that_is_not_known_is_refused_in_one_line"
    ),
    "`POST /reset_prefix_cache`": (
        "tests/engines/test_server.py::test_a_reset_over_http_makes_lmkv_forget_if_it_says_so"
    ),
    "weight updates in place": (
        "tests/engines/test_weight_versions.py::"
        "test_an_update_makes_old_kv_useless_everywhere_and_named_weights_are_shared_again"
    ),
    "sleep mode": "tests/engines/test_features.py::test_an_engine_that_has_slept_answers_as_before",
    "`--shutdown-timeout`": (
        "tests/engines/test_features_server.py::test_a_stopping_server_finishes_its_answers_and_leaves_them_in_the_pool"
    ),
    "`--kv-events-config`": "tests/engines/test_features.py::test_vllms_kv_events_report_stores_by_vllms_hashes",
    "`/metrics`, vLLM's log line": (
        "tests/engines/test_server.py::test_stores_and_loads_are_in_the_log_and_in_the_metrics"
    ),
    "OpenTelemetry traces": (
        "tests/engines/test_traces.py::test_a_request_is_one_trace_from_the_client_to_the_peer_that_gives_the_bytes"
    ),
}
"""The features of the page's table, each with the test that shows what becomes of it."""


def test_every_feature_has_a_test(root: Path) -> None:
    page = (root / "docs" / "guides" / "vllm.md").read_text()
    table = page.partition("\n## Features\n")[2].partition("\n## ")[0]
    features = re.findall(r"^\| (.+) \| .+ \|$", table, re.MULTILINE)[1:]
    assert features == list(SHOWN_BY)
    for named in SHOWN_BY.values():
        file, _, name = named.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (root / file).read_text(), re.MULTILINE), f"{file} has no {name}"
