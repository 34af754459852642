"""What lmkv depends on: allowed licences, and locks with hashes that satisfy pyproject.toml. Without network."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from email.message import Message
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from tests.promises.conftest import ROOT

HASH = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def audit() -> Iterator[ModuleType]:
    loader = SourceFileLoader("lmkv_audit", str(ROOT / "scripts" / "audit"))
    spec = importlib.util.spec_from_loader("lmkv_audit", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lmkv_audit"] = module  # dataclasses look it up
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
        yield module
    finally:
        sys.dont_write_bytecode = before
        del sys.modules["lmkv_audit"]


def test_the_locks_of_the_images_satisfy_the_project(audit: ModuleType) -> None:
    assert list(audit.all_lock_faults()) == [], "run: make fix-locks"


def test_all_dependencies_have_allowed_licences(audit: ModuleType) -> None:
    assert list(audit.licence_faults()) == []


def test_locks_cover_the_extras_of_the_images(audit: ModuleType) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    for extras in audit.IMAGES.values():
        assert f"[{','.join(extras)}]" in dockerfile


def test_images_are_installed_from_locks_by_hash(audit: ModuleType) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    stages = {part.split()[2]: part for part in re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)[1:]}
    from_lock = r"pip install --require-hashes --only-binary :all: (?:--no-deps )?--requirement (\S+)"
    used = {lock.removeprefix("/build/source/") for lock in re.findall(from_lock, dockerfile)}
    assert used == {str(lock.relative_to(ROOT)) for lock in audit.LOCKS.glob("*.txt")}
    for name in ("build", "lmkv", "lmkv-node"):
        installs = re.findall(r"(?:pip|pip3) (?:install|wheel|download) .*", stages[name])
        assert installs
        assert all("--require-hashes" in line or "--no-index" in line for line in installs), (
            "nothing else from an index"
        )


@pytest.mark.parametrize(
    ("lock", "fault"),
    [
        (f"msgspec==1.0 --hash={HASH}", ""),
        (f"msgspec==1.0 \\\n    --hash={HASH} \\\n    --hash={HASH}", ""),
        ("msgspec==1.0", "msgspec has no SHA-256"),
        ("msgspec==1.0 --hash=md5:00", "msgspec has no SHA-256"),
        (f"msgspec>=1.0 --hash={HASH}", "msgspec has no exact version"),
        (f"msgspec==0.1 --hash={HASH}", "msgspec>=0.19 is required, but the lock has 0.1 of it"),
        (f"other==1.0 --hash={HASH}", "msgspec>=0.19 is required, but the lock has no version of it"),
    ],
)
def test_faults_of_a_lock(audit: ModuleType, lock: str, fault: str) -> None:
    found = list(audit.lock_faults(audit.read_lock(lock), [Requirement("msgspec>=0.19")]))
    assert fault in found if fault else found == []


def test_what_a_locked_package_requires_must_be_locked(audit: ModuleType) -> None:
    from importlib.metadata import version

    pins = audit.read_lock(f"starlette=={version('starlette')} --hash={HASH}")
    assert any(fault.startswith("anyio") for fault in audit.lock_faults(pins, []))


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ([("License-Expression", "Apache-2.0 AND MIT")], True),
        ([("License-Expression", "GPL-3.0-only OR MIT")], True),
        ([("License-Expression", "(MIT AND GPL-3.0-only) OR MIT")], False),
        ([("License-Expression", "GPL-3.0-only")], False),
        ([("Classifier", "License :: OSI Approved :: MIT License")], True),
        ([("Classifier", "License :: OSI Approved :: GNU General Public License v3 (GPLv3)")], False),
        ([("Classifier", "License :: OSI Approved :: MIT License"), ("Classifier", "License :: Unknown")], False),
        ([("License", "MPL-2.0 AND MIT")], True),
        ([("License", "Copyright (c) some text")], False),
        ([("License", "AGPL-3.0")], False),
        ([], False),
    ],
)
def test_licences_of_metadata(audit: ModuleType, fields: list[tuple[str, str]], allowed: bool) -> None:
    metadata = Message()
    for name, value in fields:
        metadata[name] = value
    assert audit.is_allowed(audit.licence_of(metadata)) == allowed


def test_a_check_without_an_answer_is_skipped_with_a_line(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lock = audit.LOCKS / "lmkv.txt"
    answers: list[object] = [None, {"dependencies": [{"name": "a", "skip_reason": "?"}]}, {"message": "405"}]
    monkeypatch.setattr(audit, "_json_of", lambda *_: answers.pop(0))
    run = audit.Audit()
    run.python_advisories(lock)
    run.python_advisories(lock)
    run.npm_advisories()
    assert (len(run.skipped), run.faults) == (3, [])
    assert capsys.readouterr().out.count("SKIPPED") == 3


def test_advisories_are_faults(audit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1"}]}
    good = {"name": "b", "version": "1", "vulns": []}
    answers = [{"dependencies": [bad, good]}, {"vulnerabilities": {"c": {"severity": "high"}}}]
    monkeypatch.setattr(audit, "_json_of", lambda *_: answers.pop(0))
    run = audit.Audit()
    run.python_advisories(audit.LOCKS / "lmkv.txt")
    run.npm_advisories()
    assert run.faults == ["a 1: PYSEC-1", "npm c: high"]
