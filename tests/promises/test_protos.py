"""The protos are the contract: clean by buf, documented down to the errors, and the committed stubs are theirs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from google.protobuf import descriptor_pb2
from google.rpc import code_pb2

from lmkv.errors import LmkvError

if TYPE_CHECKING:
    from tests.promises.conftest import Run

ERROR = re.compile(r"`([A-Z_]+)` \(`([A-Z_]+)`\)")
"""How comments name an error: its code and, in parentheses, its reason."""


def own_protos(root: Path) -> list[str]:
    """The protos of lmkv, public and internal, by their paths in the repository."""
    return [str(path.relative_to(root)) for path in sorted((root / "protos/lmkv").rglob("*.proto"))]


def test_the_committed_stubs_are_what_protoc_makes_of_the_protos_now(root: Path, run: Run, tmp_path: Path) -> None:
    options = [f"--{plugin}_out={tmp_path}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    run(sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", *options, *own_protos(root))
    envoy = "-Ilmkv/ext_proc=protos/envoy/service/ext_proc/v3"
    run(sys.executable, "-m", "grpc_tools.protoc", envoy, *options, "lmkv/ext_proc/external_processor.proto")
    packages = ("lmkv/v1", "lmkv/internal/v1", "lmkv/ext_proc")
    made = {path.name: path.read_text() for package in packages for path in (tmp_path / package).iterdir()}
    committed = {path.name: path.read_text() for package in packages for path in (root / package).glob("*_pb2*")}
    assert made.keys() == committed.keys(), "run `make protos`, and remove stubs that no proto makes"
    stale = [name for name in made if made[name] != committed[name]]
    assert not stale, f"run `make protos`; these stubs are stale: {stale}"


def test_the_reference_is_what_the_protos_say_now(root: Path, run: Run, tmp_path: Path) -> None:
    run(sys.executable, "scripts/api-reference", tmp_path / "api.md")
    page = Path("docs", "reference", "api.md")
    made, committed = ((tmp_path / page.name).read_text(encoding="utf-8"), (root / page).read_text(encoding="utf-8"))
    assert made == committed, "run `make protos`: docs/reference/api.md is stale"
    for service in ("CacheService", "RegistryService", "EngineService", "PeerService"):
        assert f"## {service}" in made


def test_buf_finds_nothing_to_complain_about(root: Path, run: Run) -> None:
    own = root / ".buf/node_modules/.bin/buf"
    buf = own if own.exists() else shutil.which("buf")
    if buf is None:
        pytest.fail("buf is missing: install npm and run `make setup`, or put buf on the PATH")
    run(buf, "lint")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorSet:
    """The descriptors of our protos, with comments, and of those that they import."""
    root = Path(__file__).parents[2]
    path = tmp_path_factory.mktemp("image") / "image.binpb"
    options = ["-Iprotos", "--include_source_info", "--include_imports", f"--descriptor_set_out={path}"]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *options, *own_protos(root)], cwd=root, check=True, timeout=150
    )
    return descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())


@pytest.fixture(scope="module")
def rpc_comments(image: descriptor_pb2.FileDescriptorSet) -> dict[str, str]:
    """The comment of each RPC and, in front of it, that of its service."""
    comments = {}
    for file in image.file:
        if not file.name.startswith("lmkv/"):
            continue
        leading = {tuple(location.path): location.leading_comments for location in file.source_code_info.location}
        for i, service in enumerate(file.service):
            for j, method in enumerate(service.method):  # 6 and 2: the fields `service` and `method`
                of_service, of_method = leading.get((6, i), ""), leading.get((6, i, 2, j), "")
                comments[f"{service.name}.{method.name}"] = f"{of_service}\f{of_method}"
    return comments


def test_every_rpc_lists_its_errors_or_says_that_there_are_none(rpc_comments: dict[str, str]) -> None:
    assert len(rpc_comments) >= 19
    silent = []
    for rpc, comment in rpc_comments.items():
        of_service, _, own = comment.partition("\f")
        listed = ERROR.search(own) or ("those of the service" in own and ERROR.search(of_service))
        if not ("Errors: none." in own or (re.search(r"^ ?Errors\b", own, re.MULTILINE) and listed)):
            silent.append(rpc)
    assert not silent, f"these say nothing of their errors: {silent}"


def test_every_rpc_says_what_a_repeat_does(rpc_comments: dict[str, str]) -> None:
    silent = [
        rpc
        for rpc, comment in rpc_comments.items()
        if not re.search(r"\b([Rr]epeat|[Ii]dempotent|again\b)", comment.partition("\f")[2])
    ]
    assert not silent, f"say what a second call with the same request does: {silent}"


def test_every_error_in_a_comment_is_one_that_lmkv_can_raise(rpc_comments: dict[str, str]) -> None:
    named = {error for comment in rpc_comments.values() for error in ERROR.findall(comment)}
    assert len(named) > 10
    known = {(kind.code, reason) for reason, kind in LmkvError.by_reason.items()}
    assert named <= known, f"lmkv.errors has no such code with such a reason: {sorted(named - known)}"


QUOTED = re.compile(r"`([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)`")
"""An identifier in backticks, perhaps with dots."""
FOREIGN = {
    *("ErrorInfo", "RetryInfo"),  # details of errors
    "fp8_e4m3",  # torch's name of a type
}
"""Names of other systems that comments quote."""
KEYS = {"lease_ttl", "retry_seconds", "enable_p2p"}
"""Configuration keys and metadata that comments quote."""


def names_of(image: descriptor_pb2.FileDescriptorSet) -> set[str]:
    """All names in our protos, short and with what contains them, their packages, and imported messages."""
    names: set[str] = set()

    def add_message(message: descriptor_pb2.DescriptorProto) -> None:
        for name in (*(one.name for one in message.field), *(one.name for one in message.oneof_decl)):
            names.update((name, f"{message.name}.{name}"))
        names.add(message.name)
        for enum in message.enum_type:
            names.update((enum.name, *(value.name for value in enum.value)))
        for nested in message.nested_type:
            add_message(nested)

    for file in image.file:
        names.add(file.package)
        for message in file.message_type:
            if file.name.startswith("lmkv/"):
                add_message(message)
            names.add(message.name)
        for enum in file.enum_type:
            names.update((enum.name, *(value.name for value in enum.value)))
        for service in file.service:
            names.add(service.name)
            for method in service.method:
                names.update((method.name, f"{service.name}.{method.name}"))
    return names


def test_comments_name_only_what_there_is(image: descriptor_pb2.FileDescriptorSet) -> None:
    reasons = {one.reason for one in _subclasses(LmkvError)}
    known = names_of(image) | FOREIGN | KEYS | reasons | set(code_pb2.Code.keys())
    unknown = sorted(
        f"{file.name}:{location.span[0] + 1}: {name}"
        for file in image.file
        if file.name.startswith("lmkv/")
        for location in file.source_code_info.location
        for comment in (location.leading_comments, location.trailing_comments, *location.leading_detached_comments)
        for name in QUOTED.findall(comment)
        if ("_" in name or "." in name or name[0].isupper()) and name not in known
    )
    assert not unknown, f"comments name what is not in the protos: {unknown}"


def _subclasses(error: type[LmkvError]) -> set[type[LmkvError]]:
    found = set(error.__subclasses__())
    return found | {one for child in found for one in _subclasses(child)}
