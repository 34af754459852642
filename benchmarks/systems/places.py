"""Where the chunks of prompts are when many ask for them at once, and how each system is set up for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.node.hosts import HostNode, this_host_and_another
from benchmarks.support import engines
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.redis import RedisProcess
from benchmarks.systems import chats, pairs
from benchmarks.systems.chats import ALONE, ChatPlan
from benchmarks.systems.pairs import STORE_SECONDS, EnginePair, PairPlan
from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster, CoordinatorProcess
from lmkv_client.demo.engine import EngineProcess

LMKV, OFFLOADING, LMCACHE = "lmkv", "vllm_offload", "lmcache"
SYSTEMS = (ALONE, LMKV, OFFLOADING, LMCACHE)
OWN, SHM, TCP, TCP_10, TCP_1, DISK, REDIS = "own", "shm", "tcp", "tcp10", "tcp1", "disk", "redis"
LINKS = {TCP_10: 10.0, TCP_1: 1.0}
"""Gbit/s of the link between the nodes of two hosts."""
SOURCE, ASKED = "source", "asked"

Opener = Callable[[], AbstractContextManager[EnginePair]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacePlan:
    """The plan of one cell, the same for all systems. Of a pair, `first` computes the documents, `second` is asked."""

    run: BenchmarkRun
    model: Path
    dtype: str
    context_tokens: int
    document_count: int
    prompts_in_cache: int
    """Prompts that the own cache of each engine holds, more than run at once."""
    prompts_in_pool: int
    """Prompts that the memory behind the engine holds where the documents are elsewhere."""

    def bytes_of(self, prompt_count: int) -> int:
        """Bytes of prompts of full length."""
        return prompt_count * self.context_tokens * engines.token_bytes(self.dtype)

    @property
    def all_prompts(self) -> int:
        """Prompts that have room where nothing is to be evicted: the end of each question is stored, too."""
        return self.document_count + self.document_count // 4 + self.prompts_in_cache

    def chats(self, pool_prompts: int) -> ChatPlan:
        """The plan of one engine."""
        return ChatPlan(
            run=self.run,
            model=self.model,
            dtype=self.dtype,
            context_tokens=self.context_tokens,
            chats_in_cache=self.prompts_in_cache,
            pool_bytes=self.bytes_of(pool_prompts),
        )

    @property
    def pair(self) -> PairPlan:
        """The plan of two engines: the memory of the first one holds all documents."""
        return PairPlan(
            run=self.run,
            model=self.model,
            context_tokens=self.context_tokens,
            dtype=self.dtype,
            prompts_in_pool=self.all_prompts,
            prompts_in_second_pool=self.prompts_in_pool,
            prompts_in_cache=self.prompts_in_cache,
        )


def openers(plan: PlacePlan, place: str, lmcache_python: Path | None) -> dict[str, Opener]:
    """The systems that can have documents there, by name. The engine alone is the same in all places."""
    found: dict[str, Opener] = {ALONE: partial(_one, partial(chats.alone, plan.chats(0)))}
    disk = plan.run.folder / "disk"
    for name in (OFFLOADING, LMCACHE):
        (disk / name).mkdir(parents=True, exist_ok=True)
    size_gb = round(plan.bytes_of(plan.all_prompts) / (1 << 30), 2)
    own, small = plan.chats(plan.all_prompts), plan.chats(plan.prompts_in_pool)
    python = lmcache_python.absolute() if lmcache_python else None
    if place == OWN:
        found[LMKV] = partial(_one, partial(chats.lmkv, own))
        found[OFFLOADING] = partial(_one, partial(chats.offloading, own))
        if python:
            found[LMCACHE] = partial(_one, partial(chats.lmcache, own, python))
    elif place == DISK:
        found[LMKV] = partial(_one, partial(chats.lmkv, small, disk_bytes=plan.bytes_of(plan.all_prompts)))
        tier = {"type": "fs", "root_dir": str(disk / OFFLOADING)}
        found[OFFLOADING] = partial(_one, partial(chats.offloading, small, tiers=[tier]))
        if python:
            more = {"local_disk": f"file://{disk / LMCACHE}/", "max_local_disk_size": size_gb}
            found[LMCACHE] = partial(_one, partial(chats.lmcache, small, python, more=more))
    elif place == REDIS:
        found[LMKV] = partial(_with_redis, small, None)
        if python:
            found[LMCACHE] = partial(_with_redis, small, python)
    elif place in LINKS:
        found[LMKV] = partial(_across, plan, LINKS[place])
    else:
        channel = {"LMKV_TRANSFER_CHANNEL": "tcp"} if place == TCP else {}
        found[LMKV] = partial(pairs.lmkv_pair, replace(plan.pair, settings=channel))
        if place == SHM and not pairs.nixl_problem():
            found[OFFLOADING] = partial(pairs.offloading_pair, plan.pair)
        if place == SHM and python:
            found[LMCACHE] = partial(pairs.lmcache_pair, plan.pair, python)
    return found


@contextmanager
def _one(open_engine: Callable[[], AbstractContextManager[EngineProcess]]) -> Iterator[EnginePair]:
    """One engine that computes the documents and is asked."""
    with open_engine() as engine:
        engine.wait_ready()
        yield EnginePair(first=engine, second=engine, wait_until_stored=lambda _prompt: None)


@contextmanager
def _with_redis(plan: ChatPlan, python: Path | None) -> Iterator[EnginePair]:
    """One engine and a Redis; with `python` the engine is LMCache's."""
    plan.run.logs.mkdir(parents=True, exist_ok=True)
    with RedisProcess(plan.run.logs) as redis:
        if python:
            more = {"remote_url": redis.url, "remote_serde": "naive"}
            opener = partial(chats.lmcache, plan, python, more=more)
        else:
            opener = partial(chats.lmkv, plan, more={"LMKV_REMOTE_URL": redis.url})
        with _one(opener) as pair:
            yield pair


@contextmanager
def _across(plan: PlacePlan, gbit_per_s: float) -> Iterator[EnginePair]:
    """lmkv's nodes on two hosts, with a link of this rate between them. Raises `NoHosts` without the rights for it."""
    settings = engines.PATIENCE | engines.pool_setting(plan.pair.second_pool_bytes)
    run = plan.run
    with (
        this_host_and_another(gbit_per_s) as (here, there),
        CoordinatorProcess(run.logs, arguments=["--host", "0.0.0.0"]) as coordinator,
    ):
        settings |= {"LMKV_COORDINATOR_ADDRESS": f"{here.address}:{coordinator.port}", "LMKV_P2P_HOST": here.address}
        with Cluster(run.folder, plan.model, logs=run.logs, settings=settings, coordinator=False) as cluster:
            folder = run.folder / "there"
            (folder / SOURCE).mkdir(mode=0o700, parents=True)
            (folder / SOURCE / "peers.sock").mkdir()  # where its socket would be: the node has no channel `shm` then
            own = {"LMKV_RUNTIME_DIR": str(folder), "LMKV_INSTANCE_ID": SOURCE, "LMKV_P2P_HOST": there.address}
            own |= engines.pool_setting(plan.pair.pool_bytes)
            for name in (SOURCE, ASKED):
                cluster.add_engine(name, settings=own if name == SOURCE else {}, **plan.pair.options)
            with HostNode(there, SOURCE, folder, run.logs, settings | own) as node:
                cluster.start_engines(lambda engine: run.say(f"{engine.name} is ready"))

                def wait(prompt: Sequence[int]) -> None:
                    coordinator.wait_for_holder(prompt, SOURCE, engines.full_chunks(len(prompt)), STORE_SECONDS)

                yield EnginePair(first=cluster.engines[SOURCE], second=cluster.engines[ASKED], wait_until_stored=wait)
                if "by channel shm" in node.log():
                    raise LmkvError("the node of the other host has read shared memory")
                cluster.stop()
