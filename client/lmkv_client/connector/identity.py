"""The identity of an engine's KV: digests of weights and adapters, and the heads that a rank has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from lmkv.packing import pack_fields
from lmkv.spec import KvSpec
from lmkv_client.connector.vllm_api import LoRARequest, ModelConfig, VllmConfig
from lmkv_client.plugin import SERVED_NAMES

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLE_COUNT = 256
SAMPLE_BYTES = 16 << 10
VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")
"""Entries of a model's configuration that do not change what it computes, or that KvSpec holds by itself."""


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


def head_shares(spec: KvSpec, rank: int, rank_count: int) -> list[HeadShare]:
    """What one of `rank_count` tensor-parallel ranks has of each part."""
    return [HeadShare.of_rank(rank, rank_count, part.kv_head_count) for part in spec.parts]


def served_names(model: ModelConfig) -> list[str]:
    """The names under which the model is served, the first of them first."""
    names = getattr(model, SERVED_NAMES, None) or model.served_model_name or str(model.model)
    return [names] if isinstance(names, str) else list(names)


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
