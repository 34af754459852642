"""`LmkvCache`: the KV cache of one model's prompts, shared through the node of this host."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from lmkv.config import ConnectorConfig, load
from lmkv_client.engine import Engine, Written
from lmkv_client.transformers.inputs import ComputedTokens, changes_kv, keep_record, prevents_caching, record_of, watch
from lmkv_client.transformers.model_kv import ModelKv, model_kv, new_cache


def chunk_tensor(memory: memoryview, kv: ModelKv, token_count: int) -> torch.Tensor:
    """An extent of `token_count` tokens as a tensor `[layer, kv head, 2, token, head_size]` that shares its memory."""
    spec = kv.spec
    elements = torch.frombuffer(memory, dtype=torch.uint8, count=spec.size_bytes(token_count)).view(kv.dtype)
    return elements.view(spec.layer_count, spec.kv_head_count, 2, token_count, spec.head_size)


def fill(past: Any, chunks: Sequence[torch.Tensor], kv: ModelKv, token_limit: int) -> int:
    """Copies the chunks of a prompt, from its first token on, into an empty cache; returns the number of tokens.

    At most `token_limit` tokens; `chunks` are tensors of `chunk_tensor`.
    """
    for layer, device, index in zip(past.layers, kv.devices, range(kv.spec.layer_count), strict=True):
        keys, values = (
            torch.cat([chunk[index, :, part] for chunk in chunks], dim=1)[:, :token_limit].unsqueeze(0).to(device)
            for part in (0, 1)
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if layer.is_sliding:
            layer.cumulative_length = keys.shape[-2]
    return int(past.get_seq_length())


def has_all_tokens(past: Any, token_count: int) -> bool:
    """Whether each layer has the keys and values of the first `token_count` tokens: a window drops older tokens."""
    layers = past.layers
    return all(
        layer.keys is not None and layer.keys.shape[-2] == layer.get_seq_length() >= token_count for layer in layers
    )


def copy_tokens(past: Any, first: int, chunks: Sequence[torch.Tensor]) -> None:
    """Copies the keys and values of tokens from `first` on into consecutive chunks, tensors of `chunk_tensor`."""
    total = sum(chunk.shape[3] for chunk in chunks)
    for index, layer in enumerate(past.layers):
        for part, states in enumerate((layer.keys, layer.values)):
            own = states[0, :, first : first + total].cpu()
            at = 0
            for chunk in chunks:
                chunk[index, :, part] = own[:, at : at + chunk.shape[3]]
                at += chunk.shape[3]


logger = logging.getLogger(__name__)

RESERVED_AT_ONCE = 32
"""Most extents that a store holds before it commits them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStatistics:
    """The counts of a cache since it was made. All are of tokens but `uncached_calls`."""

    looked_up_tokens: int = 0
    """Tokens of prompts that were looked up."""
    loaded_tokens: int = 0
    """The number of these tokens that were loaded: cache hits."""
    stored_tokens: int = 0
    """Tokens whose KV was stored; what the node held already is not counted."""
    uncached_calls: int = 0
    """Calls of `generate` that were computed without the cache."""


class LmkvCache:
    """Loads the KV of prompts before `generate`, and stores it afterwards. May be used from several threads.

    It is for one model, whose weights must not change while it is used, and for one sequence per call. If the node is
    lost, nothing is loaded or stored until a node is back; no method raises because of it.
    """

    def __init__(
        self, model: Any, *, config: ConnectorConfig | Mapping[str, Any] | None = None, model_name: str = ""
    ) -> None:
        """Computes one token to learn what the model keeps, then finds or starts the node of this host.

        `model` is a decoder of transformers (`PreTrainedModel`). `config` are keys as of the connector, over those of
        `LMKV_...` variables and `LMKV_CONFIG_FILE`. `model_name` is the name for lookups by tokens; by default the
        folder or the name that the model was loaded from. Raises `ConfigError` if the configuration is invalid, or if
        lmkv cannot keep the model's KV.
        """
        if not isinstance(config, ConnectorConfig):
            config = load(ConnectorConfig, flags=dict(config or {}), flags_place="config of LmkvCache")
        self._model = model
        self._config = config
        self._kv = model_kv(model, config, model_name)
        self._engine = Engine.attach(self._kv.spec, config=config)
        watch(model)
        self._statistics = CacheStatistics()
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        """The attachment to the node."""
        return self._engine

    @property
    def statistics(self) -> CacheStatistics:
        """The counts so far."""
        return self._statistics

    def load(self, input_ids: torch.Tensor, *, salt: str = "", **inputs: Any) -> DynamicCache:
        """A cache with the longest prefix of the prompt that can be loaded, for `generate(past_key_values=...)`.

        `input_ids` has shape `[1, tokens]` or `[tokens]`, without padding. At least the last token is left to compute;
        `get_seq_length()` of the result is the number of loaded tokens. Only prompts with the same `salt` are shared.
        Nothing is loaded if the model's padding token is among the tokens.

        `inputs` are the other inputs of the model. If KV depends on one of them, such as on `token_type_ids`, nothing
        is loaded, and `store` will store nothing of the cache. If the model is given such an input that was not passed
        here, it raises `ValueError` if something was loaded, and else nothing is stored. Raises `ValueError` for
        another shape of `input_ids`.
        """
        tokens = _tokens(input_ids)
        reason = "padding" if self._has_padding(tokens) else changes_kv(self._model, inputs)
        if not reason:
            return self._load(tokens, salt)
        past = new_cache(self._model)
        keep_record(past, ComputedTokens(reason=reason))
        return past

    def _load(self, tokens: NDArray[np.int64], salt: str) -> DynamicCache:
        past = new_cache(self._model)
        keys = self._engine.keys(tokens, salt=salt, partial=True)
        loaded = 0
        with self._engine.lookup(keys, tokens=tokens, salt=salt) as held:
            if min(held.token_count, tokens.size - 1) < max(1, self._config.min_retrieve_tokens):
                held.refuse()
            elif extents := list(held.load(timeout=self._config.load_timeout)):
                chunks = [chunk_tensor(extent.view, self._kv, extent.token_count) for extent in extents]
                loaded = fill(past, chunks, self._kv, min(held.token_count, tokens.size - 1))
        keep_record(past, ComputedTokens(tokens[:loaded].tolist()))
        self._count(looked_up_tokens=tokens.size, loaded_tokens=loaded)
        return past

    def store(self, token_ids: torch.Tensor, past_key_values: DynamicCache, *, salt: str = "") -> int:
        """Stores the KV of a sequence that the node does not hold yet; returns the number of tokens stored.

        `token_ids` are the prompt alone or what `generate` has returned, `[1, tokens]` or `[tokens]`; the last token
        has no KV yet. `past_key_values` is the cache that `load` has returned, after `generate`. What the model has not
        computed from these tokens alone is not stored. Nothing is stored if the model's padding token is among the
        tokens. Raises `ValueError` for another shape.
        """
        tokens = _tokens(token_ids)
        return 0 if self._has_padding(tokens) else self._store(tokens, past_key_values, salt)

    def _store(self, tokens: NDArray[np.int64], past_key_values: DynamicCache, salt: str) -> int:
        tokens = tokens[: past_key_values.get_seq_length()]
        record = record_of(past_key_values)
        if record is None:
            logger.warning("nothing is stored of a cache that `load` has not returned: pass generate that of `load`")
            return 0
        if (known := record.common(tokens.tolist())) < tokens.size:
            reason = record.reason or "other tokens than these"
            logger.info("%d of %d tokens are not stored: computed from %s", tokens.size - known, tokens.size, reason)
            tokens = tokens[:known]
        if not tokens.size:
            return 0
        if not has_all_tokens(past_key_values, tokens.size):
            logger.warning("the cache lacks tokens outside of windows, which chunks have: pass generate that of `load`")
            return 0
        spec = self._kv.spec
        keys = self._engine.keys(tokens, salt=salt, partial=self._config.save_partial_chunks)
        first = len(keys) - len(self._engine.missing(keys, timeout=self._config.lookup_timeout))
        stored = 0
        while first < len(keys):
            extents = self._engine.reserve(
                min(len(keys) - first, RESERVED_AT_ONCE), timeout=self._config.lookup_timeout
            )
            if not extents:
                break
            begin = first * spec.chunk_size
            counts = [min(spec.chunk_size, tokens.size - begin - at * spec.chunk_size) for at in range(len(extents))]
            own = list(zip(extents, counts, strict=True))
            try:
                copy_tokens(past_key_values, begin, [chunk_tensor(one.view, self._kv, count) for one, count in own])
                self._engine.commit(
                    Written(
                        key=keys[first + at],
                        extent=extent,
                        token_count=count,
                        parent=keys[first + at - 1] if first + at else self._first_parent(count, salt),
                        owner=self._engine.root(salt=salt),
                    )
                    for at, (extent, count) in enumerate(own)
                )
            except BaseException:  # the cache is of another model, for example
                self._engine.put_back(extents)
                raise
            stored += sum(counts)
            first += len(extents)
        self._count(stored_tokens=stored)
        return stored

    def generate(self, input_ids: torch.Tensor, *, salt: str = "", **options: Any) -> Any:
        """`model.generate(input_ids, **options)`, with its prompt loaded before and its KV stored afterwards.

        Calls whose KV is not that of one sequence of tokens are passed on to the model as they are: several sequences,
        padding, beams, inputs besides tokens, or a cache in `options`.
        """
        if not self._is_cacheable(input_ids, options):
            self._count(uncached_calls=1)
            return self._model.generate(input_ids, **options)
        tokens = _tokens(input_ids)
        past = self._load(tokens, salt)
        computed_count = tokens.size - past.get_seq_length()
        if options.get("attention_mask") is None:
            options["attention_mask"] = torch.ones_like(input_ids)
        first_token = _FirstToken()
        options["stopping_criteria"] = StoppingCriteriaList([first_token, *(options.get("stopping_criteria") or ())])
        output = self._model.generate(input_ids, past_key_values=past, **options)
        self._engine.prefilled(computed_count, first_token.seconds)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self._store(_tokens(sequences if self._config.save_decode_cache else input_ids), past, salt)
        return output

    def close(self) -> None:
        """Detaches from the node, which stays for `node_linger`. Idempotent; then all is computed."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_cacheable(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> bool:
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or prevents_caching(self._model, options):
            return False
        own = options.get("generation_config") or self._model.generation_config
        pad = options.get("pad_token_id", getattr(own, "pad_token_id", None))
        has_mask = options.get("attention_mask") is not None
        return has_mask or not bool((input_ids == (-1 if pad is None else pad)).any())

    def _has_padding(self, tokens: NDArray[np.int64]) -> bool:
        """Whether `generate` may leave some of the tokens out: without a mask, it takes these for padding."""
        pad = self._model.generation_config.pad_token_id
        return pad is not None and bool((tokens == pad).any())

    def _first_parent(self, token_count: int, salt: str) -> bytes:
        """Returns the key that a first chunk follows: prompts that continue a partial one find it by the root."""
        return b"" if token_count == self._kv.spec.chunk_size else self._engine.root(salt=salt)

    def _count(self, **more: int) -> None:
        with self._lock:
            now = self._statistics
            self._statistics = replace(now, **{name: getattr(now, name) + count for name, count in more.items()})


def _tokens(token_ids: torch.Tensor) -> NDArray[np.int64]:
    """Token ids of one sequence as an array. Raises `ValueError` for several sequences."""
    row = token_ids[0] if token_ids.ndim == 2 and token_ids.shape[0] == 1 else token_ids
    if row.ndim != 1 or not row.numel():
        raise ValueError(f"token ids have shape {tuple(token_ids.shape)}; pass one sequence, [1, tokens]")
    tokens: NDArray[np.int64] = row.detach().cpu().numpy()
    return tokens


class _FirstToken(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Measures how long `generate` computes the prompt: the time until its first token. Stops nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """0 before the first token."""
        self._began = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """No sequence ends here."""
        del scores
        if not self.seconds:
            input_ids[:, -1].tolist()  # waits for the device
            self.seconds = time.perf_counter() - self._began
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
