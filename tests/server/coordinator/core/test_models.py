"""Names of models and adapters: what each stands for, how many there may be, and what refusals contain."""

from __future__ import annotations

import dataclasses

import pytest

from lmkv.errors import BadSelection, Full, ModelAmbiguous, ModelNotFound
from lmkv.keys import MEDIA_HASH_SCHEME
from lmkv.spec import MAX_NAME_BYTES, KvPart, KvSpec, ServedModel
from lmkv_server.coordinator.core import models as models_module
from lmkv_server.coordinator.core.models import (
    MAX_KINDS,
    MAX_NAMES,
    MAX_SHOWN,
    RETRY_SECONDS,
    InstanceInfo,
    Models,
    Namespace,
)
from tests.support.specs import make_spec

LLAMA = make_spec(model_name="llama", model_id="llama@1", kv_dtype="bfloat16", head_size=64, chunk_size=256)
QWEN = dataclasses.replace(LLAMA, model_name="qwen", model_id="qwen@1")
SQL = ServedModel(name="sql", fingerprint=LLAMA.fingerprint, lora_identity="sql@1")


def info(instance_id: str, *specs: KvSpec, served: tuple[ServedModel, ...] = ()) -> InstanceInfo:
    return InstanceInfo(instance_id=instance_id, epoch=1, peer_address="", specs=specs, served_models=served)


def models_of(*infos: InstanceInfo) -> Models:
    models = Models()
    for one in infos:
        models.add(one)
    models.check(infos)
    return models


def alias(name: str, spec: KvSpec = LLAMA) -> ServedModel:
    return ServedModel(name=name, fingerprint=spec.fingerprint)


def variant(number: int) -> KvSpec:
    """A spec of the model `llama` with other weights."""
    return dataclasses.replace(LLAMA, model_id=f"llama@{number}")


def test_a_served_name_stands_for_the_spec_of_its_fingerprint() -> None:
    models = models_of(info("a", LLAMA, QWEN, served=(alias("chat", QWEN),)))
    assert models.specs("chat") == [QWEN]
    assert models.namespaces("chat") == [Namespace(spec=QWEN)]
    assert models.other_names("chat") == ["qwen"]
    assert models.other_names("llama") == []
    assert models.other_names("unknown") == []


def test_without_a_name_outputs_of_encoders_are_not_meant() -> None:
    encoder = dataclasses.replace(LLAMA, model_name="llama encoder", hash_scheme=MEDIA_HASH_SCHEME)
    models = models_of(info("a", LLAMA, encoder))
    assert models.specs() == [LLAMA]
    assert models.namespaces() == [Namespace(spec=LLAMA)]
    assert models.specs("llama encoder") == [encoder]


def test_other_names_are_sorted_and_include_adapters() -> None:
    models = models_of(info("a", LLAMA, served=(alias("z"), alias("b"), SQL)))
    assert models.other_names("llama") == ["b", "sql", "z"]


def test_an_adapter_is_found_by_its_name_and_by_its_identity() -> None:
    models = models_of(info("a", LLAMA, QWEN, served=(SQL,)))
    expected = [Namespace(spec=LLAMA, lora_identity="sql@1")]
    assert models.namespaces(lora_name="sql") == expected
    assert models.namespaces("llama", "sql") == expected
    assert models.namespaces("qwen", "law@2") == [Namespace(spec=QWEN, lora_identity="law@2")]


def test_an_adapter_of_another_model_is_not_found() -> None:
    models = models_of(info("a", LLAMA, QWEN, served=(SQL,)))
    with pytest.raises(ModelNotFound, match=r"registered are: sql$") as caught:
        models.namespaces("qwen", "sql")
    assert caught.value.metadata == {"lora_name": "sql", "known_models": "sql"}


def test_the_name_of_a_model_is_not_one_of_an_adapter() -> None:
    models = models_of(info("a", LLAMA))
    with pytest.raises(ModelNotFound, match=r"registered are: none$"):
        models.namespaces(lora_name="llama")


def test_chunks_of_an_adapter_are_not_selected_by_its_name() -> None:
    models = models_of(info("a", LLAMA, served=(SQL,)))
    with pytest.raises(BadSelection, match="'sql' is a LoRA adapter") as caught:
        models.specs("sql")
    assert caught.value.metadata == {"model_name": "sql"}


def test_without_a_name_the_only_spec_is_meant_whatever_its_adapters() -> None:
    assert models_of().specs() == []
    assert models_of().namespaces() == []
    models = models_of(info("a", LLAMA, served=(SQL, alias("chat"))), info("b", LLAMA))
    assert models.specs() == [LLAMA]
    assert models.namespaces() == [Namespace(spec=LLAMA)]


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ModelNotFound, match="no engine has registered yet"):
        models_of().specs("llama")
    with pytest.raises(ModelNotFound, match=r"registered are: llama, qwen$"):
        models_of(info("a", QWEN, LLAMA)).namespaces("mistral")
    with pytest.raises(ModelAmbiguous, match=r"2 specs are registered; select one by model_name, one of: llama, qwen$"):
        models_of(info("a", QWEN, LLAMA)).namespaces()


def test_errors_contain_a_bounded_part_of_long_names() -> None:
    models = models_of(info("a", LLAMA, served=(alias("w" * MAX_NAME_BYTES), alias("x" * MAX_NAME_BYTES))))
    with pytest.raises(ModelNotFound) as caught:
        models.specs("y" * (MAX_SHOWN + 1))
    assert caught.value.metadata["model_name"] == "y" * MAX_SHOWN
    assert len(caught.value.metadata["known_models"]) == MAX_SHOWN
    with pytest.raises(ModelNotFound) as caught:
        models.namespaces(lora_name="z" * (MAX_SHOWN + 1))
    assert caught.value.metadata["lora_name"] == "z" * MAX_SHOWN


def test_a_name_leaves_with_its_last_holder() -> None:
    a, b = info("a", LLAMA, served=(SQL,)), info("b", LLAMA)
    models = models_of(a, b)
    models.remove(a)
    models.check([b])
    assert models.find_spec(LLAMA.fingerprint) == LLAMA
    assert models.other_names("llama") == []
    models.remove(b)
    models.remove(b)
    models.check([])
    assert models.find_spec(LLAMA.fingerprint) is None


def test_the_most_parts_of_a_chunk_are_those_of_any_spec() -> None:
    assert models_of().max_part_count() == 1
    assert models_of(info("a", LLAMA)).max_part_count() == 1
    part = KvPart(layer_count=1, kv_head_count=1, head_size=8, kv_dtype="float32")
    hybrid = dataclasses.replace(QWEN, more_parts=(part, part))
    assert models_of(info("a", LLAMA), info("b", hybrid)).max_part_count() == 3


def test_a_name_has_a_bounded_number_of_specs_and_adapters() -> None:
    models = models_of(info("a", *(variant(number) for number in range(MAX_KINDS - 1))))
    models.check_room(info("b", variant(0), variant(MAX_KINDS)))
    with pytest.raises(Full, match=rf"specs: model 'llama' has {MAX_KINDS - 1} specs and adapters") as caught:
        models.check_room(info("b", variant(MAX_KINDS), variant(MAX_KINDS + 1)))
    assert caught.value.retry_seconds == RETRY_SECONDS
    assert caught.value.metadata["model_name"] == "llama"


def test_the_first_instance_of_a_name_has_no_more_specs_than_all_may_have() -> None:
    models_of().check_room(info("a", *(variant(number) for number in range(MAX_KINDS))))
    with pytest.raises(Full, match="model 'llama' has 0 specs and adapters"):
        models_of().check_room(info("a", *(variant(number) for number in range(MAX_KINDS + 1))))


def test_an_instance_joins_those_of_a_name_that_has_the_most_specs() -> None:
    models = models_of(info("a", *(variant(number) for number in range(MAX_KINDS))))
    models.check_room(info("b", variant(3)))
    models.check_room(info("b", QWEN))
    with pytest.raises(Full, match="specs: "):
        models.check_room(info("b", variant(3), variant(MAX_KINDS)))


def test_a_fleet_has_a_bounded_number_of_names() -> None:
    served = tuple(alias(f"name-{number}") for number in range(MAX_NAMES - 2))
    models = models_of(info("a", LLAMA, served=served))
    models.check_room(info("b", LLAMA, served=(alias("one more"),)))
    with pytest.raises(Full, match=f"served_models: {MAX_NAMES - 1} names of models and adapters are") as caught:
        models.check_room(info("b", LLAMA, served=(alias("one more"), alias("another"))))
    assert caught.value.retry_seconds == RETRY_SECONDS


def test_known_names_are_admitted_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    models = models_of(info("a", LLAMA, QWEN))
    monkeypatch.setattr(models_module, "MAX_NAMES", 1)
    models.check_room(info("b", LLAMA))


def test_adapters_cause_no_conflict() -> None:
    adapter = ServedModel(name="qwen", fingerprint=LLAMA.fingerprint, lora_identity="qwen@1")
    models = models_of(info("a", LLAMA, served=(adapter,)), info("b", QWEN))
    assert models.conflicts(info("b", QWEN), 10) == []


def test_conflicts_of_several_models_are_limited_together() -> None:
    own = info("a", LLAMA, QWEN)
    other = info("b", variant(2), dataclasses.replace(QWEN, model_id="qwen@2"))
    models = models_of(own, other)
    found = models.conflicts(own, 10)
    assert [(one.model_name, one.own_value, one.other_value) for one in found] == [
        ("llama", "llama@1", "llama@2"),
        ("qwen", "qwen@1", "qwen@2"),
    ]
    assert models.conflicts(own, 1) == found[:1]
