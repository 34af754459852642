"""Outputs of encoders as chunks of the node's pool: their spec, their keys, and the messages of the two sides.

An output is a tensor of one row for each place that the medium has in its prompt. A row is one or several times as wide
as a token's embedding: models with DeepStack pack several layers. The output is stored in runs of embeddings, the last
of which may be shorter; all of them are needed:

    name_i = SHA-256("lmkv.encoder" ‖ digest of the medium ‖ places ‖ embeddings a place ‖ i)      key_i: that of a page
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv.keys import MEDIA_HASH_SCHEME, ChunkKey
from lmkv.spec import KvSpec
from lmkv_client.connector.encoder.ec_api import ECConnectorMetadata, ECConnectorWorkerMetadata
from lmkv_client.connector.identity import changed_modes, loaded_after, model_identity, served_names
from lmkv_client.connector.vllm_api import VllmConfig
from lmkv_client.engine import Engine
from lmkv_client.model_identity import digest_of

CHUNK_ROWS = 128
"""Embeddings in a chunk. A picture has some hundred, and the extent of its last chunk is cut to size when it is
committed."""
DTYPES = ("float32", "bfloat16", "float16")


def encoder_spec(vllm_config: VllmConfig, config: ConnectorConfig) -> KvSpec:
    """The spec of what this engine's encoders make. Its model is shown as `NAME encoder`.

    Reads the weights' files, which may take a while. Raises `ConfigError` if the weights are not known, or the model
    has no encoder whose outputs vLLM keeps.
    """
    model = vllm_config.model_config
    name = served_names(model)[0]
    if model.multimodal_config is None or model.is_encoder_decoder:
        raise ConfigError(
            f"LMKVECConnector: model {name} has no encoder whose outputs vLLM keeps for decoders; remove "
            "--ec-transfer-config"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"LMKVECConnector: dtype {dtype} is unknown; use one of {', '.join(DTYPES)}")
    identity = config.model_id or model_identity(model, vllm_config.load_config, loaded_after(vllm_config))
    return KvSpec(
        model_name=f"{name} encoder",
        model_id=digest_of("encoder", identity, *changed_modes(vllm_config)),
        kv_dtype=dtype,
        layer_count=1,
        kv_head_count=1,
        head_size=model.get_inputs_embeds_size(),
        chunk_size=CHUNK_ROWS,
        mla=True,
        hash_scheme=MEDIA_HASH_SCHEME,
        weight_version=config.weight_version,
    )


class OutputWidths:
    """Width of a row of the output, in embeddings, by modality.

    vLLM measures the width at the start of an engine that produces outputs; of others it follows from the model's
    configuration.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._hidden = vllm_config.model_config.get_inputs_embeds_size()
        self._measured: Mapping[str, int] = vllm_config.ec_transfer_config.mm_encoder_output_widths
        vision = getattr(vllm_config.model_config.hf_config, "vision_config", None)
        self._configured = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())

    def of(self, modality: str) -> int:
        """Embeddings in a row; 0 if rows have other elements behind their embeddings, so that they are not stored."""
        if modality not in self._measured:
            return self._configured
        embeddings, rest = divmod(self._measured[modality], self._hidden)
        return 0 if rest else embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputName:
    """One output: the keys of its chunks, and its shape."""

    keys: tuple[ChunkKey, ...]
    place_count: int
    embeddings: int
    """Embeddings a place."""
    owner: bytes = b""
    """The root of the keys of its salt, whose quota it takes."""

    @property
    def row_count(self) -> int:
        """Embeddings in all: tokens of its chunks."""
        return self.place_count * self.embeddings

    @classmethod
    def of(cls, engine: Engine, digest: bytes, place_count: int, embeddings: int, *, salt: str) -> OutputName:
        """Names the output of a medium by the digest of its content. Another cache salt gives another name."""
        shape = place_count.to_bytes(8, "little") + embeddings.to_bytes(8, "little")
        names = [
            sha256(b"lmkv.encoder" + digest + shape + index.to_bytes(8, "little")).digest()
            for index in range(-(-place_count * embeddings // CHUNK_ROWS))
        ]
        keys = tuple(engine.foreign_keys(names, salt=salt))
        owner = engine.root(salt=salt)
        return cls(keys=keys, place_count=place_count, embeddings=embeddings, owner=owner)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedOutput:
    """An output in the pool, on its way to the workers: its bytes, chunk by chunk, and its shape."""

    chunks: tuple[NDArray[np.uint8], ...]
    """Views of the pool in the process that schedules; copies elsewhere."""
    place_count: int
    embeddings: int


@dataclass(kw_only=True)
class EncoderPlan(ECConnectorMetadata):
    """The outputs that the workers load and store in a step, by vLLM's names of the media."""

    loads: dict[str, LoadedOutput] = field(default_factory=dict)
    """Outputs that take the place of a run of the encoder."""
    stores: dict[str, OutputName] = field(default_factory=dict)
    """Outputs that the encoder makes in this step."""
    spec: KvSpec | None = None
    """The spec of the stores."""


@dataclass
class EncoderReport(ECConnectorWorkerMetadata):
    """The counts of a worker since its last report."""

    counts: dict[str, int]

    def aggregate(self, other: Any) -> EncoderReport:
        """Both ranks' counts."""
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        return self
