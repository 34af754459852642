"""`lmkv config`, as people call it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lmkv import cli
from lmkv.config import ConnectorConfig, NodeConfig, keys, load
from lmkv.config.lmcache import ABSENT, RENAMED
from lmkv.config.sources import REPLACED
from lmkv_client.commands.config import PROCESSES
from tests.lmkv.config.files import LMCACHE_P2P

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "lmcache.yaml"
    file.write_text(LMCACHE_P2P, encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG_FILE", "LOG_LEVEL", "CHUNK_SIZE", "CLUSTER_SECRET"):
        monkeypatch.delenv(f"LMKV_{name}", raising=False)


def test_import_prints_the_file_and_says_on_the_other_stream_what_became_of_each_key(
    source: Path, capsys: Capture
) -> None:
    assert cli.main(["config", "import", str(source)]) == 0
    shown = capsys.readouterr()
    made = yaml.safe_load(shown.out)
    assert made["coordinator_address"] == ["localhost:8300"]
    assert "# p2p_lookup_ports: 8201  # p2p_port serves lookups too" in shown.out.splitlines()
    notices = shown.err.splitlines()
    assert len(notices) == len([line for line in LMCACHE_P2P.splitlines() if ": " in line])
    assert "p2p_init_ports: 8200 is now p2p_port: 8200" in notices
    assert "chunk_size: 256 stays" in notices


def test_import_says_of_every_key_that_lmkv_lacks_what_takes_its_place(tmp_path: Path, capsys: Capture) -> None:
    explained = {**ABSENT, **REPLACED}
    values: dict[str, object] = {**dict.fromkeys(explained, "x"), **dict.fromkeys(RENAMED, "0")}
    values |= {"controller_monitor_ports": {"pull": 1}, "nixl_buffer_device": "cpu", "nixl_role": "sender"}
    file = tmp_path / "lmcache.yaml"
    file.write_text(yaml.safe_dump(values))
    cli.main(["config", "import", str(file)])
    said = capsys.readouterr()
    for name, instead in explained.items():
        assert f"{name}: ignored; {instead}" in said.err
    for name, alias in RENAMED.items():
        became = re.escape(f"ignored; {REPLACED[alias.name]}") if alias.name in REPLACED else r".* is now \w+: "
        assert re.search(rf"^{name}: {became}", said.err, re.MULTILINE), name


def test_import_writes_a_file_that_loads_without_notices(source: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "lmkv.yaml"
    assert cli.main(["config", "import", str(source), "--output", str(target)]) == 0
    assert capsys.readouterr().out == ""
    config = load(ConnectorConfig, file=target, env={})
    assert config == load(ConnectorConfig, file=source, env={})
    assert config.notices == ()


def test_import_overwrites_only_with_the_flag(source: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "lmkv.yaml"
    target.write_text("mine", encoding="utf-8")
    assert cli.main(["config", "import", str(source), "--output", str(target)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (f"lmkv: error: {target} exists; --force overwrites it")
    assert target.read_text(encoding="utf-8") == "mine"
    assert cli.main(["config", "import", str(source), "--output", str(target), "--force"]) == 0
    assert load(NodeConfig, file=target, env={}).p2p_port == 8200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the configuration file {file}: No such file or directory; it is set by the command"),
        ("chunk_size: [", "{file} is not valid YAML: line 1: "),
        ("- 7", "{file} must hold keys with values"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, capsys: Capture, text: str | None, message: str) -> None:
    file = tmp_path / "lmcache.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert cli.main(["config", "import", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lmkv: error: " + message.format(file=file))


def test_a_path_that_cannot_be_written_is_reported(source: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "none" / "lmkv.yaml"
    assert cli.main(["config", "import", str(source), "--output", str(target)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"lmkv: error: cannot write {target}: No such file or directory"
    )


REQUIRED = {
    "picker": "engines: http://127.0.0.1:8000\ncoordinator_address: 127.0.0.1:9000\n",
    "webhook": "pod_additions: additions.yaml\ntls_cert: cert.pem\n",
}
"""What processes need at their start."""


@pytest.mark.parametrize("process", PROCESSES)
def test_check_prints_all_keys_so_that_they_load_again(tmp_path: Path, capsys: Capture, process: str) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_text(
        "max_local_cpu_size: 512MB\nlog_level: debug\nmetrics_port: 0\n" + REQUIRED.get(process, ""), encoding="utf-8"
    )
    assert cli.main(["config", "check", str(file), "--process", process]) == 0
    cls = PROCESSES[process]
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out, encoding="utf-8")
    assert yaml.safe_load(printed.read_text(encoding="utf-8")).keys() == keys(cls).keys()
    assert load(cls, file=printed, env={}) == load(cls, file=file, env={})


def test_check_hides_secrets_reads_the_environment_and_prints_notices(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_text("cluster_secret: hush\nenable_controller: true\n", encoding="utf-8")
    monkeypatch.setenv("LMKV_CONFIG_FILE", str(file))
    monkeypatch.setenv("LMKV_CHUNK_SIZE", "64")
    assert cli.main(["config", "check"]) == 0
    shown = capsys.readouterr()
    assert "hush" not in shown.out + shown.err
    assert {
        f"cluster_secret: (hidden)  # cluster_secret in {file}",
        "chunk_size: 64  # LMKV_CHUNK_SIZE in the environment",
        "p2p_port: 0",
    } <= set(shown.out.splitlines())
    assert shown.err.startswith(f"enable_controller in {file} is ignored: ")


def test_check_refuses_as_the_process_would(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_text("chunk_sise: 64\n", encoding="utf-8")
    assert cli.main(["config", "check", str(file)]) == 2
    assert capsys.readouterr().err == (f"lmkv: error: unknown key chunk_sise in {file}; did you mean chunk_size?\n")


def test_check_prints_all_errors(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_text("chunk_sise: 64\np2p_port: x\npd_role: both\n", encoding="utf-8")
    monkeypatch.setenv("LMKV_CHUNK_SIZE", "-1")
    assert cli.main(["config", "check", str(file)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[2:5] for line in errors] == [
        ["unknown", "key", "chunk_sise"],
        ["p2p_port", "must", "be"],
        ["LMKV_CHUNK_SIZE", "must", "be"],
    ]


def test_check_prints_all_values_that_do_not_fit_others(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_text("local_disk: /var/lib/lmkv\nremote_url: s3://bucket.example\nremote_ttl: 60\n", encoding="utf-8")
    assert cli.main(["config", "check", str(file)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in errors] == ["max_local_disk_size", "remote_ttl"]


@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        ("local_disk_codec: int2", "local_disk_codec must be"),
        ("remote_codec: int8", "remote_codec: int8 rounds chunks, and this engine accepts exact ones only"),
        ("local_disk_codec: zstd\nlocal_disk_io: nixl", "local_disk_io: nixl copies chunks as they are"),
    ],
)
def test_check_refuses_codecs_that_cannot_be(tmp_path: Path, capsys: Capture, codec: str, reason: str) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_text(f"local_disk: /var/lib/lmkv\nmax_local_disk_size: 1\n{codec}\n", encoding="utf-8")
    assert cli.main(["config", "check", str(file)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert reason in error


@pytest.mark.parametrize("more", ["accept_lossy: true", "node_address: /run/lmkv/engine.sock"])
def test_check_accepts_codecs_of_engines_that_accept_them_and_of_shared_nodes(
    tmp_path: Path, capsys: Capture, more: str
) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_text(f"remote_codec: int8\n{more}\n", encoding="utf-8")
    assert cli.main(["config", "check", "--process", "connector", str(file)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("process", REQUIRED)
def test_check_names_what_the_process_would_miss(capsys: Capture, process: str) -> None:
    assert cli.main(["config", "check", "--process", process]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_check_prints_only_what_was_changed(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_text("p2p_port: 7000\nchunk_size: 256\n", encoding="utf-8")
    monkeypatch.setenv("LMKV_LOG_LEVEL", "debug")
    assert cli.main(["config", "check", str(file), "--changed"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"p2p_port: 7000  # p2p_port in {file}",
        "log_level: debug  # LMKV_LOG_LEVEL in the environment",
    ]
