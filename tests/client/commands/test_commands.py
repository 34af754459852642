"""The typed SDK and the commands on top of it, against a real server that gives canned answers."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from lmkv import cli
from lmkv.errors import BadTokens, ModelAmbiguous, Unreachable
from lmkv.keys import ChunkKey
from lmkv.rpc.endpoints import make_server
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.tiers import DISK, HOST
from lmkv.v1.cache_service_pb2 import Holder, LookupRequest, LookupResponse, TierRun
from lmkv.v1.cache_service_pb2_grpc import CacheServiceServicer, add_CacheServiceServicer_to_server
from lmkv.v1.chunk_pb2 import KvSpec
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesRequest, ListInstancesResponse, SpecConflict, TierUsage
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceServicer, add_RegistryServiceServicer_to_server
from lmkv_client import Coordinator
from lmkv_client.commands import flags
from tests.tokenizers import save_tokenizer

TOKENS = [128000, 849, 21435, 279, 26431, 315, 85748, 6636, 304, 4221, 4211, 13]
COMMANDS = {"lookup": lambda: flags.lookup, "instances": lambda: flags.instances}


class CannedCoordinator(CacheServiceServicer, RegistryServiceServicer):
    """Answers what the test has put in, and remembers what it was asked."""

    def __init__(self) -> None:
        self.response = LookupResponse(revision=3, is_complete=True)
        self.instances: list[Instance] = []
        self.page_size = 2
        self.failure: Exception | None = None
        self.asked: list[LookupRequest] = []
        self.address = ""

    async def Lookup(self, request: LookupRequest, context: Any) -> LookupResponse:  # noqa: N802
        self.asked.append(request)
        if self.failure:
            raise self.failure
        return self.response

    async def ListInstances(self, request: ListInstancesRequest, context: Any) -> ListInstancesResponse:  # noqa: N802
        start = int(request.page_token or 0)
        stop = start + self.page_size
        return ListInstancesResponse(
            instances=self.instances[start:stop], next_page_token=str(stop) if stop < len(self.instances) else ""
        )


@pytest.fixture
async def coordinator(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CannedCoordinator]:
    canned = CannedCoordinator()  # type: ignore[abstract]  # two RPCs are enough here
    server = await make_server(["lmkv.v1.CacheService", "lmkv.v1.RegistryService"])
    add_CacheServiceServicer_to_server(canned, server)
    add_RegistryServiceServicer_to_server(canned, server)
    canned.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    monkeypatch.setenv("LMKV_COORDINATOR_ADDRESS", canned.address)
    await server.start()
    yield canned
    await server.stop(None)


async def run(*argv: str) -> int:
    """A command line, in a thread of its own: commands have their own event loop."""
    return await asyncio.to_thread(cli.main, argv, COMMANDS)


def holder(instance_id: str, *runs: tuple[str, int, int]) -> Holder:
    return Holder(
        instance_id=instance_id,
        runs=[TierRun(tier=tier, chunk_count=chunks, token_count=tokens) for tier, chunks, tokens in runs],
    )


async def test_the_sdk_asks_by_tokens(coordinator: CannedCoordinator) -> None:
    coordinator.response = LookupResponse(holders=[holder("lmkv-1", (HOST, 1, 12))], is_complete=True)
    async with Coordinator(coordinator.address) as client:
        response = await client.lookup(tokens=TOKENS, model_name="llama", cache_salt="s", lora_name="l")
    assert response == coordinator.response
    assert coordinator.asked == [
        LookupRequest(prompt=by_tokens(TOKENS, model_name="llama", cache_salt="s", lora_name="l"))
    ]


async def test_the_sdk_asks_by_keys(coordinator: CannedCoordinator) -> None:
    async with Coordinator(coordinator.address) as client:
        await client.lookup(keys=[ChunkKey(b"a" * 16), ChunkKey(b"b" * 16)])
    assert coordinator.asked == [LookupRequest(prompt=by_keys([b"a" * 16, b"b" * 16]))]


async def test_the_sdk_raises_the_coordinators_own_errors(coordinator: CannedCoordinator) -> None:
    coordinator.failure = ModelAmbiguous("several models: a, b", models="a, b")
    async with Coordinator(coordinator.address) as client:
        with pytest.raises(ModelAmbiguous, match="several models: a, b") as raised:
            await client.lookup(tokens=TOKENS)
    assert raised.value.metadata == {"models": "a, b"}


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], ["a"], [1.5]])
async def test_the_sdk_refuses_what_is_no_token(coordinator: CannedCoordinator, tokens: Any) -> None:
    async with Coordinator(coordinator.address) as client:
        with pytest.raises(BadTokens):
            await client.lookup(tokens=tokens)


async def test_the_sdk_says_whom_it_did_not_reach() -> None:
    async with Coordinator("127.0.0.1:1", timeout_seconds=5) as client:
        with pytest.raises(Unreachable, match=r"no coordinator responds at 127\.0\.0\.1:1") as raised:
            await client.instances()
        assert raised.value.metadata["address"] == "127.0.0.1:1"
        assert raised.value.metadata["cause"].startswith("UNAVAILABLE: ")
        await client.aclose()  # closing twice is fine


async def test_the_sdk_lists_all_pages(coordinator: CannedCoordinator) -> None:
    coordinator.instances = [Instance(instance_id=f"lmkv-{number}") for number in range(5)]
    async with Coordinator(coordinator.address) as client:
        assert await client.instances() == coordinator.instances


@pytest.mark.parametrize("flag", ["--coordinator", "--coordinator-address", "--address", "--server"])
async def test_the_coordinator_is_named_by_what_people_guess(
    coordinator: CannedCoordinator, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    address = coordinator.address
    monkeypatch.setenv("LMKV_COORDINATOR_ADDRESS", "127.0.0.1:1")
    arguments = ["lookup", "--tokens", "1,2", flag, address]
    assert await asyncio.to_thread(cli.main, arguments, {"lookup": lambda: flags.lookup}) == 0
    assert len(coordinator.asked) == 1


async def test_lookup_shows_a_line_per_run(coordinator: CannedCoordinator, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator.response = LookupResponse(
        is_complete=True,
        holders=[
            holder("lmkv-1", (HOST, 20, 5120), (DISK, 1, 7)),
            holder("lmkv-2", (HOST, 1, 256)),
        ],
    )
    assert await run("lookup", "--tokens", "1,2,3", "--model", "llama", "--cache-salt", "s", "--lora", "l") == 0
    assert capsys.readouterr().out == (
        "INSTANCE  TIER  TOKENS  CHUNKS\n"
        "lmkv-1    host    5120      20\n"
        "lmkv-1    disk       7       1\n"
        "lmkv-2    host     256       1\n"
    )
    assert coordinator.asked == [
        LookupRequest(prompt=by_tokens([1, 2, 3], model_name="llama", cache_salt="s", lora_name="l"))
    ]


async def test_an_uncached_prompt_is_an_empty_answer(
    coordinator: CannedCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.instances = [Instance(instance_id="lmkv-1")]
    assert await run("lookup", "--tokens", "[1, 2]") == 0
    assert "no engine has registered yet" in capsys.readouterr().out
    coordinator.instances[0].specs.add(model_name="llama")
    assert await run("lookup", "--tokens", "[1, 2]") == 0
    assert capsys.readouterr().out == "no instance holds any of it\n"
    coordinator.response.is_complete = False
    assert await run("lookup", "--tokens", "1") == 0
    assert "still reporting" in capsys.readouterr().out


async def test_lookup_as_json_has_the_words_of_the_api(
    coordinator: CannedCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.response = LookupResponse(holders=[holder("lmkv-1", (HOST, 1, 12))], is_complete=True)
    assert await run("lookup", "--tokens", "1", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["holders"][0]["runs"] == [{"tier": "host", "chunk_count": 1, "token_count": 12}]
    assert answer["is_complete"] is True


async def test_lookup_reads_tokens_from_a_file_or_from_a_pipe(
    coordinator: CannedCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    assert await run("lookup", "--tokens-file", str(tmp_path / "prompt.json")) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("[7, 8]\n"))
    assert await run("lookup", "--tokens-file", "-") == 0
    assert [list(request.prompt.tokens.token_ids) for request in coordinator.asked] == [TOKENS, [7, 8]]


async def test_lookup_takes_keys_in_hex(coordinator: CannedCoordinator) -> None:
    assert await run("lookup", "--keys", f"{'ab' * 16},{'cd' * 16}") == 0
    assert coordinator.asked == [LookupRequest(prompt=by_keys([b"\xab" * 16, b"\xcd" * 16]))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "model", {"explain": 1, "KV": 2, "cache": 3})


async def test_lookup_tokenizes_a_prompt(coordinator: CannedCoordinator, model: Path) -> None:
    assert await run("lookup", "--prompt", "explain cache", "--model", str(model)) == 0
    assert await run("lookup", "--prompt", "KV huh", "--model", "llama", "--tokenizer", str(model)) == 0
    assert coordinator.asked == [
        LookupRequest(prompt=by_tokens([1, 3])),
        LookupRequest(prompt=by_tokens([2, 0], model_name="llama")),
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of the arguments --tokens --tokens-file --keys --prompt is required; see `lmkv lookup --help`"),
        (["--tokens", "1", "--keys", "ab"], "argument --keys: not allowed with argument --tokens"),
        (["--tokens", "1,x"], "--tokens must be token ids such as 128000,849,21435, not '1,x'"),
        (["--tokens", ""], "--tokens must be token ids such as 128000,849,21435, not ''"),
        (["--tokens-file", "/nowhere"], "--tokens-file: cannot read /nowhere: No such file or directory"),
        (["--tokens-file", __file__], "test_commands.py is not JSON"),
        (["--keys", "xyz"], "--keys must be chunk keys in hex, not 'xyz'"),
        (["--keys", "abcd"], "--keys must be chunk keys of 32 hex digits each, not 'abcd'"),
        (["--prompt", "Hi"], "--prompt needs the model's folder: add --model FOLDER"),
        (
            ["--prompt", "Hi", "--model", "/nowhere"],
            "--prompt: /nowhere/tokenizer.json does not exist; name the folder",
        ),
        (["--tokens", "1", "--coordinator", "nowhere"], "--coordinator must be host:port, such as 10.0.0.5:9000"),
    ],
)
async def test_bad_usage_of_lookup_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("lookup", *argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("lmkv: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("content", ['{"tokens": [1]}', "[1.5]", '["a"]', "[true]", "7"])
async def test_a_file_must_hold_a_list_of_tokens(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.json").write_text(content)
    assert await run("lookup", "--tokens-file", str(tmp_path / "prompt.json")) == 2
    assert "must hold one JSON list of token ids" in capsys.readouterr().err


async def test_a_folder_without_a_real_tokenizer_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "tokenizer.json").write_text("{}")
    assert await run("lookup", "--prompt", "Hi", "--model", str(model)) == 2
    assert "tokenizer.json is not a tokenizer" in capsys.readouterr().err


async def test_without_the_package_tokenizers_a_prompt_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as Python marks what cannot be imported
    assert await run("lookup", "--prompt", "Hi", "--model", str(model)) == 2
    assert "needs the package tokenizers: `pip install '.[tokenizers]'`" in capsys.readouterr().err


async def test_the_coordinators_refusal_is_one_line(
    coordinator: CannedCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.failure = ModelAmbiguous("several models are served: a, b; name one")
    assert await run("lookup", "--tokens", "1") == 1
    assert capsys.readouterr().err == "lmkv: error: several models are served: a, b; name one\n"


async def test_unreached_instances_are_shown_with_the_coordinators_reason(
    coordinator: CannedCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.failure = Unreachable("instance lmkv-1 did not answer in time", instance_id="lmkv-1")
    assert await run("lookup", "--tokens", "1") == 1
    assert capsys.readouterr().err == "lmkv: error: instance lmkv-1 did not answer in time\n"


@pytest.mark.parametrize(
    "command",
    [
        ["lookup", "--tokens", "1"],
        ["instances"],
        ["move", "--from", "a", "--to", "b", "--tokens", "1"],
        ["pin", "--at", "a", "--tokens", "1"],
        ["unpin", "a/1"],
        ["pins"],
        ["clear", "--all", "--yes"],
        ["ops"],
        ["top"],
    ],
)
async def test_a_missing_server_is_one_line_with_the_fix(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(cli.main, (*command, "--coordinator", "127.0.0.1:1")) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "lmkv: error: no coordinator responds at 127.0.0.1:1; start one with `lmkv coordinator`, or name another with "
        "--coordinator HOST:PORT (UNAVAILABLE: "
    )
    assert error.index("\n") == len(error) - 1


async def test_the_coordinator_is_where_flag_environment_or_file_say(
    coordinator: CannedCoordinator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await run("instances") == 0  # the environment names it
    monkeypatch.setenv("LMKV_COORDINATOR_ADDRESS", "127.0.0.1:1")
    assert await run("instances", "--coordinator", coordinator.address) == 0
    monkeypatch.delenv("LMKV_COORDINATOR_ADDRESS")
    file = tmp_path / "lmkv.yaml"
    file.write_text(f"controller_pull_url: {coordinator.address}\nchunk_size: 64\n")
    assert await run("instances", "--config", str(file)) == 0
    assert capsys.readouterr().out == "no instance is registered\n" * 3


LLAMA = KvSpec(model_name="llama", kv_dtype="bfloat16")


async def test_instances_shows_a_line_each_and_who_cannot_share(
    coordinator: CannedCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    conflict = SpecConflict(
        instance_id="lmkv-2", model_name="llama", field="kv_dtype", own_value="bfloat16", other_value="float32"
    )
    mirrored = SpecConflict(
        instance_id="lmkv-1", model_name="llama", field="kv_dtype", own_value="float32", other_value="bfloat16"
    )
    coordinator.instances = [
        Instance(instance_id="lmkv-10", peer_address="10.0.0.9:8200"),
        Instance(
            instance_id="lmkv-1",
            peer_address="10.0.0.7:8200",
            specs=[LLAMA, LLAMA, KvSpec(model_name="qwen", kv_dtype="fp8_e4m3")],
            tiers=[
                TierUsage(tier=HOST, capacity_bytes=5 << 30, used_bytes=645 << 20, chunk_count=20),
                TierUsage(tier="example", used_bytes=1 << 30, chunk_count=7),
            ],
            engine_count=2,
            conflicts=[conflict],
            synced=True,
        ),
        Instance(
            instance_id="lmkv-2",
            peer_address="10.0.0.8:8200",
            specs=[KvSpec(model_name="llama", kv_dtype="float32")],
            conflicts=[mirrored],
            synced=True,
        ),
    ]
    assert await run("instances") == 0
    assert capsys.readouterr().out == (
        "INSTANCE             PEER           MODELS                             TIERS          "
        "                          ENGINES\n"
        "lmkv-1               10.0.0.7:8200  llama (bfloat16), qwen (fp8_e4m3)  host 0.63/5.00 GiB, example 1.00 GiB"
        "           2\n"
        "lmkv-2               10.0.0.8:8200  llama (float32)                    -                                   "
        "  0, standby\n"
        "lmkv-10 (reporting)  10.0.0.9:8200  any, as standby                    -                                   "
        "  0, standby\n"
        "lmkv-1 and lmkv-2 cannot share llama: kv_dtype is bfloat16 on the one, float32 on the other\n"
    )


async def test_instances_as_json_has_all_of_them(
    coordinator: CannedCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.instances = [Instance(instance_id=f"lmkv-{number}", specs=[LLAMA]) for number in range(3)]
    assert await run("instances", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [instance["instance_id"] for instance in answer["instances"]] == ["lmkv-0", "lmkv-1", "lmkv-2"]
    assert answer["instances"][0]["specs"][0]["kv_dtype"] == "bfloat16"


async def test_a_terminal_gets_a_frame_and_every_bracket(
    coordinator: CannedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.instances = [
        Instance(
            instance_id="lmkv-1",
            synced=True,
            specs=[KvSpec(model_name="[b]llama[/b]", kv_dtype="bfloat16")],
            tiers=[TierUsage(tier=tier, used_bytes=1 << 30) for tier in ("host", "disk")],
        )
    ]
    ours, theirs = pty.openpty()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        assert await run("instances") == 0
    with os.fdopen(ours, "rb") as screen:
        shown = screen.read1(100_000).decode()
    assert "[b]llama[/b] (bfloat16)" in shown
    assert "━" in shown or "─" in shown
    assert re.search(r"host 1.00 GiB +\S +0, standby.*\n.*disk 1.00 GiB ", shown), "a tier a line"


COMMAND_NAMES = [
    point.name for point in entry_points(group=cli.GROUP) if point.value.startswith("lmkv_client.commands.")
]


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    examples = re.findall(rf"^  (lmkv {command}\b.*)", shown.partition("\nexamples:\n")[2], re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(re.split(r" {2,}| \| ", example)[0])
        parser = argparse.ArgumentParser()
        cli.find_commands()[command]().add_arguments(parser)
        parser.parse_args(words[2:])  # exits on what it does not take


@pytest.mark.parametrize("command", ["move", "copy", "clear", "ops", "doctor"])
def test_help_of_what_gives_orders_says_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "exit codes:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("lmkv drain no", {"node-1", "node-2"}),
        ("lmkv pin --at ", {"node-1", "node-2", "other"}),
        ("lmkv move --from o", {"other"}),
        ("lmkv explain --coordinator 127.0.0.1:1 --instance ", set()),
    ],
)
async def test_shells_complete_the_instances_of_the_fleet(
    coordinator: CannedCoordinator, line: str, completed: set[str]
) -> None:
    coordinator.instances = [Instance(instance_id=name) for name in ("node-1", "node-2", "other")]
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-c", '"$@" 8>&1 >/dev/null 2>/dev/null', "-", sys.executable, "-m", "lmkv"),
        env={**os.environ, **asked, "_ARGCOMPLETE_SUPPRESS_SPACE": "1"},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await shell.communicate()
    assert {word for word in output.decode().split("\n") if word and not word.startswith("-")} == completed


def test_help_imports_no_command() -> None:
    code = "import sys; from lmkv import cli; cli.main(['--help']); sys.exit('lmkv_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    commands = cli.find_commands()
    assert set(commands) == set(cli.SUMMARIES)
    for name, load in commands.items():
        assert f"\n  {name:<14}{cli.SUMMARIES[name]}\n" in done.stdout
        assert load().help == ""
