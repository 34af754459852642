"""`lmkv doctor`: each check on a host that is fit, and on one that is not."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from lmkv import cli
from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig
from lmkv.internal import PROTOCOL_VERSION, Build
from lmkv.transfer.choice import RDMA
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_client import Coordinator
from lmkv_client.commands.doctor import fleet as fleet_checks
from lmkv_client.commands.doctor import host, transfer
from lmkv_client.commands.doctor.finding import Finding, check_tls
from lmkv_client.commands.doctor.fleet import check_fleet, check_keys
from lmkv_client.commands.doctor.host import check_coordinator_ports, check_folder, check_memory, check_peer_port
from lmkv_client.commands.doctor.transfer import check_transfer
from lmkv_server.node.node import Node
from tests.client.conftest import Fleet, RunCommand
from tests.server.coordinator.guarded import guarded, token_of
from tests.support.certificates import issue
from tests.support.specs import LLAMA
from tests.waiting import eventually

Capture = pytest.CaptureFixture[str]


def only_finding(findings: Iterator[Finding]) -> tuple[str, str]:
    (finding,) = findings
    return finding.level, finding.text


async def of_fleet(config: ConnectorConfig) -> dict[str, tuple[str, str]]:
    return {finding.check: (finding.level, finding.text) async for finding in check_fleet(config)}


# --- This host ---------------------------------------------------------------------------------------------------


@pytest.fixture
def node(short_folder: Path) -> NodeConfig:
    return NodeConfig(instance_id="lmkv-1", runtime_dir=str(short_folder), max_local_cpu_size=0.01)


@pytest.fixture
def running_node(node: NodeConfig) -> Iterator[NodeConfig]:
    """Its lock is held, as by a node that runs."""
    node.make_instance_dir()
    with node.lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield node


def test_a_pool_that_fits_is_fine(node: NodeConfig) -> None:
    level, text = only_finding(check_memory(node))
    assert level == "ok"
    assert text.startswith("max_local_cpu_size is 10.2 MiB, this machine and its cgroup can give ")


def test_a_pool_that_does_not_fit_fails_with_the_key(tmp_path: Path) -> None:
    level, text = only_finding(check_memory(NodeConfig(max_local_cpu_size=1_000_000)))
    assert level == "fail"
    assert text.endswith("; set max_local_cpu_size to less")
    level, text = only_finding(
        check_memory(NodeConfig(max_local_cpu_size=1_000_000, pool_path=str(tmp_path / "a/pool")))
    )
    assert level == "fail"
    assert str(tmp_path) in text or "this machine" in text


def test_the_pool_that_an_earlier_life_has_left_is_there_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 1 << 20)
    path = tmp_path / "pool"
    path.write_bytes(b"x" * (16 << 20))
    for persist_pool, expected in ((True, "ok"), (False, "fail")):
        kept = NodeConfig(max_local_cpu_size=0.01, pool_path=str(path), persist_pool=persist_pool, instance_id="kept")
        assert only_finding(check_memory(kept))[0] == expected


def test_the_memory_and_the_port_of_the_own_node_are_its_own(running_node: NodeConfig) -> None:
    assert only_finding(check_memory(running_node)) == ("ok", "the node lmkv-1 is running and has 10.2 MiB")
    assert only_finding(check_peer_port(running_node)) == ("ok", "the node lmkv-1 is running and has it")


def test_a_folder_that_cannot_hold_sockets_fails(tmp_path: Path, node: NodeConfig) -> None:
    assert only_finding(check_folder(node)) == (
        "ok",
        f"engine and node connect in {node.runtime_dir}/lmkv-1/engine.sock",
    )
    level, text = only_finding(check_folder(NodeConfig(runtime_dir=str(tmp_path / ("x" * 100)))))
    assert level == "fail"
    assert "set a shorter runtime_dir or instance_id" in text


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        yield taken.getsockname()[1]


def test_a_port_that_is_taken_fails_with_the_key(node: NodeConfig, taken_port: int) -> None:
    assert only_finding(check_peer_port(node)) == ("ok", "a free port on 127.0.0.1 will be selected")
    level, text = only_finding(check_peer_port(NodeConfig(p2p_port=taken_port)))
    assert level == "fail"
    assert text.startswith(
        f"{taken_port} on 127.0.0.1 cannot be bound (Address already in use); set p2p_port to a free"
    )


def test_an_address_of_another_machine_fails_with_the_key() -> None:
    level, text = only_finding(check_peer_port(NodeConfig(p2p_host="192.0.2.1")))
    assert level == "fail"
    assert "set p2p_host to an address of this machine" in text
    level, text = only_finding(check_peer_port(NodeConfig(p2p_host="nowhere.invalid")))
    assert level == "fail"
    assert text.endswith("; set p2p_host")


def test_peers_of_other_hosts_cannot_reach_loopback() -> None:
    findings = list(check_peer_port(NodeConfig(coordinator_address=("head:9000",))))
    assert [(finding.check, finding.level) for finding in findings] == [("p2p_port", "ok"), ("p2p_host", "warn")]
    assert len(list(check_peer_port(NodeConfig(coordinator_address=("127.0.0.1:9000",))))) == 1


def test_each_port_of_a_coordinator_is_tried(taken_port: int) -> None:
    findings = list(check_coordinator_ports(CoordinatorConfig(port=taken_port, http_port=0)))
    assert [(finding.check, finding.level) for finding in findings] == [("port", "fail"), ("http_port", "ok")]


def test_what_is_not_wanted_is_not_checked() -> None:
    config = NodeConfig(local_cpu=False, enable_p2p=False)
    for check in (check_memory, check_peer_port, check_transfer):
        level, text = only_finding(check(config))
        assert level == "ok"
        assert text.startswith("not needed")


def test_this_host_makes_the_golden_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only_finding(check_keys())[0] == "ok"
    vectors = json.loads((Path(__file__).parents[3] / "lmkv/golden_keys.json").read_text())["chains"]
    assert any(vector["keys"] == list(fleet_checks.GOLDEN_KEYS) for vector in vectors)
    monkeypatch.setattr(fleet_checks, "GOLDEN_KEYS", ("00" * 16, "11" * 16))
    assert only_finding(check_keys())[0] == "fail"


# --- Transfer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_rdma", [True, False])
def test_every_channel_that_may_be_chosen_starts(has_rdma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(transfer, "find_links", lambda: {RDMA} if has_rdma else set())
    findings = list(check_transfer(NodeConfig()))
    assert [finding.level for finding in findings] == ["ok"] * 3, findings
    nixl = findings.pop(1 if has_rdma else 2).text
    assert nixl.startswith("nixl with UCX, UCX_TLS=tcp started in ")
    assert nixl.endswith("; the last resort, because this host has no RDMA device") is not has_rdma
    assert [finding.text.rpartition(" in ")[0] for finding in findings] == ["shm started", "tcp started"]


def test_what_does_not_start_is_no_failure_where_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "find_links", lambda: {RDMA})
    _, nixl, _ = check_transfer(NodeConfig(nixl_backends=("NONE",)))
    assert nixl.level == "warn"
    assert nixl.text.endswith("; without it chunks are transferred by shm or tcp")


@pytest.mark.parametrize(
    ("backends", "ucx_tls", "message"),
    [
        (("UCX",), "posix,self", "UCX_TLS, if set, must name tcp"),
        (("NONE",), "tcp", "nixl_backends: NONE did not start"),
    ],
)
def test_a_backend_that_does_not_start_fails_with_what_nixl_says(
    backends: tuple[str, ...], ucx_tls: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", ucx_tls)
    level, text = only_finding(check_transfer(NodeConfig(transfer_channel="nixl", nixl_backends=backends)))
    assert level == "fail"
    assert message in text


def test_channels_are_tried_where_the_node_would_open_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.chdir("/proc")  # where no file can be created
    level, text = only_finding(check_transfer(NodeConfig(transfer_channel="tcp", runtime_dir=str(tmp_path))))
    assert (level, text[:11]) == ("ok", "tcp started")
    assert list(tmp_path.iterdir()) == []


# --- TLS ---------------------------------------------------------------------------------------------------------


def certificate(folder: Path, days: float) -> CoordinatorConfig:
    """A coordinator whose certificate expires in this number of days."""
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    begin = end - datetime.timedelta(days=30)
    issued = trustme.CA().issue_cert("localhost", not_before=begin, not_after=end)
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(issued.cert_chain_pems[0].bytes())
    issued.private_key_pem.write_to_path(str(key))
    return CoordinatorConfig(tls_cert=str(cert), tls_key=str(key))


@pytest.mark.parametrize(
    ("days", "level", "message"),
    [
        (20, "ok", "is valid until 20"),
        (5, "warn", "; renew it"),
        (-1, "fail", "has expired on 20"),
        (31, "fail", "; check this host's clock"),
    ],
)
def test_certificates_are_checked_for_their_expiry(days: float, level: str, message: str, tmp_path: Path) -> None:
    found, text = only_finding(check_tls(certificate(tmp_path, days)))
    assert found == level
    assert message in text


def test_certificates_of_the_far_future_and_of_authorities_are_read(tmp_path: Path) -> None:
    certificates = issue(tmp_path)
    config = ConnectorConfig(tls_ca=certificates.ca, tls_cert=certificates.cert, tls_key=certificates.key)
    findings = list(check_tls(config))
    assert [(finding.check, finding.level) for finding in findings] == [("tls_cert", "ok"), ("tls_ca", "ok")]


def test_no_tls_is_said_and_files_that_are_none_fail(tmp_path: Path) -> None:
    assert only_finding(check_tls(ConnectorConfig())) == ("ok", "not configured: the control plane is not encrypted")
    level, text = only_finding(check_tls(ConnectorConfig(tls_ca=str(tmp_path / "nowhere.pem"))))
    assert level == "fail"
    assert text.startswith("tls_ca: cannot read ")


# --- The fleet ---------------------------------------------------------------------------------------------------


async def test_a_fleet_that_is_fit_passes_every_check(fleet: Fleet) -> None:
    found = await of_fleet(
        ConnectorConfig(instance_id="new", coordinator_address=(fleet.address,), cluster_secret="hush")
    )
    assert {check: level for check, (level, _) in found.items()} == {
        "coordinator": "ok",
        "instance_id": "ok",
        "versions": "warn",  # the scripted instances say none
        "clock": "ok",
        "agreement": "ok",
    }
    assert "; 2 instances" in found["coordinator"][1]
    assert found["agreement"][1] == "coordinator and host compute the same keys for llama"
    async with Coordinator(fleet.address) as coordinator:  # the visitor has left
        assert [instance.instance_id for instance in await coordinator.instances()] == ["a", "b"]


async def test_another_secret_fails(fleet: Fleet) -> None:
    found = await of_fleet(ConnectorConfig(coordinator_address=(fleet.address,), cluster_secret="another"))
    level, text = found["agreement"]
    assert level == "fail"
    assert text.endswith("; set the same cluster_secret on both")


async def test_a_name_that_another_process_has_fails(fleet: Fleet, short_folder: Path) -> None:
    config = ConnectorConfig(instance_id="a", runtime_dir=str(short_folder), coordinator_address=(fleet.address,))
    level, text = (await of_fleet(config))["instance_id"]
    assert level == "fail"
    assert text == "a is in use by a running process at 127.0.0.1:7000; set another instance_id"
    config.make_instance_dir()
    with config.lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert (await of_fleet(config))["instance_id"] == ("ok", "a is this host's node, at 127.0.0.1:7000")


async def test_a_missing_coordinator_fails_and_no_configured_one_warns() -> None:
    found = await of_fleet(ConnectorConfig(coordinator_address=("127.0.0.1:1",)))
    level, text = found["coordinator"]
    assert level == "fail"
    assert "start one with `lmkv coordinator`, or set coordinator_address" in text
    assert list(found) == ["coordinator"]
    assert (await of_fleet(ConnectorConfig()))["coordinator"][0] == "warn"


async def test_a_clock_that_is_off_warns(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_checks, "CLOCK_SECONDS", -1.0)  # nothing is near enough
    found = await of_fleet(ConnectorConfig(coordinator_address=(fleet.address,), cluster_secret="hush"))
    level, text = found["clock"]
    assert level == "warn"
    assert text.endswith("; synchronise both by NTP")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROTOCOL_VERSION", PROTOCOL_VERSION - 1),  # a newer coordinator refuses this host
        ("OWN_BUILD", Build(version="9.0.0", protocol_version=PROTOCOL_VERSION + 1)),  # an older one accepts it
    ],
)
async def test_a_coordinator_that_nodes_of_this_version_cannot_join_fails(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, name: str, value: int | Build
) -> None:
    monkeypatch.setattr(fleet_checks, name, value)
    found = await of_fleet(ConnectorConfig(coordinator_address=(fleet.address,), cluster_secret="hush"))
    level, text = found["visit"]
    assert level == "fail"
    assert text.endswith("shares nothing until both run the same version: upgrade coordinators and nodes together")
    assert "clock" not in found


# --- The command -------------------------------------------------------------------------------------------------


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch, short_folder: Path) -> None:
    """An environment that passes."""
    monkeypatch.setenv("LMKV_RUNTIME_DIR", str(short_folder))
    monkeypatch.setenv("LMKV_MAX_LOCAL_CPU_SIZE", "16MB")
    monkeypatch.setenv("LMKV_ENABLE_P2P", "false")
    monkeypatch.setenv("LMKV_CLUSTER_SECRET", "hush")


@pytest.mark.usefixtures("fit")
async def test_the_command_prints_a_line_per_check(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.split()[1] != "cuda"] == [
        ["ok", "config"],
        ["ok", "keys"],
        ["ok", "memory"],
        ["ok", "pool"],
        ["ok", "pool"],
        ["ok", "kernels"],
        ["ok", "runtime_dir"],
        ["ok", "p2p_port"],
        ["ok", "transfer"],
        ["ok", "tls"],
        ["ok", "coordinator"],
        ["ok", "instance_id"],
        ["warn", "versions"],
        ["ok", "clock"],
        ["ok", "agreement"],
    ]


@pytest.mark.usefixtures("fit")
async def test_a_failure_is_exit_code_1(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("doctor", "--coordinator", "127.0.0.1:1", "--json") == 1
    findings = json.loads(capsys.readouterr().out)
    assert [finding["check"] for finding in findings if finding["level"] == "fail"] == ["coordinator"]


async def test_the_fleet_is_checked_instance_by_instance(
    fleet: Fleet, node: NodeConfig, run_command: RunCommand, capsys: Capture
) -> None:
    config = dataclasses.replace(node, coordinator_address=(fleet.address,))
    async with Node(config) as real:
        async with Coordinator(fleet.address) as coordinator:

            async def has_reported() -> bool:
                return any(one.instance_id == "lmkv-1" and one.synced for one in await coordinator.instances())

            await eventually(has_reported, True)
        assert await run_command("doctor", "--fleet", "--coordinator", fleet.address, "--json") == 1
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    assert findings["coordinator"]["text"].endswith("; 3 instances")
    assert findings["a"]["level"] == findings["b"]["level"] == "fail"
    assert "cannot be reached" in findings["a"]["text"]
    assert findings["lmkv-1"]["level"] == "ok", findings["lmkv-1"]
    assert findings["lmkv-1"]["text"].startswith(f"{real.peer_address} responds; engines: 0")


async def test_a_fleet_without_a_coordinator_fails_with_its_address(run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("doctor", "--fleet", "--coordinator", "127.0.0.1:1") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("fail  coordinator  127.0.0.1:1: ")


def test_a_configuration_that_cannot_be_read_is_all_there_is_to_say(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_text("chunk_sise: 256\n")
    assert cli.main(["doctor", "--config", str(file)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("fail  config       unknown key chunk_sise")
    assert "did you mean chunk_size?" in line


def test_a_coordinators_host_is_checked_for_what_it_needs(capsys: Capture, taken_port: int, tmp_path: Path) -> None:
    file = tmp_path / "head.yaml"
    file.write_text(f"port: {taken_port}\nhttp_port: off\n")
    assert cli.main(["doctor", "coordinator", "--config", str(file)]) == 1
    checks = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert checks == [["ok", "config"], ["ok", "keys"], ["ok", "tls"], ["fail", "port"]]


def test_a_spec_that_this_host_reads_otherwise_fails() -> None:
    spec = LLAMA.to_proto()
    spec.layer_count += 1  # the fingerprint is now another's
    instances = [Instance(instance_id="liar", specs=[spec])]
    specs, finding = fleet_checks.check_specs(instances)
    assert specs == []
    assert finding
    assert finding.text.startswith("llama of liar: fingerprint ")


async def test_an_engines_token_sees_which_checks_were_skipped(tmp_path: Path) -> None:
    async with guarded(tmp_path) as fleet:
        address, token = (fleet.coordinator.address,), token_of("engine")
        found = await of_fleet(ConnectorConfig(coordinator_address=address, auth_token=token))
        assert found["coordinator"][0] == "ok"
        level, text = found["instances"]
        assert level == "warn"
        assert "admin's token" in text
        assert found["clock"][0] == "ok"
        assert "versions" not in found
        found = await of_fleet(ConnectorConfig(coordinator_address=address, auth_token=token_of("admin")))
        assert found["versions"][0] == "ok"
        assert "instances" not in found
