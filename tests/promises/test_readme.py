"""What README, the pages that get people started, and CONTRIBUTING name exists.

`tests/engines/test_typed_commands.py` runs it; what it cannot run is checked here.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.promises.commands import bash_blocks, command_lines, make, takes
from tests.promises.conftest import Run
from tests.promises.get_started import NOT_RUN, PAGES, ROOT, RUN_BY_CI, is_run_by_ci, not_run

CHECKED = ("cd", "curl", "docker", "git", "helm", "kubectl", "lmkv", "make", "python", "vllm")
"""Programs whose command lines are checked here or by `test_typed_commands.py`, and those that every host has."""
SHELL = re.compile(r"(PROMPT=.*|for .*; do|done|ask( .*)?|ask\(\) \{|\}|#.*|)")
MAX_README_LINES = 140


def test_the_readme_fits_on_a_few_screens(root: Path) -> None:
    assert len((root / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_make_help_lists_few_targets_and_all_of_them_on_request() -> None:
    listed = {line.split()[1] for line in make("help").stdout.splitlines() if line.startswith("make ")}
    assert {"setup", "demo", "test", "nightly", "verify"} <= listed
    assert len(listed) <= 16
    everything = {
        line.split()[1] for line in make("help", "ARGS=--all").stdout.splitlines() if line.startswith("make ")
    }
    assert {"chaos", "soak", "fuzz", "verify-lint", *listed} <= everything


def test_every_reason_not_to_run_a_block_is_about_one() -> None:
    blocks = [(page, block) for page in PAGES for block in bash_blocks(page)]
    for name, words in NOT_RUN:
        assert any(page.name == name and block[0].startswith(words) for page, block in blocks), f"{name}: {words}"


def test_ci_runs_what_leads_from_an_empty_folder_to_the_demo_and_the_tests(
    root: Path, run: Run, tmp_path: Path
) -> None:
    """In a clone as `git clone` makes it, which is made here of this repository."""
    blocks = [(page, block) for page in PAGES for block in bash_blocks(page) if is_run_by_ci(page, block)]
    assert {page.name: block[0] for page, block in blocks}.keys() == RUN_BY_CI.keys()
    typed = [re.split(r" +#", line)[0] for _, block in blocks for line in block]
    script = (root / ".ci/run").read_text()
    made = [line for line in typed if line.startswith("make ")]
    assert {line for line in made if not re.search(rf"^{line}\b", script, re.MULTILINE)} == set()
    assert {"make demo", "make test"} <= set(made)
    (clone, enter) = (line for line in typed if line not in made)
    here = f'git -c url."{root}".insteadOf=https://github.com/lmkv/lmkv'
    run("bash", "-ec", clone.replace("git", here, 1), cwd=tmp_path)
    shown = make("-n", "demo", cwd=tmp_path / enter.removeprefix("cd ")).stdout
    assert shown.splitlines()[0] == "scripts/setup"
    assert shown.splitlines()[-1].strip() == ".venv/bin/lmkv demo"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_that_no_test_runs_is_of_a_program_that_is_checked(page: Path) -> None:
    for line in itertools.chain.from_iterable(block for block in bash_blocks(page) if not_run(page, block)):
        if not SHELL.fullmatch(line.strip()):
            assert line.split()[0] in CHECKED, line


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/get-started/cpu.md"])
def test_every_make_target_in_the_pages_exists(root: Path, page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = {word for line in command_lines(page, "make") for word in line[1:] if re.fullmatch(r"[a-z-]+", word)}
    assert named, "the page names no target; is the pattern still right?"
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_lmkv_command_exists_and_takes_its_flags(page: Path, pyproject: dict[str, Any]) -> None:
    points = pyproject["project"]["entry-points"]["lmkv.commands"]
    lines = command_lines(page, "lmkv")
    lines += [words for words in in_containers(page) if words[0] == "lmkv"]
    assert lines
    for _, name, *arguments in lines:
        assert name in points, f"the page names `lmkv {name}`"
        takes(EntryPoint(name, points[name], "lmkv.commands"), arguments)


def test_the_demo_takes_the_flags_that_the_page_passes_on(root: Path, pyproject: dict[str, Any]) -> None:
    command = EntryPoint("demo", pyproject["project"]["entry-points"]["lmkv.commands"]["demo"], "")
    passed_on = re.findall(r'make demo ARGS="([^"]*)"', (root / "docs/get-started/cpu.md").read_text())
    assert passed_on
    for arguments in passed_on:
        if arguments != "--help":
            takes(command, shlex.split(arguments))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_image_that_is_built_is_a_target_and_has_our_version(page: Path, pyproject: dict[str, Any]) -> None:
    version = pyproject["project"]["version"]
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE))
    builds = [words for words in command_lines(page, "docker") if words[1] == "build"]
    for words in builds:
        flags = dict(itertools.pairwise(words))
        assert (ROOT / flags["--file"]).is_file()
        assert flags["--target"] in targets | {"$image"}
        assert flags["--tag"].endswith(f":{version}")
    text = page.read_text()
    assert set(re.findall(r"for image in (.*); do", text)) <= {"lmkv lmkv-node lmkv-vllm"}
    assert {"lmkv", "lmkv-node", "lmkv-vllm"} <= targets


def test_the_gpu_page_names_the_image_of_vllm_that_ours_is_made_of(root: Path) -> None:
    named = re.findall(r"vllm/vllm-openai:v[0-9.]+[0-9]", (root / "docs/get-started/gpu.md").read_text())
    assert named
    assert set(named) == {
        *re.findall(r"ARG VLLM_IMAGE=docker.io/(vllm/vllm-openai:\S+)", (root / "docker/Dockerfile").read_text())
    }


def in_containers(page: Path) -> list[list[str]]:
    """What the page's `docker run` lines run: the entry point and the words behind the image."""
    runs = [words for words in command_lines(page, "docker") if words[1] == "run"]
    found = []
    for words in runs:
        image = next(at for at, word in enumerate(words) if word.startswith("lmkv-vllm:"))
        found.append([words[words.index("--entrypoint") + 1], *words[image + 1 :]])
    return found


def rendered(root: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """What Helm makes of the values, which must be as the schema says."""
    with helm_python.Chart.load(root / "helm/lmkv") as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="lmkv", namespace="lmkv")
    return [one for path in files if path.endswith(".yaml") for one in yaml.safe_load_all(files[path]) if one]


def forwardable(manifests: Sequence[dict[str, Any]]) -> dict[str, set[str]]:
    """The ports of all services, and of the pods of stateful sets, by the name that `kubectl port-forward` takes."""
    found: dict[str, set[str]] = {}
    for one in manifests:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] == "Service":
            found[f"service/{name}"] = {str(port["port"]) for port in spec["ports"]}
        if one["kind"] == "StatefulSet":
            containers = spec["template"]["spec"]["containers"]
            ports = {str(port["containerPort"]) for each in containers for port in each.get("ports", ())}
            found |= {f"pod/{name}-{number}": ports for number in range(spec["replicas"])}
    return found


def check_forwards(page: Path, manifests: Sequence[dict[str, Any]]) -> None:
    """Every `kubectl port-forward` of the page names what there is, and `lmkv bench` calls ports that are forwarded."""
    there, local = forwardable(manifests), set()
    for words in (words for words in command_lines(page, "kubectl") if "port-forward" in words):
        name, *ports = [word for word in words[words.index("port-forward") + 1 :] if word != "&"]
        assert {port.rpartition(":")[2] for port in ports} <= there[name]
        local |= {port.partition(":")[0] for port in ports}
    (bench,) = [
        line for block in bash_blocks(page) if "port-forward" in str(block) for line in block if " bench " in line
    ]
    assert set(re.findall(r"localhost:(\d+)", bench)) <= local


def test_the_chart_takes_the_values_of_the_page_and_makes_what_is_forwarded(root: Path) -> None:
    page = root / "docs/get-started/kubernetes.md"
    (block,) = re.findall(r"^```yaml\n# values.yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    check_forwards(page, rendered(root, yaml.safe_load(block)))
    values = yaml.safe_load((root / "helm/lmkv/values.yaml").read_text())
    lines = command_lines(page, "helm") + command_lines(root / "README.md", "helm")
    for words in (words for words in lines if len(words) > 2):
        assert words[1] in ("install", "upgrade", "test", "uninstall")
        assert words[2] == "lmkv"
        sets = [word for flag, word in itertools.pairwise(words) if flag.startswith("--set")]
        for name, _, _ in (word.partition("=") for word in sets):
            place = values
            for part in name.split("."):
                assert part in place, name
                place = place[part]


def test_the_readmes_chart_has_the_engines_that_its_benchmark_calls(root: Path) -> None:
    (install,) = [words for words in command_lines(root / "README.md", "helm") if words[1] == "install"]
    given = dict(itertools.pairwise(install))
    path, _, text = given["--set-json"].partition("=")
    assert path == "engines.groups"
    _, _, registry = given["--set"].partition("image.registry=")
    values = {"image": {"registry": registry}, "engines": {"groups": json.loads(text)}}
    check_forwards(root / "README.md", rendered(root, values))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_configuration_key_is_one(page: Path) -> None:
    from lmkv.config import ConnectorConfig, CoordinatorConfig, keys

    named = {name.lower() for name in re.findall(r"\bLMKV_([A-Z_0-9]+)\b", page.read_text())}
    assert named <= {*keys(ConnectorConfig), *keys(CoordinatorConfig), "config_file"}


def test_every_link_of_the_readme_is_absolute(root: Path) -> None:
    """PyPI shows the README too, where a relative link leads nowhere."""
    text = re.sub(r"^```.*?^```", "", (root / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"\b(?:src|srcset|href)=\"([^\"]+)\"", text)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


WITHOUT_LINK = {"no", "none documented", "no control plane", "vLLM"}
"""Cells of others that claim nothing, or what the column is."""


def test_each_cell_of_the_comparison_that_claims_something_links_to_its_evidence(root: Path) -> None:
    _, _, section = (root / "README.md").read_text().partition("\n## Compared with others\n")
    rows = [line.split("|")[1:-1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    head, _, *lines = rows
    assert [name.strip() for name in head] == ["", "lmkv", "LMCache", "Mooncake", "Dynamo", "vLLM"]
    assert len(lines) > 10
    for name, ours, *others in lines:
        assert "](https://" in ours, name
        bare = {cell.strip() for cell in others if "](https://" not in cell}
        assert bare <= WITHOUT_LINK, f"{name.strip()}: {bare - WITHOUT_LINK}"
