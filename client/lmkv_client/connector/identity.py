"""The identity of an engine's KV: its KvSpec, and digests of weights and adapters."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv.packing import pack_fields
from lmkv.spec import NATIVE_TILES, TOKEN_MAJOR, KvSpec
from lmkv_client.plugin import SERVED_NAMES

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLE_COUNT = 256
SAMPLE_BYTES = 16 << 10
VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")
"""Entries of a model's configuration that do not change what it computes, or that KvSpec holds by itself."""

REMEDY = "remove --kv-transfer-config or change the engine"


def kv_spec(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig) -> KvSpec:
    """The spec of this engine. Raises `ConfigError` if its KV is of a kind that this version cannot move."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        check_cache_kind(groups[0].kv_cache_spec, served_names(model)[0])
    device = vllm_config.device_config.device_type
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    ranks = parallel.tensor_parallel_size
    native = config.kv_format == "native" or (config.kv_format == "auto" and device == "cpu")
    refusals = {
        f"KV-cache groups: the model has {len(groups)}, this version of lmkv moves 1": len(groups) != 1,
        f"device: KV cache on {device} cannot be moved by this version of lmkv, only on cpu and cuda": (
            device not in ("cpu", "cuda")
        ),
        "use_mla: the CPU backend packs MLA in a way that this version of lmkv does not know": (
            model.use_mla and device == "cpu"
        ),
        "kv_format: native tiles are for CPUs; use token_major": native and device != "cpu",
        "pipeline_parallel_size: this version of lmkv supports 1": parallel.pipeline_parallel_size != 1,
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
    group = groups[0]
    cache = group.kv_cache_spec
    tiles = (
        {
            "tile_backend": "CPU_ATTN",
            "tile_isa": tile_isa(vllm_config, cache.head_size, cache.block_size),
            "block_size": cache.block_size,
        }
        if native
        else {}
    )
    return KvSpec(
        model_name=served_names(model)[0],
        model_id=config.model_id or engine_identity(vllm_config),
        kv_dtype=kv_dtype(vllm_config.cache_config.cache_dtype, str(cache.dtype)),
        layer_count=len(group.layer_names),
        kv_head_count=heads,
        head_size=cache.head_size,
        chunk_size=config.chunk_size,
        mla=model.use_mla,
        format=NATIVE_TILES if native else TOKEN_MAJOR,
        vocab_size=model.get_vocab_size(),
        **tiles,
    )


def check_cache_kind(cache: KVCacheSpec, model_name: str) -> None:
    """Raises `ConfigError` unless a request keeps the pages of all its tokens: full attention and MLA do.

    vLLM frees the pages of other kinds while their request runs, and replaces them by its null page. Subclasses are
    refused too: `RSWASpec` extends `FullAttentionSpec`, and its pages are freed.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    if type(cache) in (FullAttentionSpec, MLAAttentionSpec):
        return
    advice = REMEDY
    if type(cache) is SlidingWindowSpec:
        advice = (
            "remove --kv-transfer-config, or add --disable-sliding-window, which limits max_model_len to the window of "
            f"{cache.sliding_window} tokens"
        )
    raise ConfigError(
        f"LMKVConnector: model {model_name} has a KV cache of kind {type(cache).__name__}, this version of lmkv "
        f"supports FullAttentionSpec and MLAAttentionSpec; {advice}"
    )


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """The KV heads that one rank has. Where ranks outnumber heads, or there is one latent for all, several have one."""

    first_head: int
    is_writer: bool
    """Whether the rank is the one that stores them."""

    @classmethod
    def of_rank(cls, rank: int, rank_count: int, kv_head_count: int) -> HeadShare:
        """The share of one of `rank_count` ranks."""
        per_head = max(1, rank_count // kv_head_count)
        return cls(first_head=rank * kv_head_count // rank_count, is_writer=rank % per_head == 0)


def served_names(model: ModelConfig) -> list[str]:
    """The names under which the model is served, the first of them first."""
    names = getattr(model, SERVED_NAMES, None) or model.served_model_name or str(model.model)
    return [names] if isinstance(names, str) else list(names)


def kv_dtype(cache_dtype: str, element: str) -> str:
    """The KV cache's element type by lmkv's name for it."""
    if cache_dtype.startswith("fp8"):
        return "fp8_e5m2" if "e5m2" in cache_dtype else "fp8_e4m3"
    return element.removeprefix("torch.")


def tile_isa(vllm_config: VllmConfig, head_size: int, block_size: int) -> str:
    """What decides how vLLM's CPU attention packs a block: its kernel's name, the machine, the vector width."""
    import torch

    isa = attention_isa(vllm_config, head_size, block_size)
    width = "avx512" if torch.cpu._is_avx512_supported() else "base"
    return f"{isa}-{platform.machine()}-{width}"


def attention_isa(vllm_config: VllmConfig, head_size: int, block_size: int) -> str:
    """The kernel that vLLM's CPU attention chooses, by its name for it."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    isa: str = _get_attn_isa(dtype, block_size, head_size, cache_dtype)
    return isa


def engine_identity(vllm_config: VllmConfig) -> str:
    """Identity of all weights that make KV: the model's, and those of a draft model whose layers are cached with it."""
    model = model_identity(vllm_config.model_config)
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return model
    draft = model_identity(speculative.draft_model_config)
    return sha256(pack_fields([model.encode(), draft.encode()])).hexdigest()[:32]


def model_identity(model: ModelConfig) -> str:
    """Identity of the weights: a digest over a local folder's content, or name and revision of a hub model."""
    architecture = {key: value for key, value in model.hf_config.to_dict().items() if key not in VOLATILE}
    fields = [json.dumps(architecture, sort_keys=True, default=str), str(model.quantization or "")]
    folder = Path(model.model)
    if folder.exists():
        fields.append(folder_digest(folder))
    else:
        commit = getattr(model.hf_config, "_commit_hash", None) or model.revision or "main"
        fields.append(f"{model.model}@{commit}")
    return sha256(pack_fields(field.encode() for field in fields)).hexdigest()[:32]


def folder_digest(folder: Path) -> str:
    """Digest over the weight files of a folder, or over a single file: names, sizes, and samples spread over each file.

    Reading all of a large model would take minutes; weights of another training run differ in every sample.
    """
    inside = folder.iterdir() if folder.is_dir() else [folder]
    files = sorted(path for path in inside if path.suffix in WEIGHT_SUFFIXES)
    return _files_digest(tuple((path, (status := path.stat()).st_size, status.st_mtime_ns) for path in files))


@lru_cache(maxsize=256)
def _files_digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Digest over files that have these sizes and were changed at these times: adapters are replaced in place."""
    digest = sha256()
    for path, size, _ in files:
        digest.update(pack_fields([path.name.encode(), str(size).encode()]))
        with path.open("rb") as file:
            for sample in range(SAMPLE_COUNT):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // max(1, SAMPLE_COUNT - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def lora_identity(lora: LoRARequest) -> str:
    """`name@digest` of an adapter: two adapters of one name are not the same."""
    folder = Path(lora.lora_path)
    digest: Any = folder_digest(folder) if folder.is_dir() else sha256(str(lora.lora_path).encode()).hexdigest()
    return f"{lora.lora_name}@{digest[:16]}"
