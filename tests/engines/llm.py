"""vLLM engines in processes of their own, with what the tests ask of them; and fleets of such engines.

`tests/conftest.py` makes its fixtures known.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import pytest

from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.engine import LMKV_TRANSFER_CONFIG
from lmkv_client.demo.process import (
    POLL_SECONDS,
    RunningProcess,
    end_processes,
    left_by_engines,
    pids_with_environment,
    session_pids,
)
from tests.support.fork_server import ForkedProcess, ForkServer, Request, fork

SERVER = "vllm.entrypoints.openai.api_server"

READY_TIMEOUT_SECONDS = 600.0
ANSWER_TIMEOUT_SECONDS = 600.0
STOP_TIMEOUT_SECONDS = 60.0

CALM = {
    "max_local_cpu_size": "256MiB",
    "node_linger": "600",
    "save_partial_chunks": "false",  # what tests count is whole chunks
    # A busy machine makes tests slow, not wrong.
    "node_start_timeout": "120",
    "lookup_timeout": "5",
    "coordinator_timeout": "2",
    "load_timeout": "10",
    "refuse_slow_fetches": "false",
    "audit_rate": "0",
}
"""Settings of lmkv in every engine of the tests."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in the process of the LLM
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # log probabilities would be compiled for seconds
}


def make_prompt(seed: int, token_count: int, *, prefix: Sequence[int] = ()) -> list[int]:
    """Token ids of `prefix`, then random ones, the same for every seed: `token_count` in all."""
    choose = random.Random(seed)
    return [*prefix, *(choose.randrange(2, 500) for _ in range(token_count - len(prefix)))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture of random pixels in a prompt, and what the caller says of it."""

    seed: int
    size: int
    uuid: str = ""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """Options of the processor for this prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmAnswer:
    """What an engine says to one prompt."""

    samples: tuple[tuple[int, ...], ...]
    finish_reason: str
    cached_tokens: int
    """Tokens of the prompt that vLLM did not compute."""
    logprobs: tuple[float, ...]
    """Of the tokens of the first completion, if they were asked for."""
    prompt_logprobs: tuple[float | None, ...]
    transfer_params: Mapping[str, Any]
    """What the connector says of the request."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first, and mostly the only, completion."""
        return self.samples[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What an engine says to prompts that it got at the same time, and what lmkv had to do with it."""

    answers: tuple[LlmAnswer, ...]
    grown: Mapping[str, float]
    """How much each counter at /metrics has grown."""
    seconds: float
    """Until the last completion was there."""

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """The completions, in the order of the prompts."""
        return [answer.token_ids for answer in self.answers]

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that vLLM did not compute."""
        return sum(answer.cached_tokens for answer in self.answers)

    @property
    def loaded_tokens(self) -> int:
        """Those among them whose KV lmkv has loaded."""
        return int(self.grown["lmkv:loaded_tokens_total"])

    @property
    def peer_tokens(self) -> int:
        """Those among them that came from a peer."""
        return int(self.grown['lmkv:tier_tokens_total{tier="peers"}'])

    @property
    def missed_tokens(self) -> dict[str, int]:
        """Those that were computed, by the reason; without reasons of which there are none."""
        name = "lmkv:miss_tokens_total{reason="
        return {
            key[len(name) + 1 : -2]: int(count) for key, count in self.grown.items() if key.startswith(name) and count
        }

    @property
    def audited_chunks(self) -> dict[str, int]:
        """Chunks that were computed again and compared, by outcome; without outcomes of which there are none."""
        name = "lmkv:audited_chunks_total{outcome="
        return {
            key[len(name) + 1 : -2]: int(count) for key, count in self.grown.items() if key.startswith(name) and count
        }

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV was stored meanwhile."""
        return int(self.grown["lmkv:stored_tokens_total"])


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCacheLayout:
    """vLLM's KV cache: the kind of each of its groups of layers, and how many pages it has."""

    groups: list[str]
    block_count: int


def auditing(name: str) -> dict[str, Any]:
    """Parameters of requests that ask for an audit of this name."""
    return {"extra_args": {"kv_transfer_params": {"lmkv": {"audit": name}}}}


class LlmProcess:
    """A vLLM `LLM` in its own process, in float32 by default."""

    def __init__(
        self,
        model: Path,
        nursery: Nursery,
        *,
        name: str,
        log_file: Path,
        environment: Mapping[str, str],
        transfer_config: Mapping[str, object] | None = LMKV_TRANSFER_CONFIG,
        **options: Any,
    ) -> None:
        """`options` are those of `vllm.LLM`. Nothing runs before `start`."""
        self.name = name
        self.log_file = log_file
        self._nursery = nursery
        options = {
            "model": str(model),
            "served_model_name": model.name,
            "dtype": "float32",
            "block_size": 128,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 64 << 20,
        } | options
        if transfer_config is not None:
            options["kv_transfer_config"] = dict(transfer_config)
        self.options = options
        """Those of `vllm.LLM`."""
        self._environment = dict(environment)
        self._connection: socket.socket | None = None
        self._lines: Any = None
        self._process: ForkedProcess | None = None
        self._shared_memory = set[Path]()

    @property
    def runs(self) -> bool:
        """Whether it was started and not ended."""
        return self._connection is not None

    @property
    def pid(self) -> int:
        """Process id; also the id of its session."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def start(self) -> None:
        """Starts it without waiting; also again after it ended."""
        assert self._connection is None, f"{self.name} runs already"
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = self._nursery.start_engine(self._environment, self.log_file, theirs)
        self._connection.settimeout(ANSWER_TIMEOUT_SECONDS)
        self._lines = self._connection.makefile("rw")
        self._say(self.options)

    def wait_ready(self) -> None:
        """Waits until it answers. Raises `LmkvError` with what vLLM raised if it does not come up."""
        if error := self._hear().get("error"):
            self.kill()
            raise LmkvError(f"{self.name} did not start: {error}")

    def request_stop(self) -> None:
        """Asks the engine to end, without waiting for it. Idempotent."""
        if self._connection is not None:
            self._shared_memory |= left_by_engines(session_pids(self.pid))
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """Ends the engine as its owner would; kills what is left of it after some time. Idempotent."""
        self.request_stop()
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        while self.runs and session_pids(self.pid) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kills it, and all in its session, as a crash would. Its node has a session of its own. Idempotent."""
        if self._connection is None:
            return
        self._shared_memory |= left_by_engines(session_pids(self.pid))
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        while pids := session_pids(self.pid):
            assert time.monotonic() < deadline, f"{self.name}: processes {pids} survive SIGKILL"
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        while self._shared_memory:
            self._shared_memory.pop().unlink(missing_ok=True)
        with suppress(OSError):  # something was still to be sent
            self._lines.close()
        self._connection.close()
        self._connection = None

    def log(self) -> str:
        """Everything that it has logged."""
        return self.log_file.read_text(errors="replace")

    def ask(
        self,
        *prompts: Sequence[int],
        max_tokens: int = 16,
        salt: str = "",
        lora: Sequence[str] = (),
        picture: Picture | None = None,
        pictures: Sequence[Picture | None] = (),
        priorities: Sequence[int] = (),
        first_begins: bool = False,
        **sampling: Any,
    ) -> Answers:
        """Completes prompts, greedily unless `sampling` says otherwise, all at once.

        `lora` is an adapter's name, number and folder. Each prompt has the `picture`, or its own of the `pictures`. An
        engine that schedules by priority computes prompts of lower `priorities` first. `first_begins`: the other
        prompts arrive once the first one is being answered.
        """
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | sampling
        shown = [asdict(one) if one else None for one in pictures or [picture] * len(prompts)]
        said = self._do(
            "ask",
            prompts=prompts,
            salt=salt,
            sampling=sampling,
            lora=lora,
            pictures=shown,
            priorities=list(priorities) or None,
            first_begins=first_begins,
        )
        answers = tuple(
            LlmAnswer(
                samples=tuple(map(tuple, answer["samples"])),
                finish_reason=answer["finish_reason"],
                cached_tokens=answer["cached_tokens"],
                logprobs=tuple(answer["logprobs"]),
                prompt_logprobs=tuple(answer["prompt_logprobs"]),
                transfer_params=answer["transfer_params"],
            )
            for answer in said["answers"]
        )
        return Answers(answers=answers, grown=said["grown"], seconds=said["seconds"])

    def compute(self, *prompts: Sequence[int], max_tokens: int = 16, **sampling: Any) -> list[tuple[int, ...]]:
        """The output of the engine without any cache hit: each prompt alone, under a new salt."""
        tokens = []
        for prompt in prompts:
            answers = self.ask(prompt, max_tokens=max_tokens, salt=uuid.uuid4().hex, **sampling)
            assert answers.cached_tokens == 0
            tokens += answers.token_ids
        return tokens

    def forget(self, *, external: bool = False) -> None:
        """Empties vLLM's own prefix cache, and lmkv's through the connector if `external`."""
        assert self._do("forget", external=external)

    def load_weights(self, folder: Path, version: str = "", *, seen: bool = True) -> None:
        """Has the running engine replace its weights by those of another model's folder, and name their version.

        `seen`: through a call that lmkv can see.
        """
        self._do("load_weights", folder=str(folder), version=version, seen=seen)

    def sleep(self, level: int) -> None:
        """Sends the engine to sleep, and wakes it up again."""
        assert self._do("sleep", level=level)

    def release_pages(self, released: bool = True) -> None:
        """Informs the connector that the KV cache has no memory any more, or that it has it again."""
        self._do("pages", released=released)

    def ask_again(self, *prompts: Sequence[int], **options: Any) -> Answers:
        """As `ask`, after vLLM has forgotten what it knew: what is cached then is lmkv's."""
        self.forget()
        return self.ask(*prompts, **options)

    def metrics(self) -> dict[str, float]:
        """Values by sample name, as /metrics would show them."""
        return dict(self._do("metrics"))

    def encoder_runs(self) -> int:
        """Media that the encoder was run for so far, if the engine has an `ec_transfer_config`."""
        return int(self._do("encoder_runs"))

    def kv_cache(self) -> KvCacheLayout:
        """How vLLM has laid out its KV cache."""
        return KvCacheLayout(**self._do("kv_cache"))

    def begin(self, prompt: Sequence[int], seconds: float) -> dict[str, Any]:
        """Runs a request for `seconds`, and until it has pages.

        `request_id`, `token_ids` so far, `used`, the share of pages in use.
        """
        return dict(self._do("begin", prompt=prompt, seconds=seconds))

    def abort(self, request_id: str) -> float:
        """Aborts it; the share of pages that stay in use, after waiting for zero."""
        return float(self._do("abort", request_id=request_id))

    def _do(self, name: str, **fields: Any) -> Any:
        assert self.runs, f"{self.name} does not run"
        with suppress(BrokenPipeError):  # the next line reports it
            self._say({"do": name, **fields})
        return self._hear()

    def _say(self, what: Any) -> None:
        self._lines.write(json.dumps(what) + "\n")
        self._lines.flush()

    def _hear(self) -> Any:
        line = self._lines.readline()
        assert line, f"{self.name} broke down:\n{self.log()[-4000:]}"
        return json.loads(line)


class Nursery:
    """The process that has vLLM imported, and forks engines. A context manager."""

    def __init__(self, logs: Path) -> None:
        self.server = ForkServer("tests.engines.llm_worker", logs / "nursery.log", ENVIRONMENT)

    def start_engine(self, environment: Mapping[str, str], log_file: Path, commands: socket.socket) -> ForkedProcess:
        """Starts an `LLM` that takes its commands from a socket, in the environment of the nursery and this one."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("LMKV_")}
        request = Request(environment=inherited | ENVIRONMENT | dict(environment), folder=str(Path.cwd()))
        with log_file.open("ab") as log, Path(os.devnull).open("rb") as nothing:
            files = [nothing.fileno(), log.fileno(), log.fileno(), commands.fileno()]
            return fork(self.server.connect(), request, files)

    def launch(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> RunningProcess | None:
        """Starts `command` as `lmkv_client.demo.process.launch` does, if it is a server of vLLM that can be forked.

        Which core runs which thread is settled while vLLM is imported: servers that choose it are not forked.
        """
        early = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        forkable = all(environment.get(name) == value for name, value in early.items())
        if list(command[:3]) != [sys.executable, "-m", SERVER] or not forkable:
            return None
        return self.server.launch(SERVER, command[3:], log, environment)

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """One for all tests of a run; it is ready when the first engine starts."""
    with Nursery(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


class LlmFleet:
    """Engines around one runtime folder, with a coordinator if asked for: a context manager that leaves nothing."""

    def __init__(self, nursery: Nursery, model: Path, logs: Path, *, coordinator: bool = False) -> None:
        """Engines use `model` by default; `logs` gets the logs of all processes."""
        self._nursery = nursery
        self._model = model
        self._logs = logs
        self._folder = Path(tempfile.mkdtemp(prefix="lmkv-", dir="/tmp"))
        self.engines: dict[str, LlmProcess] = {}
        self._coordinator = CoordinatorProcess(logs) if coordinator else None

    @property
    def coordinator(self) -> CoordinatorProcess:
        """The coordinator that was asked for."""
        assert self._coordinator is not None
        return self._coordinator

    @property
    def runtime_dir(self) -> Path:
        """Where the nodes' sockets are."""
        return self._folder

    def add(
        self,
        name: str,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> LlmProcess:
        """Describes an engine whose node is the instance `name`, unless the settings say otherwise; nothing runs yet.

        `settings` are keys of lmkv's configuration, `options` those of `LlmProcess`.
        """
        own = {"instance_id": name, "runtime_dir": str(self._folder)}
        if self._coordinator:
            own["coordinator_address"] = self._coordinator.address
        lmkv = {f"LMKV_{key.upper()}": value for key, value in (CALM | own | dict(settings or {})).items()}
        engine = LlmProcess(
            options.pop("model", self._model),
            self._nursery,
            name=name,
            log_file=self._logs / f"{name}.log",
            environment=lmkv | dict(environment or {}),
            **options,
        )
        self.engines[name] = engine
        return engine

    def start(self) -> None:
        """Starts every engine that does not run, all at once, and waits for them."""
        waiting = [engine for engine in self.engines.values() if not engine.runs]
        for engine in waiting:
            engine.start()
        for engine in waiting:
            engine.wait_ready()

    def node_pid(self, name: str) -> int:
        """Process id of the one node of an instance."""
        (pid,) = self._node_pids({"LMKV_INSTANCE_ID": name})
        return pid

    def _node_pids(self, variables: Mapping[str, str]) -> list[int]:
        return pids_with_environment({"LMKV_RUNTIME_DIR": str(self._folder)} | dict(variables), "node")

    def __enter__(self) -> Self:
        try:
            if self._coordinator:
                self._coordinator.start()
                self._coordinator.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as last_first:  # each, whatever becomes of the others
            last_first.callback(shutil.rmtree, self._folder, ignore_errors=True)
            if self._coordinator:
                last_first.callback(self._coordinator.stop)
            last_first.callback(lambda: end_processes(self._node_pids({})))
            for engine in self.engines.values():
                engine.request_stop()
                last_first.callback(engine.stop)


def poison(node_pid: int, extents: Sequence[tuple[int, int]] = ((0, 0),)) -> None:
    """Changes all numbers in the pool of a running node, or those in extents of these offsets and sizes.

    Every second byte has its highest bit inverted: bfloat16 turns into its negative, float32 too, nearly. Repeating it
    makes everything as it was before.
    """
    descriptors = Path(f"/proc/{node_pid}/fd").iterdir()
    path = next(path for path in descriptors if "lmkv-pool" in str(path.readlink()))
    pool = np.memmap(path, dtype=np.uint8, mode="r+")
    for offset, size in extents:
        pool[offset + 1 : offset + size if size else None : 2] ^= 0x80
