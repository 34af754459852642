"""buf's templates for Go, Java and Rust: what they ask of plugins, and, where their tools are, what comes of it.

Debian has protoc-gen-go, protoc-gen-go-grpc and golang-google-{grpc,genproto}-dev for Go, besides Go itself; for
Java protobuf-compiler, protobuf-compiler-grpc-java-plugin and libgrpc-java, besides a JDK.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmkv_server.coordinator.services.services import SERVICE_NAMES
from tests.sdk.buf import ROOT, buf

COMPILE_SECONDS = 500.0
GO_SOURCES = Path("/usr/share/gocode")
JARS = [
    Path(f"/usr/share/java/{name}.jar")
    for name in ("protobuf", "grpc-api", "grpc-stub", "grpc-protobuf", "guava", "geronimo-annotation-1.3-spec")
]
SCRIBE = """#!{python}
import sys
from google.protobuf.compiler.plugin_pb2 import CodeGeneratorRequest, CodeGeneratorResponse

request = CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
packages = {{file.name: file.options.go_package for file in request.proto_file}}
lines = [f"{{name}} {{packages[name]}} ({{request.parameter}})\\n" for name in sorted(request.file_to_generate)]
response = CodeGeneratorResponse(supported_features=CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL)
response.file.add(name=sys.argv[0].rpartition("/")[2] + "-" + request.file_to_generate[0].replace("/", "-"))
response.file[0].content = "".join(lines)
sys.stdout.buffer.write(response.SerializeToString())
"""
"""A plugin that writes down what it is asked to generate, each file with its Go package."""


def template(language: str) -> Path:
    return ROOT / "client" / language / "buf.gen.yaml"


def asked(language: str, folder: Path) -> dict[str, set[str]]:
    """What a template asks of each plugin, in lines."""
    names = re.findall(r"local: (\S+)", template(language).read_text())
    (folder / "plugins").mkdir()
    for name in names:
        plugin = folder / "plugins" / name
        plugin.write_text(SCRIBE.format(python=sys.executable))
        plugin.chmod(0o755)
    buf("generate", "--template", template(language), "-o", folder / "out", plugins=folder / "plugins")
    written = {name: list((folder / "out").glob(f"{name}-[lg]*")) for name in names}
    return {name: {line for file in files for line in file.read_text().splitlines()} for name, files in written.items()}


def test_go_is_asked_for_our_services_in_a_package_of_their_own(tmp_path: Path) -> None:
    ours = {f"lmkv/v1/{path.name} lmkv/v1;lmkvv1 ()" for path in (ROOT / "protos/lmkv/v1").glob("*.proto")}
    assert len(ours) > 4
    assert asked("go", tmp_path) == {"protoc-gen-go": ours, "protoc-gen-go-grpc": ours}


def test_rust_is_asked_for_what_ours_import_too_since_no_crate_has_it(tmp_path: Path) -> None:
    lines = asked("rust", tmp_path)
    files = {name: {line.split()[0] for line in asked_for} for name, asked_for in lines.items()}
    assert {"lmkv/v1/cache_service.proto", "google/rpc/status.proto"} <= files["protoc-gen-prost"]
    assert not any(name.startswith("google/protobuf/") for name in files["protoc-gen-prost"]), "prost_types has those"
    assert files["protoc-gen-prost"] == files["protoc-gen-tonic"] == files["protoc-gen-prost-crate"]
    assert all(line.endswith("(no_server)") for line in lines["protoc-gen-tonic"])


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not on this machine: {', '.join(missing)}")


def compile_with(command: Sequence[str | Path], cwd: Path, **environment: str) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=COMPILE_SECONDS,
    )
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-5000:]}{done.stderr[-5000:]}"


def example(language: str) -> str:
    """What `docs/reference/sdks.md` shows in a language."""
    page = (ROOT / "docs" / "reference" / "sdks.md").read_text()
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.mark.timeout(600)
def test_what_go_makes_of_it_compiles_with_our_example(tmp_path: Path) -> None:
    need("protoc-gen-go", "protoc-gen-go-grpc", "go")
    if not (GO_SOURCES / "src/google.golang.org/grpc").exists():
        pytest.skip("Debian's golang-google-grpc-dev is not on this machine")
    sources = tmp_path / "src"
    buf("generate", "--template", template("go"), "--include-imports", "-o", sources)
    shutil.rmtree(sources / "google.golang.org")  # Debian has it
    program = sources / "example/main.go"
    program.parent.mkdir()
    text = example("go").replace("example.com/yours/lmkv/v1", "lmkv/v1")
    if not any((GO_SOURCES / "src/google.golang.org/grpc").rglob("credentials/insecure")):  # Debian 12: gRPC 1.33
        text = text.replace("grpc.NewClient", "grpc.Dial").replace(
            '\t"google.golang.org/grpc/credentials/insecure"\n', ""
        )
        text = text.replace("grpc.WithTransportCredentials(insecure.NewCredentials())", "grpc.WithInsecure()")
    program.write_text(text)
    paths = {"GOPATH": f"{tmp_path}:{GO_SOURCES}", "GO111MODULE": "off"}
    compile_with(["go", "build", "-o", tmp_path / "example", "."], program.parent, **paths)


@pytest.mark.timeout(600)
def test_what_java_makes_of_it_compiles_with_our_example(tmp_path: Path) -> None:
    need("protoc", "javac")
    plugin = shutil.which("protoc-gen-grpc-java") or shutil.which("grpc_java_plugin")
    if plugin is None or not all(jar.exists() for jar in JARS):
        pytest.skip("gRPC's plugin for Java, or its jars in /usr/share/java, are not on this machine")
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/protoc-gen-grpc-java").symlink_to(plugin)
    sources = tmp_path / "src"
    options = ("--include-imports", "-o", sources)
    buf("generate", "--template", template("java"), *options, plugins=tmp_path / "plugins")
    for name in SERVICE_NAMES:
        package, _, service = name.rpartition(".")
        if package == "lmkv.v1":
            assert (sources / f"lmkv/v1/{service}Grpc.java").exists()
    (sources / "Lookup.java").write_text(example("java"))
    class_path = ":".join(map(str, JARS))
    files = sorted(sources.rglob("*.java"))
    compile_with(["javac", "-proc:none", "-nowarn", "-d", tmp_path / "out", "-cp", class_path, *files], tmp_path)
