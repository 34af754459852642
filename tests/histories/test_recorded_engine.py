"""What is recorded of an engine at a real node."""

from __future__ import annotations

from pathlib import Path

from lmkv.config import NodeConfig
from lmkv_server.node.node import Node
from tests.chaos.engine import PROMPTS, SPEC
from tests.chaos.victim import mapped
from tests.histories.checker import check
from tests.histories.history import History, Outcome, load
from tests.histories.recorder import Recorder
from tests.server.node.engine_client import EngineClient


async def test_writes_and_holds_name_their_extents(tmp_path: Path, runtime_dir: Path) -> None:
    keys = PROMPTS[0][:2]
    config = NodeConfig(
        instance_id="node-1",
        runtime_dir=str(runtime_dir),
        enable_p2p=False,
        max_local_cpu_size="8MiB",  # type: ignore[arg-type]  # what people write
    )
    path = tmp_path / "history.jsonl"
    with Recorder(path) as recorder:
        async with Node(config) as node, EngineClient(node, "engine", SPEC) as client:
            welcomed = client.welcomed
            with await mapped(welcomed.pool_socket, client.engine_id, welcomed.epoch) as attached:
                engine = recorder.engine(client, attached.pool, "node-1")
                extents = await client.reserve(len(keys))
                pairs = list(zip(keys, extents, strict=True))
                commits = [client.commit(key, one, checksum=engine.write(key, one)) for key, one in pairs]
                await client.say(commit=commits)
                for lookup_id in ("1", "2"):
                    found = await client.lookup(lookup_id, keys)
                    for key, extent in zip(keys, found.own, strict=True):
                        engine.check(key, extent)
                    await client.release(lookup_id)
                engine.close()
    history = History(load(path))
    offsets = [extent.offset for extent in extents]
    writes = list(history.of("Write"))
    assert [write.request["offset"] for write in writes] == offsets
    assert {write.request["epoch"] for write in writes} == {welcomed.epoch}
    known, unknown = history.attempts("Hold")
    assert known.request == {"id": "1", "offsets": offsets, "epoch": welcomed.epoch}
    assert (known.outcome, unknown.outcome) == (Outcome.OK, Outcome.UNKNOWN), "the node answered after one of both"
    second = list(history.of("Find"))[1]
    assert known.start < known.end <= second.start
    assert len(list(history.of("Read"))) == 2 * (len(keys) + 1)
    assert check(history) == []
