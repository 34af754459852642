"""The engines' commands, as vLLM itself reads them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helm.chart import manifests_of, pods

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
    print("read:", json.dumps(parsed))
"""
"""What vLLM makes of command lines, without starting anything."""


@pytest.mark.timeout(240)
def test_vllm_accepts_the_arguments_of_the_chart() -> None:
    commands = {
        name.rpartition("-")[2]: pod["spec"]["containers"][0]["command"]
        for case in ("engines", "prefill-decode")
        for name, pod in pods(manifests_of(case))
        if name.startswith("StatefulSet/demo-lmkv-engine-")
    }
    assert all(command[0] == "vllm" for command in commands.values())
    arguments = json.dumps([command[1:] for command in commands.values()])
    done = subprocess.run(
        [sys.executable, "-c", READ], input=arguments, capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stderr
    read = [json.loads(line.removeprefix("read:")) for line in done.stdout.splitlines() if line.startswith("read:")]
    llama = "meta-llama/Llama-3.1-8B-Instruct"
    assert dict(zip(commands, read, strict=True)) == {
        "llama": [llama, "0.0.0.0", 8000, 60, "LMKVConnector", "kv_both"],
        "qwen": ["/models/qwen", "0.0.0.0", 8000, 60, "LMKVConnector", "kv_both"],
        "prefill": [llama, "0.0.0.0", 8000, 60, "LMKVConnector", "kv_producer"],
        "decode": [llama, "0.0.0.0", 8000, 60, "LMKVConnector", "kv_consumer"],
    }
