"""What an engine announces of the names under which it serves."""

from __future__ import annotations

from lmkv.spec import MAX_SERVED_MODELS
from lmkv.v1.chunk_pb2 import ServedModel
from lmkv_client.engine.key_space import ServedNames


def test_a_models_names_are_announced_and_each_adapter_once() -> None:
    served = ServedNames(["llama", "nickname"])
    assert list(served.messages) == [ServedModel(name="llama"), ServedModel(name="nickname")]
    assert not served.has_adapters
    tuned = ServedModel(name="tuned", lora_identity="tuned@1")
    assert served.use("tuned", "tuned@1") == tuned
    assert served.use("tuned", "tuned@1") is None
    assert served.messages[2:] == (tuned,)
    assert served.has_adapters


def test_a_new_version_of_an_adapter_is_announced_in_place_of_the_old_one() -> None:
    served = ServedNames()
    served.use("tuned", "tuned@1")
    new = ServedModel(name="tuned", lora_identity="tuned@2")
    assert served.use("tuned", "tuned@2") == new
    assert served.messages == (new,)


def test_the_adapter_that_was_not_used_for_longest_gives_way() -> None:
    served = ServedNames(["llama"])
    for number in range(MAX_SERVED_MODELS - 1):
        served.use(str(number), f"{number}@1")
    served.use("0", "0@1")
    served.use("more", "more@1")
    names = [message.name for message in served.messages]
    assert len(names) == MAX_SERVED_MODELS
    assert {"llama", "0", "more"} <= set(names)
    assert "1" not in names


def test_a_name_that_cannot_be_registered_is_left_out() -> None:
    served = ServedNames(["n" * 300, "llama"])
    assert served.use("n" * 300, "n@1") is None
    assert [message.name for message in served.messages] == ["llama"]
