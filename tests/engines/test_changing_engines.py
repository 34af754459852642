"""The engines of a proxy change under load: no request fails, and streams stay whole."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from lmkv.cli import main
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.process import CheckedServer, free_port
from tests.engines.faults import eventually
from tests.waiting import WAIT_SECONDS

PROMPT_TOKENS = 300
STREAM_TOKENS = 400
OUTPUT_TOKENS = 8


class Router(Endpoint, CheckedServer):
    """A proxy in mode route, whose file names its engines."""

    def __init__(self, folder: Path, file: Path, model: str) -> None:
        Endpoint.__init__(self, "router", free_port(), model)
        command = [sys.executable, "-m", "lmkv", "proxy", "--mode", "route", "--port", str(self.port)]
        command += ["--engines-file", str(file), "--health-interval", "200ms", "--policy", "round_robin"]
        command += ["--health-timeout", f"{WAIT_SECONDS}s"]  # engines that are busy for long lose no request
        CheckedServer.__init__(self, "router", command, folder / "router.log", None)

    def is_ready(self) -> bool:
        """Whether an engine is available."""
        return self.answers("/readyz")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two engines and a coordinator."""
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Cluster(Path(folder), tiny_model, logs=tmp_path_factory.mktemp("logs")) as cluster,
    ):
        cluster.add_engine("first")
        cluster.add_engine("second")
        cluster.start_engines()
        yield cluster


def test_engines_are_added_and_drained_under_load(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.engines["first"], cluster.engines["second"]
    urls = [f"http://127.0.0.1:{engine.port}" for engine in (first, second)]
    file = tmp_path / "engines.yaml"
    file.write_text(f"engines: ['{urls[0]}']\n")
    proxy = Router(tmp_path, file, first.model_name)
    prompt = [random.Random(1).randrange(2, 500) for _ in range(PROMPT_TOKENS)]
    expected = first.complete(prompt, STREAM_TOKENS).token_ids
    stop = Event()

    def ask(seed: int) -> int:
        numbers, count = random.Random(seed), 0
        while not stop.is_set():
            proxy.complete([numbers.randrange(2, 500) for _ in range(PROMPT_TOKENS)], OUTPUT_TOKENS)
            count += 1
        return count

    def served() -> float:
        return sum(second.metrics().get(name, 0.0) for name in ("vllm:request_success_total",))

    proxy.start()
    try:
        proxy.wait_ready()
        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask, seed) for seed in (2, 3)]
            try:
                tokens = proxy.stream(prompt, STREAM_TOKENS)
                answer = [one for _ in range(3) for one in next(tokens).token_ids]
                assert main(["engines", "add", urls[1], "--proxy", f"http://127.0.0.1:{proxy.port}"]) == 0
                before = served()
                eventually(lambda: served() > before, "the second engine gets requests")
                drain = pool.submit(main, ["engines", "drain", urls[0], "--proxy", f"http://127.0.0.1:{proxy.port}"])
                answer += [one for token in tokens for one in token.token_ids]
                assert tuple(answer) == expected
                assert drain.result() == 0
                before = served()
                eventually(lambda: served() > before + 2, "the second engine serves alone")
            finally:
                stop.set()
            assert all(one.result() > 0 for one in asking), "no request failed"
    finally:
        proxy.stop()
