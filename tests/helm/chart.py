"""The chart, rendered by Helm itself, and what it must render for each case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "helm" / "lmkv"
CASES = Path(__file__).parent / "cases"
NAMES = sorted(folder.name for folder in CASES.iterdir())
RELEASE, NAMESPACE = "demo", "prod"

Manifest = dict[str, Any]


def render(values: Mapping[str, Any], release: str = RELEASE) -> list[Manifest]:
    """What is given to Kubernetes. Raises `HelmError` for values that the chart refuses."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(dict(values), name=release, namespace=NAMESPACE)
    files = (rendered[path] for path in sorted(rendered) if path.endswith(".yaml"))
    return [manifest for text in files for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader) if manifest]


def rendered_or_refused(values: Mapping[str, Any]) -> tuple[list[Manifest], str]:
    """What is rendered, or why nothing is."""
    try:
        return render(values), ""
    except (helm_python.HelmValuesError, helm_python.HelmRenderError) as refusal:
        return [], str(refusal)


def notes(values: Mapping[str, Any]) -> str:
    """The notes that Helm prints after the installation."""
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(dict(values), name=RELEASE, namespace=NAMESPACE)["lmkv/templates/NOTES.txt"]


@cache
def values_of(case: str) -> Mapping[str, Any]:
    values: Mapping[str, Any] = yaml.safe_load((CASES / case / "values.yaml").read_text()) or {}
    return values


@cache
def manifests_of(case: str) -> tuple[Manifest, ...]:
    return tuple(render(values_of(case)))


def name_of(manifest: Manifest) -> str:
    """`Deployment/demo-lmkv-proxy`."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def find(manifests: Sequence[Manifest], name: str) -> Manifest:
    """The manifest of that name: `Deployment/demo-lmkv-proxy`."""
    (found,) = (manifest for manifest in manifests if name_of(manifest) == name)
    return found


def pods(manifests: list[Manifest] | tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """Every pod, or template of one, with the name of who makes it."""
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield name_of(manifest), manifest
        elif "template" in manifest.get("spec", {}):
            yield name_of(manifest), manifest["spec"]["template"]
        elif manifest["kind"] == "LeaderWorkerSet":
            yield name_of(manifest), manifest["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
            yield name_of(manifest), manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def variable(container: Manifest, name: str) -> dict[str, Any]:
    (found,) = (each for each in container["env"] if each["name"] == name)
    return {key: value for key, value in found.items() if key != "name"}


class _Readable(yaml.SafeDumper):
    """Writes files within manifests as they are, and what is said twice twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


def _masked(manifest: Manifest) -> Manifest:
    """The manifest without certificates that Helm has made, which differ in each rendering."""
    masked = deepcopy(manifest)
    if manifest["kind"] == "Secret":
        masked["data"] = dict.fromkeys(manifest["data"], "made by Helm")
    if manifest["kind"] == "MutatingWebhookConfiguration" and "caBundle" in manifest["webhooks"][0]["clientConfig"]:
        masked["webhooks"][0]["clientConfig"]["caBundle"] = "made by Helm"
    return masked


def expected(case: str) -> str:
    """What a case's `expected.yaml` must say: what it renders, and of the default what it does not.

    Of other cases than the default, it lists only what differs.
    """
    manifests = {name_of(manifest): manifest for manifest in manifests_of(case)}
    usual = {} if case == "default" else {name_of(manifest): manifest for manifest in manifests_of("default")}
    listed = [_masked(manifests[name]) for name in sorted(manifests) if manifests[name] != usual.get(name)]
    gone = sorted(usual.keys() - manifests.keys())
    head = "".join(f"# gone: {name}\n" for name in gone)
    return head + yaml.dump_all(listed, Dumper=_Readable, width=110, explicit_start=True)


if __name__ == "__main__":  # python -m tests.helm.chart: regenerates every expected.yaml
    for each in NAMES:
        (CASES / each / "expected.yaml").write_text(expected(each))
