"""Stages of a pipeline: which layers they have, and how their workers are numbered."""

from __future__ import annotations

import pytest

from lmkv.errors import ConfigError
from lmkv_client.connector.identity import first_layer, stage_layers, worker_rank


def names(layers: range) -> list[str]:
    return [f"language_model.model.layers.{layer}.self_attn.attn" for layer in layers]


@pytest.mark.parametrize(("layer_count", "stage_count"), [(5, 2), (4, 2), (7, 3), (61, 4)])
def test_the_stages_have_every_layer_once_and_in_order(layer_count: int, stage_count: int) -> None:
    stages = [stage_layers(layer_count, stage, stage_count) for stage in range(stage_count)]
    assert [layer for stage in stages for layer in stage] == list(range(layer_count))
    for stage, layers in enumerate(stages):
        assert first_layer(names(layers), layer_count, stage, stage_count) == layers.start


def test_an_uneven_division_is_vllms() -> None:
    assert [stage_layers(5, stage, 2) for stage in range(2)] == [range(3), range(3, 5)]


def test_layers_are_divided_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,4")
    assert first_layer(names(range(1, 5)), 5, 1, 2) == 1


def test_without_a_pipeline_layers_may_have_any_names() -> None:
    assert first_layer(["encoder", "decoder"], 2, 0, 1) == 0


@pytest.mark.parametrize(
    "layer_names", [names(range(3, 6)), names(range(5)), [*names(range(3, 5)), "draft"], names(range(4, 2, -1))]
)
def test_a_stage_that_keeps_pages_for_other_layers_is_refused(layer_names: list[str]) -> None:
    with pytest.raises(ConfigError, match="stage 1 should keep pages for layers 3 to 4"):
        first_layer(layer_names, 5, 1, 2)


def test_workers_are_numbered_stage_by_stage() -> None:
    assert [worker_rank(stage, rank, 2) for stage in range(2) for rank in range(2)] == [0, 1, 2, 3]
