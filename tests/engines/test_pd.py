"""Prefill and decode engines behind the proxy, all real, against one engine that does both."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.proxy import Proxy
from tests.engines.llm import CALM, make_prompt

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Engines `single`, `prefill` and `decode`, without a coordinator, all ready."""
    settings = {f"LMKV_{key.upper()}": value for key, value in CALM.items()} | {"LMKV_SAVE_PARTIAL_CHUNKS": "true"}
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Cluster(
            Path(folder), tiny_model, logs=tmp_path_factory.mktemp("logs"), settings=settings, coordinator=False
        ) as cluster,
    ):
        cluster.add_engine("single", transfer_config=None)
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            cluster.add_engine(name, transfer_config={"kv_connector": "LMKVConnector", "kv_role": role})
        cluster.start_engines()
        yield cluster


@pytest.fixture(scope="module")
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """The proxy in front of them."""
    engines = cluster.engines
    with Proxy(cluster.logs, [engines["prefill"]], [engines["decode"]]) as proxy:
        yield proxy


def test_prefill_and_decode_say_what_one_engine_says(cluster: Cluster, proxy: Proxy) -> None:
    prompt = make_prompt(1, 1000)
    expected = cluster.engines["single"].complete(prompt)
    before = cluster.engines["decode"].metrics()
    answer = proxy.complete(prompt)
    print(answer, expected)
    print(proxy.log())
    print(cluster.engines["prefill"].log()[-3000:])
    print(cluster.engines["decode"].log()[-3000:])
    assert answer.token_ids == expected.token_ids
    after = cluster.engines["decode"].metrics()
    assert after["lmkv:loaded_tokens_total"] - before["lmkv:loaded_tokens_total"] == 1000
