"""GitHub workflows: free of the faults that actionlint knows, pinned, and built on the targets that people use."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.promises.conftest import BIN, ROOT, Run

ACTIONLINT = Path(sys.executable).with_name("actionlint")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NAMES = {"audit", "chart", "docs", "images", "nightly", "release", "test", "vllm", "wheels"}
PUBLISHES = re.compile(
    r"\b(?:buildah|cargo|crane|docker|git|helm|npm|oras|podman)\b[^\n;&|]*?\b(?:push|publish)\b"
    r"|\b(?:gh (?:api|release)|mike|skopeo copy|twine)\b"
)
"""Commands that publish."""
PUBLISHING_ACTIONS = {"pypa/gh-action-pypi-publish"}
"""Actions that publish: PyPI trusts the workflow `release` alone, which therefore needs no password."""


def steps(workflow: Path) -> list[dict[str, Any]]:
    """All steps of a workflow's jobs."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [])]


def lint(*files: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [ACTIONLINT, "-no-color", *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)


def test_actionlint_finds_nothing() -> None:
    assert {workflow.stem for workflow in WORKFLOWS} == NAMES
    done = lint(*WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_finds_a_job_that_does_not_exist(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    broken.write_text((ROOT / ".github/workflows/docs.yml").read_text().replace("needs: build", "needs: compile"))
    done = lint(broken)
    assert done.returncode == 1
    assert "compile" in done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_are_minimal(workflow: Path) -> None:
    uses = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert [each for each in uses if not re.fullmatch(r"[\w./-]+@v\d+\.\d+\.\d+", each)] == []
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    assert all("uses" in job or job["timeout-minutes"] <= 180 for job in content["jobs"].values())


def test_workflows_call_the_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    scripts = "\n".join(step.get("run", "") for workflow in WORKFLOWS for step in steps(workflow))
    called = set(re.findall(r"\bmake (?:--silent )?([a-z-]+)", scripts))
    assert called >= {
        "audit",
        "chart",
        "chart-publish",
        "docs",
        "docs-publish",
        "fuzz",
        "histories",
        "images",
        "images-publish",
        "release-publish",
        "sdist",
        "setup",
        "soak",
        "test",
        "test-envoy",
        "test-sglang",
        "test-vllm-next",
        "test-vllm-previous",
        "verify",
        "verify-vllm",
        "wheels",
    }
    assert called <= targets
    assert not re.search(r"\b(?:pytest|mypy|ruff|mkdocs|cibuildwheel|docker build)\b", scripts)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_publish_by_targets_that_people_can_use(workflow: Path) -> None:
    assert PUBLISHES.findall("\n".join(step.get("run", "") for step in steps(workflow))) == []
    actions = {step["uses"].partition("@")[0] for step in steps(workflow) if "uses" in step}
    assert {each for each in actions if re.search("publish|push|release", each)} <= PUBLISHING_ACTIONS


@pytest.mark.parametrize(
    ("script", "publishes"),
    [
        ("make images-publish IMAGES=ghcr.io/lmkv", False),
        ('make docs-publish ARGS="main"', False),
        ("docker login ghcr.io", False),
        ("docker pull a; echo push", False),
        ('docker push "$REGISTRY/lmkv:1"', True),
        ("docker buildx build --push .", True),
        ("helm push dist/lmkv.tgz oci://ghcr.io/lmkv/charts", True),
        ("gh release create v1 dist/*", True),
        ("python -m twine upload dist/*", True),
        ("git -C site push origin gh-pages", True),
        ("mike deploy --push main", True),
    ],
)
def test_a_command_that_publishes_is_found(script: str, publishes: bool) -> None:
    assert bool(PUBLISHES.search(script)) == publishes


def test_the_hooks_are_valid(run: Run) -> None:
    run(BIN / "pre-commit", "validate-config", ".pre-commit-config.yaml")


def test_issue_templates_owners_and_hooks_refer_to_what_exists() -> None:
    github = ROOT / ".github"
    for form in ("bug", "feature"):
        content = yaml.safe_load((github / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())
        assert content["name"]
        assert any(field.get("validations", {}).get("required") for field in content["body"])
    owned = [line.split()[0] for line in (github / "CODEOWNERS").read_text().splitlines() if line and line[0] != "#"]
    assert owned[0] == "*"
    assert [path for path in owned[1:] if not (ROOT / path.strip("/")).exists()] == []
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {hook["entry"].removeprefix("make ") for hook in hooks if hook["entry"].startswith("make ")}
    assert made
    assert made <= targets
