"""Engines whose prefixes vLLM itself does not reuse are refused in one line; those that it reuses are served."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm.config.pooler import TOK_POOLING_TYPES

from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster
from tests.engines.conftest import SETTINGS
from tests.engines.llm import READY_TIMEOUT_SECONDS
from tests.support.models import make_unusual

EMBEDDING = ("--runner", "pooling", "--convert", "embed")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """No engine yet, and no coordinator."""
    logs = tmp_path_factory.mktemp("logs")
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Cluster(Path(folder), tiny_model, logs=logs, settings=SETTINGS, coordinator=False) as cluster,
    ):
        yield cluster


MORE = pytest.mark.more_models


def pooling(kind: str) -> tuple[str, ...]:
    """Arguments of an engine that pools in this way."""
    is_tokenwise = kind in TOK_POOLING_TYPES
    level, task = ("tok", "token_embed") if is_tokenwise else ("seq", "embed")
    return (*EMBEDDING, "--pooler-config", json.dumps({f"{level}_pooling_type": kind, "task": task}))


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        pytest.param("prefix_lm", (), "its prompts are attended to in both directions", id="prefix-LM"),
        pytest.param("", pooling("MEAN"), "vLLM does not reuse prefixes of it", id="MEAN"),
        pytest.param("", pooling("CLS"), "vLLM does not reuse prefixes of it", id="CLS", marks=MORE),
        pytest.param("", pooling("STEP"), "vLLM does not reuse prefixes of it", id="STEP", marks=MORE),
        pytest.param("encoder", ("--runner", "pooling"), "the model keeps no KV cache", id="encoder", marks=MORE),
        pytest.param(
            "encoder_decoder", (), "vLLM does not reuse prefixes of it (attention: encoder_decoder)", marks=MORE
        ),
        pytest.param("mamba", (), "vLLM does not reuse prefixes of it (attention: attention_free)", marks=MORE),
    ],
)
def test_an_engine_whose_prefixes_cannot_be_reused_ends_with_one_line(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, name: str, arguments: tuple[str, ...], reason: str
) -> None:
    model = make_unusual(tmp_path / "model", name) if name else tiny_model
    engine = cluster.add_engine(
        f"refused-{len(cluster.engines)}",
        model=model,
        context_tokens=256 if name == "encoder_decoder" else 512,
        kv_cache_bytes=64 << 20,
        extra_arguments=arguments,
    )
    engine.ready_timeout_seconds = READY_TIMEOUT_SECONDS
    engine.start()
    with pytest.raises(LmkvError):
        engine.wait_ready()
    last = engine.log().rstrip("\n").splitlines()[-1]
    assert last.startswith(f"lmkv: error: LMKVConnector: model {model.name} cannot be cached: {reason}")
    assert last.endswith("remove --kv-transfer-config or change the engine")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("LAST", ("--no-enable-prefix-caching",), id="LAST, no cache of its own"),
        pytest.param("LAST", (), id="LAST", marks=MORE),
        pytest.param("ALL", (), id="ALL", marks=MORE),
    ],
)
def test_other_pooling_is_served_and_answers_the_same(cluster: Cluster, kind: str, more: tuple[str, ...]) -> None:
    engine = cluster.add_engine(
        f"served-{len(cluster.engines)}",
        context_tokens=512,
        kv_cache_bytes=64 << 20,
        extra_arguments=(*pooling(kind), *more),
    )
    engine.ready_timeout_seconds = READY_TIMEOUT_SECONDS
    engine.start()
    engine.wait_ready()
    is_tokenwise = kind in TOK_POOLING_TYPES
    body = {
        "task": "token_embed" if is_tokenwise else "embed",
        "model": engine.model.name,
        "input": [7 * token % 400 + 50 for token in range(300)],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.port}/pooling",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    first, second = (
        np.array(json.loads(urllib.request.urlopen(request, timeout=READY_TIMEOUT_SECONDS).read())["data"][0]["data"])
        for _ in range(2)
    )
    assert first.shape == second.shape
    assert first.shape[:-1] == ((300,) if is_tokenwise else ())
    assert second == pytest.approx(first, abs=1e-5)
    if more:
        assert engine.metrics()["lmkv:loaded_tokens_total"] == 256
    engine.stop()
