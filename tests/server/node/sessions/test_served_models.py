"""Names under which engines serve, from a node's unix socket to the coordinator, and their bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmkv.config import NodeConfig
from lmkv.spec import MAX_IDENTITY_BYTES, MAX_NAME_BYTES, MAX_SERVED_MODELS, ServedModel
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import ServedModel as Message
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from lmkv_server.node.sessions.sessions import ServedModels
from tests.server.coordinator.scripted_instance import until
from tests.server.node.engine_client import EngineClient
from tests.support.specs import small_spec

SPEC = small_spec()


def model(name: str, identity: str = "") -> ServedModel:
    return ServedModel(name=name, fingerprint=SPEC.fingerprint, lora_identity=identity)


@pytest.fixture
def config(runtime_dir: Path, coordinator: Coordinator) -> NodeConfig:
    return NodeConfig(
        instance_id="node",
        runtime_dir=str(runtime_dir),
        max_local_cpu_size="16MiB",  # type: ignore[arg-type]  # what people write
        coordinator_address=(coordinator.address,),
    )


def registered(coordinator: Coordinator) -> set[tuple[str, str]]:
    """What the coordinator knows of the node: names with their LoRA identities."""
    instance = coordinator.tenants.unnamed.core.instances.find("node")
    return {(one.name, one.lora_identity) for one in instance.info.served_models} if instance else set()


async def test_names_of_an_engine_reach_the_coordinator(coordinator: Coordinator, config: NodeConfig) -> None:
    async with Node(config) as node:
        engine = EngineClient(node)
        names = [Message(name="llama"), Message(name="nickname"), Message(name="tuned", lora_identity="tuned@1")]
        await engine.say(hello=pb.Hello(engine_id="e", spec=SPEC.to_proto(), worker_count=1, served_models=names))
        await engine.welcome()
        names_now = {("llama", ""), ("nickname", ""), ("tuned", "tuned@1")}
        await until(lambda: registered(coordinator) == names_now)
        await engine.say(serve_models=[Message(name="tuned", lora_identity="tuned@2")])
        await engine.say(serve_models=[Message(name="late", lora_identity="late@1")])
        names_now = {("llama", ""), ("nickname", ""), ("tuned", "tuned@2"), ("late", "late@1")}
        await until(lambda: registered(coordinator) == names_now)
        await engine.aclose()
        await until(lambda: not node.engines.attached_count)
        async with EngineClient(node, "another"):
            assert registered(coordinator) == names_now, "the chunks of an engine that has left are still here"


async def test_more_names_than_a_registration_may_have_keep_the_node_in_the_fleet(
    coordinator: Coordinator, config: NodeConfig
) -> None:
    async with Node(config) as node, EngineClient(node) as engine:
        for start in range(0, 2 * MAX_SERVED_MODELS, 64):
            await engine.say(
                serve_models=[Message(name=f"a-{n}", lora_identity=f"a@{n}") for n in range(start, start + 64)]
            )
        last = 2 * MAX_SERVED_MODELS - 1
        await until(lambda: (f"a-{last}", f"a@{last}") in registered(coordinator))
        assert len(registered(coordinator)) == MAX_SERVED_MODELS


@pytest.mark.parametrize(
    "bad",
    [
        Message(name=""),
        Message(name="n" * (MAX_NAME_BYTES + 1)),
        Message(name="n", lora_identity="i" * (MAX_IDENTITY_BYTES + 1)),
    ],
    ids=["empty", "name", "identity"],
)
async def test_a_name_that_cannot_be_registered_ends_the_stream(config: NodeConfig, bad: Message) -> None:
    async with Node(replace(config, coordinator_address=())) as node, EngineClient(node) as engine:
        await engine.say(serve_models=[bad])
        error = await engine.ending()
        assert error is not None
        assert error.reason == "BAD_KV_SPEC"


def test_a_new_version_of_an_adapter_replaces_the_old_one_where_no_other_engine_has_it() -> None:
    served = ServedModels()
    assert served.announce("one", [model("tuned", "tuned@1")])
    assert served.announce("two", [model("tuned", "tuned@1")]) is False
    assert served.announce("one", [model("tuned", "tuned@2")])
    assert list(served) == [model("tuned", "tuned@1"), model("tuned", "tuned@2")]
    assert served.announce("two", [model("tuned", "tuned@2")])
    assert list(served) == [model("tuned", "tuned@2")]


def test_names_of_engines_that_have_left_go_first() -> None:
    served = ServedModels(limit=2)
    served.announce("one", [model("a")])
    served.announce("two", [model("b")])
    served.detach("two")
    served.announce("one", [model("c")])
    assert list(served) == [model("a"), model("c")]
    served.announce("one", [model("d")])
    assert list(served) == [model("c"), model("d")]
