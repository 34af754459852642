"""Finds inputs of a model that change keys and values although chunk keys do not name them. Keys name tokens only.

An input that is not known to be harmless counts as changing them. `watch` makes a model note, for each cache of
`LmkvCache.load`, the tokens from which it computed the cache. KV that was computed from anything else is not stored.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

HARMLESS_INPUTS = frozenset(
    {
        *("input_ids", "past_key_values", "use_cache", "labels", "num_items_in_batch", "logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    }
)
"""Parameters of a model's `forward` that do not change what it keeps, besides its tokens."""
POSITIONS = ("position_ids", "cache_position")
"""Parameters that do not change it if they number the tokens from 0 on."""
HARMLESS_OPTIONS = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "max_time", "stop_strings"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "renormalize_logits", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "sequence_bias", "guidance_scale", "watermarking_config", "diversity_penalty"),
        *("output_scores", "output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id"),
        *("decoder_start_token_id", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("max_matching_ngram_size", "max_cache_len"),
        *("compile_config", "disable_compile", "continuous_batching_config", "transformers_version"),
        *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus"),
        *("streamer", "tokenizer", "assistant_tokenizer", "trust_remote_code"),
    }
)
"""Options of `generate` that decide which tokens it chooses, and how; the KV of a token is the same."""
ONE_SEQUENCE: Mapping[str, tuple[Any, ...]] = {
    "use_cache": (None, True),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "num_beam_groups": (None, 1),
    **dict.fromkeys(("cache_implementation", "cache_config", "prefill_chunk_size", "constraints"), (None,)),
    **dict.fromkeys(("force_words_ids", "penalty_alpha", "dola_layers", "speculation_type"), (None,)),
    # With drafts, transformers 5.19 numbers the tokens after a loaded prefix wrongly.
    **dict.fromkeys(("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"), (None,)),
    **dict.fromkeys(("low_memory", "token_healing", "use_mtp"), (None, False)),
}
"""Other options of `generate`, with the values for which it computes one sequence into the cache that it is given."""
FIRST_INPUTS = ("input_ids", "past_key_values")
"""Inputs that `LmkvCache.generate` passes itself."""
RECORD, WATCHED = "lmkv_record", "lmkv_watches"
"""Attributes of caches, and of models that `watch` was called for."""


def changes_kv(model: Any, inputs: Mapping[str, Any], computed_count: int = 0) -> str:
    """The name of an input by which the KV of tokens is not that which their ids alone give; empty without any.

    `inputs` are arguments of the model's `forward`, in which the first token has the number `computed_count`. Some
    states of the model count as inputs.
    """
    for name, value in inputs.items():
        if value is None or name in HARMLESS_INPUTS:
            continue
        if name == "attention_mask" and isinstance(value, torch.Tensor) and value.ndim == 2 and bool(value.all()):
            continue
        if name in POSITIONS and isinstance(value, torch.Tensor):
            usual = torch.arange(computed_count, computed_count + value.shape[-1], device=value.device)
            if bool((value == usual).all()):
                continue
        return name
    if getattr(model, "training", False):
        return "the dropout of its training mode"
    if has_adapters(model):
        return "adapters"
    device = getattr(model, "device", None)
    return "autocast" if device is not None and torch.is_autocast_enabled(device.type) else ""


def has_adapters(model: Any) -> bool:
    """Whether the model computes with adapters besides its weights."""
    return bool(getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False))


def prevents_caching(model: Any, options: Mapping[str, Any]) -> str:
    """The name of an option of `generate` for which the KV in its cache is not that of one sequence of tokens."""
    inputs = {}
    for name, value in options.items():
        if name in (*POSITIONS, "attention_mask") or (name in HARMLESS_INPUTS and name not in FIRST_INPUTS):
            inputs[name] = value
        elif value is not None and name not in HARMLESS_OPTIONS and name not in ONE_SEQUENCE:
            return name
    own = options.get("generation_config") or model.generation_config
    for name, usual in ONE_SEQUENCE.items():
        chosen = options.get(name)
        if (getattr(own, name, None) if chosen is None else chosen) not in usual:
            return name
    return changes_kv(model, inputs)


class ComputedTokens:
    """The tokens of a cache whose KV was computed from their ids and the ids before them, and from nothing else."""

    def __init__(self, tokens: Sequence[int] = (), reason: str = "") -> None:
        """`tokens` were loaded. `reason`: why nothing that will be computed counts; empty if it does."""
        self.tokens = list(tokens)
        self.reason = reason
        self._is_unused = True

    def will_compute(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """The model is about to compute tokens. Raises `ValueError` if what was loaded is not what it needs."""
        computed_count = inputs["past_key_values"].get_seq_length()
        token_ids = inputs.get("input_ids")
        reason = self.reason or changes_kv(model, inputs, computed_count)
        if not reason and (token_ids is None or token_ids.ndim != 2 or token_ids.shape[0] != 1):
            reason = "several sequences"
        if not reason and computed_count > len(self.tokens):
            reason = "tokens that another model has computed"
        if reason and self._is_unused and self.tokens:
            raise ValueError(
                f"the cache has keys and values of token ids alone, and the model computes with {reason}: pass its "
                "other inputs to `load` too, which then loads nothing"
            )
        self._is_unused, self.reason = False, reason
        del self.tokens[computed_count:]  # drafts that were refused
        if not reason and token_ids is not None:
            self.tokens += token_ids[0].tolist()

    def common(self, tokens: Sequence[int]) -> int:
        """Number of the first tokens that the cache has KV of."""
        pairs = zip(self.tokens, tokens, strict=False)
        return next((at for at, (mine, other) in enumerate(pairs) if mine != other), min(len(self.tokens), len(tokens)))


def keep_record(past: Any, record: ComputedTokens) -> None:
    """Has a cache know its record; copies of the cache have copies of it."""
    setattr(past, RECORD, record)


def record_of(past: Any) -> ComputedTokens | None:
    """The record of a cache; None if `load` has not made it."""
    found: ComputedTokens | None = getattr(past, RECORD, None)
    return found


def watch(model: Any) -> None:
    """Has the model note in records what it computes, from now on. Idempotent."""
    compiled_from = getattr(model, "_orig_mod", model)
    if not getattr(compiled_from, WATCHED, False):
        compiled_from.register_forward_pre_hook(_note, with_kwargs=True)
        setattr(compiled_from, WATCHED, True)


def _note(model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    inputs = {**dict(zip(_parameters(type(model).forward), arguments, strict=False)), **options}
    if (record := record_of(inputs.get("past_key_values"))) is not None:
        record.will_compute(model, inputs)


@functools.cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
