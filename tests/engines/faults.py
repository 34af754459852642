"""Two engines that share prompts, and ways to break what is between them. For the tests of faults and of recovery."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import session_pids
from lmkv_client.sync import Coordinator

PROMPT_TOKENS = 3000
CHUNK_TOKENS = 256
CHUNK_BYTES = 1 << 20
"""Of the tiny model in float32."""
HELD_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
HELD_TOKENS = HELD_CHUNKS * CHUNK_TOKENS
"""Tokens of a prompt that are in full chunks."""
STEP_TOKENS = 1024
"""Most tokens that an engine computes in one step, so that a prompt takes three, with stores in between."""
IDLE_CREDITS = 4
"""Write credits that an idle engine keeps."""

SETTINGS = {
    "LMKV_MAX_LOCAL_CPU_SIZE": "512MiB",
    "LMKV_NODE_LINGER": "600",
    "LMKV_SAVE_PARTIAL_CHUNKS": "false",  # what tests count is whole chunks
    "LMKV_WEIGHT_VERSION": "1",  # a reset without it ends what an engine shares
    # A busy machine makes tests slow, not wrong: ten times the defaults, and more for loads.
    "LMKV_LOOKUP_TIMEOUT": "1",
    "LMKV_COORDINATOR_TIMEOUT": "0.5",
    "LMKV_LOAD_TIMEOUT": "10",
    "LMKV_REFUSE_SLOW_FETCHES": "false",
}
"""Nodes that survive the restart of their engine, and deadlines that a slow machine keeps; else the defaults."""

MARGIN_SECONDS = 40.0
"""What a request may take beyond its cold time: 1 s of lookup, 10 s of load, and a machine that stands still for a
while. What waits without a deadline takes longer."""
REQUEST_TIMEOUT_SECONDS = 120.0
ATTACHED = "attached to node"
"""In an engine's log: it knows its node later than the node knows it."""
HEAL_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPrompt:
    """A prompt that no engine has seen, and the output of an engine without a cache."""

    tokens: list[int]
    answer: tuple[int, ...]
    cold_seconds: float


class FaultyPair:
    """A coordinator and two engines, `engine-1` and `engine-2`, both ready. A context manager that ends it all."""

    def __init__(self, folder: Path, model: Path, logs: Path, *, seed: int, coordinator: bool = True) -> None:
        """Nothing runs yet. Without `coordinator` the engines start before it does, and have to do without."""
        self.cluster = Cluster(folder, model, logs=logs, settings=SETTINGS)
        assert self.cluster.coordinator
        self.coordinator = self.cluster.coordinator
        # No time to shut down is vLLM's default: then it kills all descendants of an engine at once.
        arguments = ("--max-num-batched-tokens", str(STEP_TOKENS), "--shutdown-timeout", "0")
        self.first = self.cluster.add_engine("engine-1", extra_arguments=arguments)
        self.second = self.cluster.add_engine("engine-2", extra_arguments=arguments)
        self.engines = (self.first, self.second)
        self._random = random.Random(seed)
        self._requests = ThreadPoolExecutor(4)
        self._with_coordinator = coordinator
        self._killed: EngineProcess | None = None
        self.early_tokens: dict[str, float] = {}
        """What became of a prompt that was asked for before the coordinator ran."""

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        try:
            if not self._with_coordinator:
                self.coordinator.stop()
            self.cluster.start_engines()
        except BaseException:
            self.cluster.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        self.cluster.stop()
        self._requests.shutdown()
        assert not (pids := self.pids()), f"processes {pids} are left"
        assert not (sockets := list(self.cluster.runtime_dir.glob("*/*.sock"))), f"{sockets} are left"

    def do_without_coordinator(self) -> None:
        """Asks for a prompt before the coordinator has ever run, and starts it; see `early_tokens`."""
        early = self.prompt()
        with counting(self.second) as grown:
            check(early, self.first.complete(early.tokens))
            check(early, self.second.complete(early.tokens))
            from_peer = grown("tier_tokens", "peers")
        self.first.reset_prefix_cache()
        with counting(self.first) as grown:
            check(early, self.first.complete(early.tokens))
            from_own_pool = grown("loaded_tokens")
        self.restart()
        self.heal()
        self.early_tokens = {
            "from peer": from_peer,
            "from own pool": from_own_pool,
            "known afterwards": self.held(self.first, early),
        }

    # --- Asking --------------------------------------------------------------------------------------------------

    def prompt(self, token_count: int = PROMPT_TOKENS, oracle: EngineProcess | None = None) -> FaultPrompt:
        """A new prompt. An engine answers it under a salt of its own, so that nothing cached can be used."""
        tokens = [self._random.randrange(2, 512) for _ in range(token_count)]
        salted = (oracle or self.second).complete(tokens, extra={"cache_salt": f"oracle {self._random.random()}"})
        assert salted.cached_tokens == 0
        return FaultPrompt(tokens=tokens, answer=salted.token_ids, cold_seconds=salted.total_seconds)

    def stored(self) -> FaultPrompt:
        """A new prompt that engine 1 has computed, and that its node holds."""
        prompt = self.prompt()
        check(prompt, self.first.complete(prompt.tokens))
        self.coordinator.wait_for_holder(prompt.tokens, "engine-1", HELD_TOKENS, HEAL_SECONDS)
        return prompt

    def ask(self, engine: EngineProcess, prompt: FaultPrompt) -> Future[Completion]:
        """Sends a prompt, without waiting for the answer."""
        return self._requests.submit(engine.complete, prompt.tokens, timeout_seconds=REQUEST_TIMEOUT_SECONDS)

    def partly_stored(self, engine: EngineProcess) -> tuple[FaultPrompt, Future[Completion]]:
        """Has an engine compute a new prompt, and freezes it when its node holds some chunks of the prompt, not all.

        Takes another prompt if the engine stored all of it before it was frozen.
        """
        for _ in range(10):
            prompt = self.prompt()
            asked = self.ask(engine, prompt)
            eventually(lambda prompt=prompt: self.held(engine, prompt) > 0, "the first chunks are stored")  # type: ignore[misc]
            for pid in session_pids(engine.pid):
                os.kill(pid, signal.SIGSTOP)
            if self._in_pool(engine, prompt) < HELD_CHUNKS:
                return prompt, asked
            self.thaw()
            check(prompt, asked.result(REQUEST_TIMEOUT_SECONDS))
        raise AssertionError("the engine stored ten prompts faster than this test could freeze it")

    def _in_pool(self, engine: EngineProcess, prompt: FaultPrompt) -> int:
        """Chunks of a prompt in the pool of the engine's node, as the node itself counts them."""
        with Coordinator(self.coordinator.address) as client:
            return client.hint("share", prompt.tokens[:HELD_TOKENS], instance=engine.name).result.chunk_count

    def held(self, engine: EngineProcess, prompt: FaultPrompt) -> int:
        """Tokens of a prompt that the engine's node is known to hold."""
        return self.coordinator.holders(prompt.tokens).get(engine.name, 0)

    def fetching(self, prompt: FaultPrompt) -> Future[Completion]:
        """Has engine 2 ask for a prompt that node 1 holds and is too frozen to give; returns when it has been asked."""
        port = int(self.coordinator.instances()["engine-1"].peer_address.rpartition(":")[2])
        before = unread_bytes(port)
        asked = self.ask(self.second, prompt)
        eventually(lambda: unread_bytes(port) > before or asked.done(), "node 1 has been asked")
        assert not asked.done(), "node 1 was not asked"
        return asked

    # --- Breaking ------------------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Every process of it that runs."""
        processes = [self.coordinator, *(engine for engine in self.engines)]
        return [pid for one in processes if one.alive for pid in session_pids(one.pid)] + self.cluster.node_pids()

    def pid(self, name: str) -> int:
        """Process id of `coordinator`, `node-1` or `node-2`. Raises `ValueError` if the node does not run."""
        if name == "coordinator":
            return self.coordinator.pid
        (pid,) = self.cluster.node_pids(name.replace("node", "engine"))
        return pid

    def kill(self, name: str) -> None:
        """Kills `coordinator`, `node-1`, `node-2` or `engine-1`; an engine ends behind our back."""
        if name == "coordinator":
            self.coordinator.kill()
        elif name == "engine-1":
            self._killed = self.first
            for pid in session_pids(self.first.pid):
                os.kill(pid, signal.SIGKILL)
        else:
            kill(self.pid(name))

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Freezes `coordinator`, `node-1` or `node-2`; thaws it afterwards if it still lives."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: state(pid) == "T", f"{name} is frozen")
        try:
            yield
        finally:
            thaw([pid])

    def thaw(self) -> None:
        """Resumes all frozen processes."""
        thaw(self.pids())

    # --- Healing -------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Starts what was killed and does not come back by itself: coordinator and engines, but never nodes."""
        if self._killed:
            self._killed.kill()  # waits
            self._killed = None
        if not self.coordinator.alive:
            self.coordinator.start()
            self.coordinator.wait_ready()
        self.cluster.start_engines()

    def heal(self) -> None:
        """Waits until a fresh prompt of engine 1 reaches engine 2 from the peer again, and checks what both say."""
        deadline = time.monotonic() + HEAL_SECONDS
        while True:
            prompt = self.prompt()
            taken = self._shared(prompt)
            if taken == HELD_TOKENS:
                return
            assert time.monotonic() < deadline, f"{taken} of {HELD_TOKENS} tokens came from the peer: it has not healed"

    def complete(self) -> bool:
        """Whether both nodes run, are known to the coordinator, and have their engine."""
        with suppress(LmkvError):
            known = self.coordinator.instances()
            return all(name in known and known[name].engine_count for name in self.cluster.engines)
        return False

    def _shared(self, prompt: FaultPrompt) -> float:
        """Tokens that engine 2 took from engine 1's node."""
        check(prompt, self.first.complete(prompt.tokens))
        with suppress(LmkvError):  # then engine 2 must compute
            self.coordinator.wait_for_holder(prompt.tokens, "engine-1", HELD_TOKENS, 1.0)
        with counting(self.second) as grown:
            check(prompt, self.second.complete(prompt.tokens))
        return grown("tier_tokens", "peers")

    def check_nothing_leaks(self) -> None:
        """Asserts that idle nodes hold chunks and idle credits, and nothing that cannot be given back.

        Forgets all chunks on the way: one that a lost ticket, grant or transfer keeps in place would stay in use.
        """
        for engine in self.engines:
            eventually(lambda name=engine.name: self._unexplained(name) <= 0, "the node's memory is accounted for")  # type: ignore[misc]
            engine.reset_prefix_cache(external=True)
            eventually(lambda name=engine.name: self._chunks(name) == 0, "all chunks are forgotten")  # type: ignore[misc]
            eventually(lambda name=engine.name: self._unexplained(name) <= 0, "nothing is kept in place")  # type: ignore[misc]
        eventually(lambda: not zombies(self.pids()), "no process has a child that it has not waited for")

    def _unexplained(self, name: str) -> int:
        """Bytes in use at a node that are neither chunks nor idle credits."""
        (usage,) = self.coordinator.instances()[name].tiers
        return usage.used_bytes - (usage.chunk_count + IDLE_CREDITS) * CHUNK_BYTES

    def _chunks(self, name: str) -> int:
        (usage,) = self.coordinator.instances()[name].tiers
        return usage.chunk_count

    def check_no_crash(self) -> None:
        """Asserts that no process has logged what it did not expect.

        vLLM's API server (async_llm.py) logs a traceback when it has stopped its own engine: that one does not count.
        """
        logs = [*self.cluster.logs.glob("*.log"), *self.cluster.runtime_dir.glob("*/node.log")]
        assert len(logs) >= 5
        for log in logs:
            text = log.read_text(errors="replace")
            lines = [line for line in text.splitlines() if "async_llm.py" not in line]
            bad = [line for line in lines if "Traceback" in line or "unexpectedly" in line]
            assert not bad, f"{log}:\n{text[max(0, text.find(bad[0]) - 2000) :][:8000]}"


def check(prompt: FaultPrompt, completion: Completion) -> None:
    """Asserts that an answer is right, and came in time."""
    assert completion.token_ids == prompt.answer
    # Twice, for the machine may be busier than it was when the prompt was computed cold.
    assert completion.total_seconds < 2 * prompt.cold_seconds + MARGIN_SECONDS


@contextmanager
def counting(*engines: EngineProcess) -> Iterator[Callable[..., float]]:
    """Yields a function that returns by how much a counter of the connector has grown, summed over all engines."""

    before = [engine.metrics() for engine in engines]

    def grown(name: str, tier: str = "") -> float:
        sample = f"lmkv:{name}_total" + (f'{{tier="{tier}"}}' if tier else "")
        return sum(engine.metrics()[sample] - then[sample] for engine, then in zip(engines, before, strict=True))

    yield grown


def eventually(holds: Callable[[], bool], what: str, timeout_seconds: float = HEAL_SECONDS) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {timeout_seconds:.0f} s it is still not so that {what}"
        time.sleep(0.01)


def kill(pid: int) -> None:
    """Kills a process, and waits until it is gone, or a zombie that its parent has yet to see."""
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: state(pid) in ("", "Z"), f"process {pid} is gone")


def thaw(pids: Sequence[int]) -> None:
    """Resumes frozen processes; ended ones are ignored."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def state(pid: int) -> str:
    """The kernel's letter for what a process does: `T` frozen, `Z` dead and not waited for; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def unread_bytes(port: int) -> int:
    """Bytes that have arrived at connections of a local TCP port and were not read."""
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # gRPC's servers take IPv4 on IPv6 sockets
    rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01")


def zombies(parents: Sequence[int]) -> list[int]:
    """Dead children that these processes have not waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and state(int(entry.name)) == "Z":
            with suppress(FileNotFoundError, ProcessLookupError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) in parents:
                    found.append(int(entry.name))
    return found
