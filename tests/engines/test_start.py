"""What an engine prints when it starts: each notice once, and a refused configuration last.

One engine starts as users start it; the others are forked.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.engine import LMKV_TRANSFER_CONFIG
from lmkv_client.demo.process import ServerProcess, launch
from tests.engines.conftest import SETTINGS
from tests.engines.llm import READY_TIMEOUT_SECONDS

SEVERAL_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture
def cluster(tiny_model: Path, tmp_path: Path) -> Iterator[Cluster]:
    """No engine yet, and no coordinator."""
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Cluster(Path(folder), tiny_model, logs=tmp_path, settings=SETTINGS, coordinator=False) as cluster,
    ):
        yield cluster


TOO_LARGE = "max_local_cpu_size is 900.00 TiB, this machine and its cgroup can give "


@pytest.mark.parametrize(
    ("extra", "environment", "is_forked", "error"),
    [
        (
            {"chunk_sise": 256},
            {},
            True,
            "unknown key chunk_sise in kv_connector_extra_config; did you mean chunk_size?",
        ),
        ({"chunk_size": "many"}, SEVERAL_PROCESSES, False, "chunk_size must be a number of tokens above 0"),
        ({"max_local_cpu_size": "900TiB"}, SEVERAL_PROCESSES, True, TOO_LARGE),
        (
            {"transfer_channel": "nixl", "nixl_backends": "CARRIER"},
            SEVERAL_PROCESSES,
            True,
            "nixl_backends: CARRIER did not start",
        ),
    ],
)
def test_a_refused_configuration_is_the_last_line_of_an_engine_that_has_loaded_nothing(
    cluster: Cluster,
    extra: dict[str, object],
    environment: dict[str, str],
    is_forked: bool,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_forked:
        monkeypatch.setattr(ServerProcess, "launch", staticmethod(launch))
    config = {**LMKV_TRANSFER_CONFIG, "kv_connector_extra_config": extra}
    engine = cluster.add_engine("engine-1", transfer_config=config, environment=environment, kv_cache_bytes=64 << 20)
    engine.ready_timeout_seconds = READY_TIMEOUT_SECONDS
    with pytest.raises(LmkvError):
        cluster.start_engines()
    log = engine.log()
    assert log.rstrip("\n").splitlines()[-1].startswith(f"lmkv: error: {error}")
    assert "Traceback" not in log
    assert "Initializing a V1 LLM engine" not in log, "the model would be loaded next"


def test_notices_appear_once_in_an_engine_of_several_ranks(cluster: Cluster) -> None:
    engine = cluster.add_engine(
        "engine-1",
        {"LMKV_PD_BUFFER_DEVICE": "cuda"},
        kv_cache_bytes=64 << 20,
        transfer_config={
            **LMKV_TRANSFER_CONFIG,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"remote_serde": "naive"},
        },
        extra_arguments=("--tensor-parallel-size", "2"),
        environment=SEVERAL_PROCESSES,
    )
    engine.ready_timeout_seconds = READY_TIMEOUT_SECONDS
    cluster.start_engines()
    for notice in (
        "remote_serde in kv_connector_extra_config is ignored",
        "kv_load_failure_policy: ",
        "pd_buffer_device: ",
    ):
        assert len(re.findall(re.escape(notice), engine.log())) == 1, (notice, json.dumps(engine.log()[-3000:]))


OFFLINE = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(
    sys.argv[1], dtype="float32", block_size=32, max_model_len=512, max_num_seqs=2, kv_cache_memory_bytes=64 << 20,
    enforce_eager=True, kv_transfer_config={"kv_connector": "LMKVConnector", "kv_role": "kv_both"},
)
prompt = {"prompt_token_ids": [7 * token % 400 + 50 for token in range(300)]}
llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
print("answered")
"""
"""A script as users write it: it ends without closing anything."""


def test_an_offline_script_ends_without_a_traceback(tiny_model: Path, short_folder: Path) -> None:
    environment = os.environ | SETTINGS | {"LMKV_RUNTIME_DIR": str(short_folder), "LMKV_NODE_LINGER": "0"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tiny_model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=READY_TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("answered")
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
