"""Describes the KV that an engine keeps: its KvSpec, and how vLLM's KV-cache groups make up the parts of a chunk."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from uuid import uuid4

from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv.keys import HASH_SCHEME, PAGE_HASH_SCHEME
from lmkv.packing import pack_fields
from lmkv.spec import NATIVE_TILES, TOKEN_MAJOR, KvPart, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE
from lmkv_client.connector.identity import engine_identity, first_layer, identity_across_engines, served_names
from lmkv_client.connector.vllm_api import (
    FIRST_WITH_GROUPS,
    VLLM_VERSION,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    ModelConfig,
    SlidingWindowSpec,
    VllmConfig,
    attention_isa,
    envs,
    hash_block_size,
    hit_alignment,
    init_logger,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """One of vLLM's KV-cache groups: its layers on this rank, and where an extent of their part has them."""

    part: int
    block_size: int
    """Tokens per page."""
    layer_names: tuple[str, ...]
    """The layers are in the order in which an extent has them."""
    first_layer: int = 0
    """Index of the first of these layers in the part."""


logger = init_logger("vllm.lmkv")

UNIDENTIFIED = "unidentified:"
"""Beginning of the `model_id` of weights whose digest is not known yet."""
REMEDY = "remove --kv-transfer-config or change the engine"
PLAIN_DTYPES = ("auto", "float32", "float16", "bfloat16")
"""`kv_cache_dtype`s whose pages hold elements as the model computes them."""
PER_TENSOR_DTYPES: Mapping[str, str] = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
"""`kv_cache_dtype`s of one byte with one scale per tensor, and lmkv's name of the element type."""
DEFAULT_CHUNK_SIZE = ConnectorConfig().chunk_size
ORDER = (PART_RULE_ALL, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE, PART_RULE_END)
"""Part 0 is of full attention, if any layer is: no hit is without it, so that its keys are those of chunks."""


@dataclass(frozen=True, kw_only=True)
class EngineKv:
    spec: KvSpec
    groups: tuple[LayerGroup, ...]
    """The groups are in vLLM's order: a request has a list of block ids for each."""
    hash_block_size: int
    """Tokens of each of a request's block hashes."""

    @property
    def hits_end_in_blocks(self) -> bool:
        """Whether vLLM may have tokens of a request behind the whole blocks that it reports as computed."""
        return any(group.block_size != self.hash_block_size for group in self.groups)


def engine_kv(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: ConnectorConfig,
    *,
    stage: int = 0,
    is_identified: bool = True,
) -> EngineKv:
    """The KV of this engine; `groups` has the layers of one pipeline stage.

    Unless `is_identified`, the spec has an identity that no other has, and no weights are read. Raises `ConfigError` if
    the KV is of a kind that this version cannot move, or is to be identified and the weights are not known.
    """
    model = vllm_config.model_config
    caches = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    check_reuse(vllm_config, caches)
    for cache in caches:
        check_cache_kind(cache, served_names(model)[0])
        if isinstance(cache, AttentionSpec):
            check_elements(cache, vllm_config.cache_config.cache_dtype)
    _check_engine(vllm_config, config)
    native = _is_native(vllm_config, config)
    kinds = [_part(vllm_config, cache, native=native) for cache in caches]
    order = sorted(dict.fromkeys(kinds), key=lambda kind: (ORDER.index(kind.rule), kind.span))
    names: list[list[str]] = [[] for _ in order]
    forms: list[list[str]] = [[] for _ in order]
    groups = []
    for kind, group in zip(kinds, kv_cache_config.kv_cache_groups, strict=True):
        part = order.index(kind)
        groups.append(
            LayerGroup(
                part=part,
                block_size=group.kv_cache_spec.block_size,
                layer_names=tuple(group.layer_names),
                first_layer=len(names[part]),
            )
        )
        names[part] += group.layer_names
        if isinstance(group.kv_cache_spec, MambaSpec):  # a state is bytes to lmkv: what they mean is in the spec, too
            state = group.kv_cache_spec
            forms[part].append(str((state.shapes, state.dtypes, state.mamba_type)))
    is_plain = len(caches) == 1 and order[0].rule == PART_RULE_ALL
    parts = [
        replace(kind, layer_count=len(own), layers="" if is_plain else _digest(own + form))
        for kind, own, form in zip(order, names, forms, strict=True)
    ]
    stage_count = vllm_config.parallel_config.pipeline_parallel_size
    if stage_count > 1:
        if not is_plain:
            raise ConfigError(
                "LMKVConnector: pipeline_parallel_size: this version of lmkv supports 1 for models with layers of "
                f"several kinds; {REMEDY}"
            )
        layer_count = model.get_total_num_hidden_layers()
        parts = [replace(parts[0], layer_count=layer_count)]
        groups = [replace(groups[0], first_layer=first_layer(names[0], layer_count, stage, stage_count))]
    alignment = hit_alignment(kv_cache_config)
    if alignment is None and not is_plain:
        raise ConfigError(
            f"LMKVConnector: vLLM {VLLM_VERSION} lacks what lmkv needs for model {served_names(model)[0]}, whose KV "
            f"cache is not one group of full attention; install vLLM {FIRST_WITH_GROUPS} or newer, or add "
            "--disable-hybrid-kv-cache-manager if some layers of the model have full attention"
        )
    chunk_size = _chunk_size(parts, caches, alignment or 0, config)
    if not native:
        parts = [_in_whole_pages(part, kinds, caches, chunk_size) for part in parts]
    first = parts[0]
    if config.share_across_engines and (not is_plain or first.mla):
        raise ConfigError(
            "share_across_engines: only models whose layers all have full attention with keys and values are "
            f"shared, and model {served_names(model)[0]} is another; set it to false",
            key="share_across_engines",
        )
    if not is_identified:
        model_id = UNIDENTIFIED + uuid4().hex
    elif config.share_across_engines:
        model_id = identity_across_engines(vllm_config, kv_dtype=first.kv_dtype, model_id=config.model_id)
    else:
        model_id = config.model_id or engine_identity(vllm_config)
    if config.hash_scheme == PAGE_HASH_SCHEME and not is_plain:
        raise ConfigError(
            f"hash_scheme: {PAGE_HASH_SCHEME} is for models whose layers all have full attention, and model "
            f"{served_names(model)[0]} is another; set it to {HASH_SCHEME}",
            key="hash_scheme",
        )
    spec = KvSpec(
        model_name=served_names(model)[0],
        model_id=model_id,
        kv_dtype=first.kv_dtype,
        layer_count=first.layer_count,
        kv_head_count=first.kv_head_count,
        head_size=first.head_size,
        chunk_size=chunk_size,
        mla=first.mla,
        format=NATIVE_TILES if native else TOKEN_MAJOR,
        tile_backend="CPU_ATTN" if native else "",
        tile_isa=first.tile_isa,
        block_size=first.block_size,
        hash_scheme=config.hash_scheme,
        vocab_size=model.get_vocab_size(),
        rule=first.rule,
        span=first.span,
        layers=first.layers,
        more_parts=tuple(parts[1:]),
        weight_version=config.weight_version,
        accepts_lossy=config.accept_lossy,
    )
    return EngineKv(spec=spec, groups=tuple(groups), hash_block_size=hash_block_size(kv_cache_config))


def check_reuse(vllm_config: VllmConfig, caches: Sequence[KVCacheSpec]) -> None:
    """Raises `ConfigError` unless vLLM itself may reuse prefixes of this model: tokens up to a token then decide its
    KV. A user's own `--no-enable-prefix-caching` is no such statement.

    All answers are vLLM's: of the model's configuration (pooling that needs the hidden states of the whole prompt,
    encoders, models without attention), and of each layer's cache (prefix-LM attention, caches that are not reusable).
    """
    model = vllm_config.model_config
    reasons = {
        "the model keeps no KV cache": not caches,
        f"vLLM does not reuse prefixes of it ({_kind_of(model)})": not model.is_prefix_caching_supported,
        "its prompts are attended to in both directions, so the KV of a token depends on later tokens": (
            any(getattr(cache, "non_causal", False) for cache in caches)  # kinds of attention besides full have none
            or vllm_config.attention_config.use_non_causal
            or model.is_diffusion
        ),
        "vLLM does not reuse all of its KV cache": not all(cache.prefix_cacheable for cache in caches),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"LMKVConnector: model {served_names(model)[0]} cannot be cached: {reason}; {REMEDY}")


def _kind_of(model: ModelConfig) -> str:
    pooler = model.pooler_config
    kinds = (pooler.seq_pooling_type, pooler.tok_pooling_type) if pooler else ()
    pooling = ", ".join(f"{kind} pooling" for kind in kinds if kind)
    return ", ".join(filter(None, (f"attention: {model.attn_type}", pooling)))


def check_elements(cache: AttentionSpec, cache_dtype: str) -> None:
    """Raises `ConfigError` unless pages hold keys and values of one known element type and nothing besides.

    Quantized caches keep scales per token, head or group of elements, in formats of their own, or compress several
    tokens into one state: chunks would not have all that reading them needs. `fp8` has one scale per tensor, which is
    part of the weights.
    """
    value_size = 0 if isinstance(cache, MLAAttentionSpec) else cache.head_size
    # A platform may register a dtype of its own under any name, `fp8` too: it then has another mode.
    known: dict[int, tuple[str, ...]] = {
        KVQuantMode.NONE: (*PLAIN_DTYPES, *PER_TENSOR_DTYPES),
        KVQuantMode.FP8_PER_TENSOR: tuple(PER_TENSOR_DTYPES),
    }
    refusals = {
        f"kv_cache_dtype {cache_dtype}: its pages have scales or a packing that chunks do not": (
            cache_dtype not in known.get(cache.kv_quant_mode, ())
        ),
        f"its values have {cache.head_size_v} elements per head, its keys {cache.head_size}": (
            cache.head_size_v not in (cache.head_size, value_size)
        ),
        "its pages hold one state for several tokens, or several for one": cache.tokens_per_state != 1,
        "its pages are packed in a way of their own": (
            cache.num_head_slots not in (None, cache.num_kv_heads)
            or cache.state_content_bytes not in (None, (cache.head_size + cache.head_size_v) * cache.dtype.itemsize)
            or getattr(cache, "model_version", None) is not None  # of MLA: DeepSeek V4
        ),
    }
    for reason, holds in refusals.items():
        if holds:
            raise ConfigError(f"LMKVConnector: this version of lmkv does not store this KV cache: {reason}; {REMEDY}")


def check_cache_kind(cache: KVCacheSpec, model_name: str) -> None:
    """Raises `ConfigError` unless it is known which pages of this kind a request keeps, and for how long.

    Subclasses are refused too: `RSWASpec` extends `FullAttentionSpec`, and its pages are freed.
    """
    known = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
    if type(cache) in known:
        return
    raise ConfigError(
        f"LMKVConnector: model {model_name} has a KV cache of kind {type(cache).__name__}, this version of lmkv "
        f"supports {', '.join(kind.__name__ for kind in known)}; {REMEDY}"
    )


def _check_engine(vllm_config: VllmConfig, config: ConnectorConfig) -> None:
    """Raises `ConfigError` if the engine is of a kind that this version does not serve."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    device = vllm_config.device_config.device_type
    heads = _head_count(vllm_config)
    ranks = parallel.tensor_parallel_size
    refusals = {
        f"device: KV cache on {device} cannot be moved by this version of lmkv, only on cpu and cuda": (
            device not in ("cpu", "cuda")
        ),
        "use_mla: vLLM's CPU backend reads MLA that was not computed in the same step inexactly, and switches its own "
        "prefix cache off for it": model.use_mla and device == "cpu",
        "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT: pages hold the elements of their tokens in an order of their own": (
            envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT
        ),
        "kv_format: native tiles are for CPUs; use token_major": config.kv_format == "native" and device != "cpu",
        "share_across_engines: only vLLM reads native tiles; use kv_format token_major": (
            config.share_across_engines and config.kv_format == "native"
        ),
        "prefill_context_parallel_size, decode_context_parallel_size: this version of lmkv supports 1": (
            parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size != 1
        ),
        f"tensor_parallel_size: {heads} KV heads cannot be split evenly over {ranks} ranks": (
            heads % ranks != 0 and ranks % heads != 0
        ),
    }
    for reason, refused in refusals.items():
        if refused:
            raise ConfigError(f"LMKVConnector: {reason}; {REMEDY}")


def _is_native(vllm_config: VllmConfig, config: ConnectorConfig) -> bool:
    on_cpu = vllm_config.device_config.device_type == "cpu"
    is_shared = config.share_across_engines
    return config.kv_format == "native" or (config.kv_format == "auto" and on_cpu and not is_shared)


def _head_count(vllm_config: VllmConfig) -> int:
    """KV heads of the model, over all tensor-parallel ranks."""
    model = vllm_config.model_config
    return 1 if model.use_mla else model.get_total_num_kv_heads()


def _part(vllm_config: VllmConfig, cache: KVCacheSpec, *, native: bool) -> KvPart:
    """The part of layers that have a cache of this kind, as if it had one layer."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if isinstance(cache, MambaSpec):
        return KvPart(
            rule=PART_RULE_END,
            layer_count=1,
            kv_head_count=1 if cache.tp_replicated else ranks,
            head_size=cache.state_content_size_bytes,
            kv_dtype="int8",
        )
    assert isinstance(cache, AttentionSpec)
    heads = _head_count(vllm_config)
    if cache.num_kv_heads * ranks > heads >= ranks or cache.num_kv_heads * ranks < heads:
        heads = cache.num_kv_heads * ranks  # layers of this kind have another number of heads than most
    rule, span = PART_RULE_ALL, 0
    if isinstance(cache, SlidingWindowSpec):
        rule, span = PART_RULE_LAST, cache.sliding_window + cache.extra_retained_tokens
    elif isinstance(cache, ChunkedLocalAttentionSpec):
        rule, span = PART_RULE_SINCE_MULTIPLE, cache.attention_chunk_size
    return KvPart(
        rule=rule,
        span=span,
        layer_count=1,
        kv_head_count=heads,
        head_size=cache.head_size,
        kv_dtype=kv_dtype(cache, vllm_config.cache_config.cache_dtype),
        mla=vllm_config.model_config.use_mla,
        tile_isa=tile_isa(vllm_config, cache.head_size, cache.block_size) if native else "",
        block_size=cache.block_size if native else 0,
    )


def _in_whole_pages(part: KvPart, kinds: Sequence[KvPart], caches: Sequence[KVCacheSpec], chunk_size: int) -> KvPart:
    """Keeps a window that is shorter than a chunk from the beginning of a page on.

    A load fills whole pages: vLLM takes each page for complete, also for hits that end earlier.
    """
    if part.rule != PART_RULE_LAST or part.span - 1 >= chunk_size:
        return part
    blocks = {cache.block_size for kind, cache in zip(kinds, caches, strict=True) if kind.span == part.span}
    return replace(part, block_size=max(blocks))


def _chunk_size(
    parts: Sequence[KvPart], caches: Sequence[KVCacheSpec], hit_alignment: int, config: ConnectorConfig
) -> int:
    """Tokens per chunk: as configured, if hits can end where chunks end. Raises `ConfigError` if they cannot.

    vLLM offers states only at its hit alignment, so models with states have chunks of that size.
    """
    size = config.chunk_size
    if any(part.rule == PART_RULE_END for part in parts) and hit_alignment and size != hit_alignment:
        if size != DEFAULT_CHUNK_SIZE:
            raise ConfigError(
                f"chunk_size: {size} tokens, but vLLM keeps the states of this model every {hit_alignment} tokens; set "
                f"chunk_size to {hit_alignment}, or leave it out",
                key="chunk_size",
            )
        logger.info("chunk_size: %d, where vLLM keeps the states of this model", hit_alignment)
        size = hit_alignment
    if len(caches) > 1 and (wrong := [cache.block_size for cache in caches if size % cache.block_size]):
        raise ConfigError(
            f"chunk_size: {size} is not a multiple of {wrong[0]}, the block size of some layers of this model",
            key="chunk_size",
        )
    for part in parts:
        if part.rule == PART_RULE_SINCE_MULTIPLE and part.span % size and size % part.span:
            raise ConfigError(
                f"chunk_size: {size} tokens neither divide the {part.span} tokens of the model's local attention "
                f"chunks nor are a multiple of them; set chunk_size to {part.span} or a divisor of it",
                key="chunk_size",
            )
    return size


def _digest(layer_names: Sequence[str]) -> str:
    return sha256(pack_fields(name.encode() for name in layer_names)).hexdigest()[:32]


def kv_dtype(cache: AttentionSpec, cache_dtype: str) -> str:
    """The element type of a layer's pages by lmkv's name for it.

    Layers that vLLM's `kv_cache_dtype_skip_layers` names keep the model's own type.
    """
    if cache_dtype in PER_TENSOR_DTYPES and cache.kv_quant_mode:
        return PER_TENSOR_DTYPES[cache_dtype]
    return str(cache.dtype).removeprefix("torch.")


def tile_isa(vllm_config: VllmConfig, head_size: int, block_size: int) -> str:
    """Names the packing of a block by vLLM's CPU attention: its kernel, the machine, the vector width."""
    import torch

    isa = attention_isa(vllm_config, head_size, block_size)
    width = "avx512" if torch.cpu._is_avx512_supported() else "base"
    return f"{isa}-{platform.machine()}-{width}"
