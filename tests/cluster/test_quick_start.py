"""`make cluster` runs what docs/get-started/kubernetes.md installs: its images, values and test. Nothing runs here."""

from __future__ import annotations

import itertools
import re
from copy import deepcopy
from typing import Any

import yaml

from tests.cluster.__main__ import images_of, manifests_of
from tests.cluster.cases import CASES
from tests.cluster.checks import helm_test
from tests.cluster.fleet import engine_values
from tests.cluster.images import ROOT, parts
from tests.helm.chart import render
from tests.promises.commands import command_lines, make

PAGE = ROOT / "docs" / "get-started" / "kubernetes.md"
CASE = CASES["default"]
CPU = {"lmkv-vllm": "lmkv-vllm-cpu"}
"""The images of engines on this machine, by those of the page."""


def page_values() -> dict[str, Any]:
    (block,) = re.findall(r"^```yaml\n# values.yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    values: dict[str, Any] = yaml.safe_load(block)
    return values


def test_the_case_has_the_values_of_the_page_but_for_sizes_and_the_model() -> None:
    page, here = page_values(), engine_values("REGISTRY")
    assert page.pop("image") == {"registry": here["image"]["registry"]}
    assert page["node"].pop("maxLocalCpuSize") > here["node"]["maxLocalCpuSize"]
    assert page.pop("node") == {}, "what the case leaves out"
    case = deepcopy(dict(CASE.values))
    (ours,), (theirs,) = page["engines"]["groups"], case["engines"]["groups"]
    theirs |= {name: ours[name] for name in ("name", "model")}
    assert page == case


def test_the_case_starts_the_workloads_of_the_page() -> None:
    page = kinds(render(page_values()))
    assert page == kinds(manifests_of(CASE, "REGISTRY"))
    assert {"Deployment", "DaemonSet", "StatefulSet", "Service"} <= page.keys()


def kinds(manifests: list[dict[str, Any]]) -> dict[str, int]:
    """The number of manifests of each kind, but for what is made beside the chart."""
    ordered = sorted(each["kind"] for each in manifests if each["kind"] != "Secret")
    return {kind: len(list(group)) for kind, group in itertools.groupby(ordered)}


def test_its_images_are_those_that_the_page_builds_and_pushes() -> None:
    made = {parts(image)[1] for image in images_of([CASE], "REGISTRY")}
    (typed,) = command_lines(PAGE, "make")
    names = typed[-1].removeprefix("TARGETS=").split()
    assert {CPU.get(name, name) for name in names} == made
    build, push = make("--dry-run", *typed[1:]).stdout.splitlines()
    assert '"scripts" / "images"' in (ROOT / "tests/cluster/images.py").read_text()
    assert re.search(rf"scripts/images --registry REGISTRY --version \S+ {' '.join(names)}", build)
    assert re.search(rf"scripts/images --publish --registry REGISTRY --version \S+ {' '.join(names)}", push)


def test_it_runs_the_tests_of_the_chart_as_the_page_does() -> None:
    assert ["helm", "test", "lmkv", "--namespace", "lmkv", "--logs"] in command_lines(PAGE, "helm")
    assert helm_test in CASE.checks
