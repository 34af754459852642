"""`scripts/sbom`: what the list of an image's software says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DPKG = """#!/bin/sh
echo "installed libc6 2.36-9+deb12u10 amd64"
echo "config-files libold 1.0 amd64"
echo "installed g++ 4:12.2.0-3 amd64"
"""


def written(folder: Path) -> bytes:
    """The file of an image with this interpreter's distributions and the packages of `DPKG`."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "dpkg-query").write_text(DPKG)
    (programs / "dpkg-query").chmod(0o755)
    file = folder / "share" / "sbom.cdx.json"
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(
        [sys.executable, "scripts/sbom", "lmkv-node", file], cwd=ROOT, env=environment, check=True, timeout=150
    )
    return file.read_bytes()


def test_the_list_names_the_image_its_distributions_and_its_packages(tmp_path: Path) -> None:
    bill: dict[str, Any] = json.loads(written(tmp_path))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "lmkv-node"
    versions = {each["purl"]: each["version"] for each in bill["components"]}
    assert len(versions) == len(bill["components"]) == len({each["bom-ref"] for each in bill["components"]})
    assert versions[f"pkg:pypi/grpcio@{version('grpcio')}"] == version("grpcio")
    debian = {purl: found for purl, found in versions.items() if purl.startswith("pkg:deb/")}
    assert debian == {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64": "2.36-9+deb12u10",
        "pkg:deb/debian/g%2B%2B@4%3A12.2.0-3?arch=amd64": "4:12.2.0-3",
    }


def test_equal_images_have_equal_lists(tmp_path: Path) -> None:
    assert written(tmp_path) == written(tmp_path)
