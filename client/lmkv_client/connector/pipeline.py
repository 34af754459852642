"""Which layers of a model a stage of a pipeline-parallel engine has, and its workers' numbers."""

from __future__ import annotations

from collections.abc import Sequence

from lmkv.errors import ConfigError
from lmkv_client.connector.vllm_api import get_pp_indices


def worker_rank(stage: int, tensor_rank: int, tensor_ranks: int) -> int:
    """Number of a worker among those of its engine: stage by stage, as vLLM counts them."""
    return stage * tensor_ranks + tensor_rank


def stage_layers(layer_count: int, stage: int, stage_count: int) -> range:
    """The layers that vLLM gives to a stage; `layer_count` is that of the model."""
    return range(*get_pp_indices(layer_count, stage, stage_count))


def first_layer(layer_names: Sequence[str], layer_count: int, stage: int, stage_count: int) -> int:
    """Index in a chunk of the first layer that a stage keeps pages for, where all layers are of one kind.

    `layer_names` are those of the stage's KV-cache group. Raises `ConfigError` if it keeps pages for other layers than
    the stage's own, such as those of a draft model.
    """
    if stage_count == 1:
        return 0
    own = stage_layers(layer_count, stage, stage_count)
    if [_index(name) for name in layer_names] != list(own):
        raise ConfigError(
            f"LMKVConnector: pipeline_parallel_size: stage {stage} should keep pages for layers {own.start} to "
            f"{own.stop - 1} and keeps them for {', '.join(layer_names)}; use pipeline_parallel_size 1",
            key="pipeline_parallel_size",
        )
    return own.start


def _index(layer_name: str) -> int:
    """Index of a layer in the model, such as 3 of `model.layers.3.self_attn.attn`; -1 if the name has none."""
    return next((int(word) for word in layer_name.split(".") if word.isdigit()), -1)
