"""Runs the chart's pods with Podman and checks the fleet: `make cluster`.

python -m tests.cluster --registry REGISTRY [--no-build] [--previous-image REGISTRY:TAG] [CASE...]: needs root, podman,
runc, netavark, nftables, catatonit and buildah. Builds the images that the cases use.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.cluster.cases import CASES, Case
from tests.cluster.cluster import Cluster, unchanged
from tests.cluster.fleet import Fleet, engine_values, logs_folder
from tests.cluster.images import CHECKED, ImageError, build, check_contents, parts
from tests.cluster.secrets import issued
from tests.cluster.translation import Manifest, pods
from tests.cluster.versions import Version
from tests.helm.chart import render

PROGRAMS = {
    "podman": "podman",
    "runc": "runc",
    "catatonit": "catatonit",
    "iptables": "iptables",
    "nft": "nftables",
    "redis-server": "redis-server",
}
BUILDS = {"buildah": "buildah"}
LOCK = Path(tempfile.gettempdir()) / "lmkv-cluster.lock"

IMAGES = "images"
"""What the results name, beside the cases."""

Results = dict[tuple[str, str], str]


def merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Values with others on top, as Helm merges files of values."""
    result = dict(values)
    for key, other in others.items():
        both = isinstance(other, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], other) if both else other
    return result


def manifests_of(case: Case, registry: str) -> list[Manifest]:
    """What a case gives to the cluster: the rendered chart and its secrets."""
    rendered = rendered_of(case, registry, case.channels[0])
    return [*rendered, *issued(rendered), *case.secrets()]


def with_other_channel(case: Case, registry: str, manifests: Sequence[Manifest]) -> list[Manifest]:
    secrets = [each for each in manifests if each["kind"] == "Secret"]
    return [*rendered_of(case, registry, case.channels[1]), *secrets]


def rendered_of(case: Case, registry: str, channel: str) -> list[Manifest]:
    """The chart with the values of a case."""
    values = merged(engine_values(registry), case.values)
    return render(merged(values, {"node": {"transferChannel": channel}}))


def images_of(cases: Sequence[Case], registry: str) -> list[str]:
    """The images of the pods of cases, by name."""
    made = [pod for case in cases for pod in pods(manifests_of(case, registry), case.hosts)]
    return sorted({each["image"] for pod in made for each in (*pod.initial, *pod.containers)}, key=parts)


class Images:
    """Builds and checks images in the background: the first one, whose stages all share, then the others at once."""

    def __init__(self, images: Sequence[str], results: Results, *, builds: bool) -> None:
        """`builds`: whether they are built; Podman has them otherwise."""
        self._images = images
        self._results = results
        self._builds = builds
        self._tasks: dict[str, asyncio.Task[bool]] = {}

    async def __aenter__(self) -> Self:
        first: asyncio.Task[bool] | None = None
        for image in self._images:
            self._tasks[image] = asyncio.create_task(self._prepare(image, first))
            first = first or self._tasks[image]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def wait(self, images: Sequence[str]) -> bool:
        """Waits until images are prepared. Returns whether cases can use them."""
        return all(await asyncio.gather(*(asyncio.shield(self._tasks[image]) for image in images)))

    async def _prepare(self, image: str, first: asyncio.Task[bool] | None) -> bool:
        if first is not None and not await asyncio.shield(first):
            return False
        name = parts(image)[1]
        is_built, found = not self._builds, []
        try:
            if self._builds:
                log = logs_folder(IMAGES) / f"{name}.log"
                print(f"building {image}; the output is in {log}", flush=True)
                began = time.monotonic()
                await build(image, log)
                is_built = True
                found.append(f"{time.monotonic() - began:.0f} s")
            if name in CHECKED:
                found.append(await check_contents(image))
        except (ImageError, TimeoutError) as error:
            found = [f"FAILED: {error or type(error).__name__}"]
        self._results[IMAGES, name] = report(IMAGES, name, ", ".join(found) or "not checked")
        return is_built


async def run_case(name: str, case: Case, registry: str, results: Results, previous: Version | None = None) -> None:
    """Runs one case; what a check returns, or why it failed, is in the results."""
    logs = logs_folder(name)
    shutil.rmtree(logs, ignore_errors=True)
    manifests = manifests_of(case, registry)
    check_name = "start"
    began = time.monotonic()
    try:
        async with Cluster(manifests, case.hosts, logs) as cluster:
            for host, command in case.beside.items():
                await cluster.run_beside(host, command)
            fleet = Fleet(cluster, with_other_channel(case, registry, manifests))
            await fleet.start(previous.pod if previous is not None and case.from_previous else unchanged)
            started = f"{time.monotonic() - began:.0f} s"
            if case.from_previous:
                started += f", {previous}" if previous else ", the same version: no --previous-image"
            results[name, check_name] = report(name, check_name, started)
            for check in case.checks:
                check_name = check.__name__.replace("_", " ")
                if (name, check_name) in results:
                    check_name += " again"
                results[name, check_name] = report(name, check_name, await check(fleet))
    except Exception as error:
        reason = " ".join(str(each) for each in leaves(error))
        results[name, check_name] = report(name, check_name, f"FAILED: {reason}")
        print(f"{name}: output of the pods is in {logs}", flush=True)


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


def report(case: str, check: str, text: str) -> str:
    """Prints a result at once; returns it."""
    print(f"{time.strftime('%H:%M:%S')} {case}: {check}: {text}", flush=True)
    return text


def table(results: Results) -> str:
    """Case by check, as Markdown."""
    cases, checks = list(dict.fromkeys(key[0] for key in results)), list(dict.fromkeys(key[1] for key in results))
    rows = [["case", *checks], ["---"] * (len(checks) + 1)]
    rows += [[case, *(results.get((case, check), "-") for check in checks)] for case in cases]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ")[:200] for cell in row) + " |" for row in rows)


async def main(cases: list[str], registry: str, previous: Version | None, builds: bool) -> int:
    """Returns 1 if a check failed."""
    task = asyncio.current_task()
    assert task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    results: Results = {}
    chosen = cases or [*CASES]
    try:
        images = images_of([CASES[name] for name in chosen], registry)
        async with Images(images, results, builds=builds) as prepared:
            for name in chosen:
                if await prepared.wait(images_of([CASES[name]], registry)):
                    await run_case(name, CASES[name], registry, results, previous)
    finally:
        if results:
            print(table(results), flush=True)
    return int(any(text.startswith("FAILED") for text in results.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", choices=[*CASES, []], help=f"default: {', '.join(CASES)}")
    parser.add_argument("--registry", required=True, help="what the names of images begin with")
    parser.add_argument(
        "--previous-image",
        type=Version.parse,
        metavar="REGISTRY:TAG",
        help="images of an earlier version, with which the cases of upgrades start; default: the same as others",
    )
    parser.add_argument("--no-build", action="store_true", help="use the images that Podman has")
    arguments = parser.parse_args()
    programs = PROGRAMS if arguments.no_build else PROGRAMS | BUILDS
    if missing := [package for program, package in programs.items() if not shutil.which(program)]:
        sys.exit(f"make cluster needs {', '.join(missing)}: apt-get install {' '.join(missing)} netavark")
    if os.geteuid() != 0:
        sys.exit("make cluster needs root: pods have users and networks of their own")
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("another make cluster runs on this machine")
        try:
            sys.exit(
                asyncio.run(main(arguments.cases, arguments.registry, arguments.previous_image, not arguments.no_build))
            )
        except (KeyboardInterrupt, asyncio.CancelledError):
            sys.exit(130)
