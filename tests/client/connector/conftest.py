"""Imports vLLM before the tests do, and makes its configuration for a tiny model, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM warns about on the way is not ours to mend
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from tests.client.connector.simulated_engine import SimulatedEngine
    from tests.client.connector.simulated_models import BLOCK

from lmkv_client.demo.model import make_model

MAX_TOKENS = 4096


def make_vllm_config(model: Path, **arguments: Any) -> VllmConfig:
    """What `vllm serve` would make of these arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EngineArgs(
            model=str(model),
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=8192,
            block_size=BLOCK,
            enforce_eager=True,
            **arguments,
        ).create_engine_config()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def scripted_config(tiny_model: Path) -> VllmConfig:
    """vLLM's configuration with the connector whose node is scripted."""
    return make_vllm_config(
        tiny_model,
        kv_transfer_config={
            "kv_connector": "ScriptedConnector",
            "kv_connector_module_path": "tests.client.connector.simulated_engine",
            "kv_role": "kv_both",
        },
    )


@pytest.fixture
def make_engine(scripted_config: VllmConfig) -> Callable[..., SimulatedEngine]:
    return lambda **options: SimulatedEngine(scripted_config, **options)
