"""The engines' commands, as vLLM itself reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.helm.chart import Manifest, manifests_of, pods

READ = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
for command in json.load(sys.stdin):
    read = parser.parse_args(command)
    transfer = read.kv_transfer_config
    parsed = [read.model_tag, read.host, read.port, read.shutdown_timeout, transfer.kv_connector, transfer.kv_role]
    ranks = [read.headless, read.data_parallel_size, read.data_parallel_size_local, read.data_parallel_start_rank]
    print("read:", json.dumps([*parsed, *ranks, read.data_parallel_address]))
"""
"""What vLLM makes of command lines, without starting anything."""


@pytest.mark.timeout(600)
def test_vllm_accepts_the_arguments_of_the_chart() -> None:
    commands = {
        name.rpartition("-")[2] + pod["metadata"]["labels"].get("lmkv/place", ""): executed(pod)
        for case in ("engines", "prefill-decode", "hosts")
        for name, pod in pods(manifests_of(case))
        if "/demo-lmkv-engine-" in name and (case, name) != ("hosts", "StatefulSet/demo-lmkv-engine-llama")
    }
    assert all(command[0] == "vllm" for command in commands.values())
    arguments = json.dumps([command[1:] for command in commands.values()])
    done = subprocess.run(
        [sys.executable, "-c", READ], input=arguments, capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stderr
    read = [json.loads(line.removeprefix("read:")) for line in done.stdout.splitlines() if line.startswith("read:")]
    llama = "meta-llama/Llama-3.1-8B-Instruct"
    alone = [False, 1, None, None, None]
    spread = ["deepseek-ai/DeepSeek-V3", "0.0.0.0", 8000, 60, "LMKVConnector", "kv_both"]
    assert dict(zip(commands, read, strict=True)) == {
        "llama": [llama, "0.0.0.0", 8000, 60, "LMKVConnector", "kv_both", *alone],
        "qwen": ["/models/qwen", "0.0.0.0", 8000, 60, "LMKVConnector", "kv_both", *alone],
        "prefill": [llama, "0.0.0.0", 8000, 60, "LMKVConnector", "kv_producer", *alone],
        "decode": [llama, "0.0.0.0", 8000, 60, "LMKVConnector", "kv_consumer", *alone],
        "hostsleader": [*spread, False, 16, 8, None, "10.0.0.1"],
        "hostsworker": [*spread, True, 16, 8, 8, "leader.prod"],
    }


def executed(pod: Manifest) -> list[str]:
    """The command of an engine after its variables are expanded, by Kubernetes and by the shell of workers."""
    variables = {"POD_IP": "10.0.0.1", "LWS_LEADER_ADDRESS": "leader.prod"}
    command = [
        re.sub(r"^\$\((\w+)\)$", lambda found: variables[found[1]], word)
        for word in pod["spec"]["containers"][0]["command"]
    ]
    if command[0] != "sh":
        return command
    shown = [command[0], "-c", command[2].replace("exec vllm", "printf '%s\\n' vllm"), *command[3:]]
    done = subprocess.run(
        shown, env={**os.environ, "LWS_WORKER_INDEX": "1"}, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()
