"""A node's channels: which are opened when, which one is chosen, and what happens when one cannot be used."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from lmkv.errors import ChannelUnsupported, ConfigError, Unreachable
from lmkv.transfer import Channels, Copy, open_channel
from lmkv.transfer.channels import AUTO_NAMES
from lmkv.transfer.choice import RDMA
from tests.lmkv.transfer.ends import GRANT_ID, MIB, Memory, Owner, Stops, content, environment, whole
from tests.waiting import until

LIBRARIES = {
    "nixl": ("pip install '.[nixl]'", ("nixl_cu12", "nixl_cu13", "nixl")),
    "ucx": ("pip install '.[ucx]'", ("ucxx",)),
    "mooncake": ("pip install '.[mooncake]'", ("mooncake",)),
}
"""The extra that brings what a channel needs, and the packages that are it."""

Make = Callable[..., Channels]


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(8 * MIB)
    yield memory
    memory.close()


@pytest.fixture
async def make(memory: Memory, short_folder: Path) -> AsyncIterator[Make]:
    """Makes channels over the memory; the folder for their sockets may be None."""
    async with AsyncExitStack() as stack:

        def make_one(
            transfer_channel: str,
            folder: Path | None = short_folder,
            name: str = "reader:1",
            links: AbstractSet[str] = frozenset(),
        ) -> Channels:
            channels = Channels(transfer_channel, memory.end(name, folder), links)
            stack.push_async_callback(channels.aclose)
            return channels

        yield make_one


def owner(kind: str, folder: Path) -> Owner:
    return Owner(kind, "owner:1", folder, size_bytes=8 * MIB)


def sockets(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def has_nixl_agent() -> bool:
    return any(thread.name == "lmkv-nixl" for thread in threading.enumerate())


def accepts_tcp() -> bool:
    return any(task.get_name() == "transfer server" for task in asyncio.all_tasks())


async def test_what_lacks_no_link_is_opened_before_a_peer_needs_it(make: Make, short_folder: Path) -> None:
    channels = make("auto")
    await channels.start()
    assert channels.names == ("shm", "tcp", "nixl")
    await until(lambda: sockets(short_folder) == ["reader:1.sock"] and accepts_tcp())
    assert not has_nixl_agent()
    assert (await channels.offer(["nixl"])).name == "nixl"
    assert has_nixl_agent()


async def test_a_host_with_rdma_makes_its_nixl_agent_before_a_peer_needs_it(make: Make) -> None:
    channels = make("auto", links={RDMA})
    await channels.start()
    assert channels.names == AUTO_NAMES
    await until(has_nixl_agent)


async def test_the_owner_too_offers_nixl_last_if_it_has_no_rdma(make: Make) -> None:
    assert (await make("auto").offer(AUTO_NAMES[1:])).name == "tcp"
    assert (await make("auto", links={RDMA}).offer(AUTO_NAMES[1:])).name == "nixl"
    assert (await make("auto").offer(["nixl"])).name == "nixl"


async def test_a_channel_is_preferred_if_it_lacks_no_link_or_is_the_only_one(make: Make) -> None:
    assert not make("auto").prefers("nixl")
    assert make("auto").prefers("tcp")
    assert make("auto", links={RDMA}).prefers("nixl")
    assert make("nixl").prefers("nixl")
    assert not make("tcp").prefers("nixl")


async def test_a_channel_that_is_named_is_opened_at_the_start_and_must_be_there(make: Make) -> None:
    with pytest.raises(ConfigError, match="needs a unix socket"):
        await make("shm", None).start()


async def test_the_first_channel_of_the_caller_that_is_here_is_offered(make: Make) -> None:
    channels = make("tcp")
    assert (await channels.offer(["shm", "nixl", "tcp"])).name == "tcp"
    with pytest.raises(ChannelUnsupported) as raised:
        await channels.offer(["shm", "nixl"])
    assert raised.value.metadata == {"channels": "tcp", "wanted": "shm, nixl"}


async def test_what_does_not_start_is_not_offered_and_the_next_one_is(make: Make) -> None:
    channels = make("auto", None)  # without a place for its socket
    assert (await channels.offer(["shm", "tcp"])).name == "tcp"
    assert channels.names == ("tcp", "nixl")


async def test_bytes_come_by_the_channel_that_a_peer_was_added_by_last(
    make: Make, memory: Memory, short_folder: Path
) -> None:
    channels = make("auto")
    assert channels.of("owner:1") == ""
    for kind in ("shm", "tcp"):
        with owner(kind, short_folder) as peer:
            await channels.add_peer(peer.name, kind, peer.metadata)
            assert channels.of(peer.name) == kind
            stops = Stops()
            await channels.read(peer.name, whole(peer, memory, 8 * MIB), 20.0, stops, GRANT_ID)
            assert np.array_equal(memory.words, content(1, 8 * MIB))
            memory.words[:] = 0
    await channels.remove_peer(peer.name)
    assert channels.of("owner:1") == ""
    stops = Stops()
    with pytest.raises(Unreachable):
        await channels.read(peer.name, whole(peer, memory, 8 * MIB), 20.0, stops, GRANT_ID)
    assert stops.count == 1


async def test_memory_that_is_not_shared_with_this_host_is_out_of_reach(make: Make, short_folder: Path) -> None:
    channels = make("auto")
    with owner("shm", short_folder) as peer:
        (short_folder / "owner:1.sock").rename(short_folder / "elsewhere")  # as from within another container
        with pytest.raises(ChannelUnsupported, match="shares no memory"):
            await channels.add_peer(peer.name, "shm", peer.metadata)
        assert channels.of(peer.name) == ""


async def test_the_memory_of_a_peer_is_mapped_before_it_is_read_and_not_allocated_for_that(
    memory: Memory, short_folder: Path
) -> None:
    owned = Memory(8 * MIB)
    if owned.pool.huge_page_bytes:
        pytest.skip("pools are of reserved huge pages here, which are not mapped ahead")
    owned.words[: 4 * MIB // 8] = content(1, 4 * MIB)
    held = os.fstat(owned.pool.fd).st_blocks
    serving, reading = (
        await owned.open("shm", "owner:1", short_folder),
        await memory.open("shm", "reader:1", short_folder),
    )
    try:
        await reading.add_peer("owner:1", serving.metadata_for(owned.admit()))
        await until(lambda: resident_kib("r--s") >= 4 << 10)
        copy = Copy(remote_address=owned.address, local_address=memory.address, size_bytes=4 * MIB)
        await reading.read("owner:1", [copy], 20.0, Stops())
        assert (memory.words[: 4 * MIB // 8] == content(1, 4 * MIB)).all()
    finally:
        await reading.aclose()
        await serving.aclose()
    assert os.fstat(owned.pool.fd).st_blocks == held
    assert resident_kib("r--s") == 0
    owned.close()


async def test_a_peer_that_is_added_again_stays_mapped(memory: Memory, short_folder: Path) -> None:
    owned = Memory(MIB)
    serving, reading = (
        await owned.open("shm", "owner:1", short_folder),
        await memory.open("shm", "reader:1", short_folder),
    )
    mapped = []
    try:
        for _ in range(2):
            await reading.add_peer("owner:1", serving.metadata_for(owned.admit()))
            mapped.append([line for line in maps().splitlines() if "memfd:lmkv-pool" in line and " r--s " in line])
    finally:
        await reading.aclose()
        await serving.aclose()
        owned.close()
    assert len(mapped[0]) == 1
    assert mapped[0] == mapped[1]


def maps() -> str:
    return Path("/proc/self/maps").read_text()


def resident_kib(permissions: str) -> int:
    """KiB of pools that this process has in its page tables, of mappings with these permissions."""
    found, is_pool = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (fields := line.split())[0]:
            is_pool = fields[1] == permissions and "memfd:lmkv-pool" in line
        elif is_pool and fields[0] == "Rss:":
            found += int(fields[1])
    return found


async def test_closed_channels_offer_nothing_and_read_nothing(make: Make) -> None:
    channels = make("tcp")
    await channels.start()
    await channels.aclose()
    await channels.aclose()
    with pytest.raises(Unreachable):
        await channels.offer(["tcp"])
    with pytest.raises(Unreachable):
        await channels.add_peer("owner:1", "tcp", b"")


async def test_an_unknown_channel_is_refused_by_key(memory: Memory) -> None:
    with pytest.raises(ConfigError, match="transfer_channel: 'smoke' is unknown; use auto, shm, nixl"):
        await open_channel("smoke", memory.end("reader:1"))
    assert AUTO_NAMES == ("shm", "nixl", "tcp")


@pytest.mark.parametrize("kind", LIBRARIES)
def test_without_its_library_a_channel_says_what_to_install(kind: str) -> None:
    extra, packages = LIBRARIES[kind]
    program = f"""
import asyncio, sys
from lmkv.errors import ConfigError
from lmkv.transfer import open_channel
from tests.lmkv.transfer.ends import Memory
for package in {packages!r}:
    sys.modules[package] = None
try:
    asyncio.run(open_channel({kind!r}, Memory(4096).end("reader:1")))
except ConfigError as error:
    sys.exit(str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment()
    )
    assert "transfer_channel" in done.stderr
    assert extra in done.stderr
