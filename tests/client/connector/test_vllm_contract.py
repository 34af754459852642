"""The installed vLLM has what the connector relies on, what has moved is named, and the tables are complete."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1 import kv_cache_interface, request
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput

from lmkv_client import vllm_contract as contract
from lmkv_client.connector import vllm_api
from lmkv_client.connector.messages import WorkerReport
from lmkv_client.connector.stats import ConnectorStats, PromMetrics
from lmkv_client.connector.vllm_connector import LMKVConnector
from lmkv_client.plugin import NEWEST_VLLM, OLDEST_VLLM

API = "lmkv_client.connector.vllm_api"


def test_the_installed_vllm_has_all_that_the_connector_relies_on() -> None:
    assert contract.moved() == []
    assert len(list(contract.checks())) > 150


def test_what_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_new_request(self: object, request: object, priority: int) -> None: ...
    def extra_keys_of(extra_keys: object, *, tagged: bool) -> None: ...

    monkeypatch.delattr(kv_cache_interface, "MambaSpec")
    monkeypatch.delitem(SchedulerOutput.__annotations__, "total_num_scheduled_tokens")
    monkeypatch.delattr(request.Request, "skip_reading_prefix_cache", raising=False)
    monkeypatch.setattr(request.Request, "__init__", lambda self: None)
    monkeypatch.setattr(KVConnectorBase_V1, "on_new_request", on_new_request)
    monkeypatch.setattr(KVConnectorBase_V1, "__abstractmethods__", frozenset({"wait_for_save", "bind_pool"}))
    monkeypatch.setattr(kv_cache_utils, "to_event_extra_keys", extra_keys_of)
    monkeypatch.setitem(contract.ATTRIBUTES, "vllm.v1.gone.Thing", "name")
    lines = contract.moved()
    for line in (
        "vllm.v1.kv_cache_interface has no attribute MambaSpec",
        "vllm.v1.core.sched.output.SchedulerOutput has no attribute total_num_scheduled_tokens",
        "vllm.v1.request.Request has no attribute skip_reading_prefix_cache",
        f"{contract.BASE}.on_new_request takes (request, priority), lmkv expects (request)",
        f"{contract.BASE} has abstract methods that lmkv does not define: bind_pool",
        "vllm.v1.core.kv_cache_utils.to_event_extra_keys takes (extra_keys, tagged), lmkv calls it with (extra_keys)",
        "vllm.v1 has no attribute gone",
    ):
        assert line in lines


def test_names_that_came_later_are_not_expected_of_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "get_external_cache_hit_sources", raising=False)
    monkeypatch.setattr("vllm.__version__", "0.32.1")
    assert f"{contract.BASE} has no attribute get_external_cache_hit_sources" in contract.moved()
    monkeypatch.setattr("vllm.__version__", "0.31.2")
    assert contract.moved() == []
    assert all(OLDEST_VLLM < since <= NEWEST_VLLM for since in contract.SINCE.values())


@pytest.mark.parametrize("ours", [LMKVConnector, ConnectorStats, PromMetrics, WorkerReport])
def test_every_method_that_overrides_one_of_vllm_is_a_hook_with_its_parameters(ours: type) -> None:
    hooks = 0
    for base in ours.__mro__:
        if not base.__module__.startswith("vllm."):
            continue
        for name, function in inspect.getmembers(base, inspect.isroutine):
            if name.startswith("__") or getattr(ours, name) == function or name not in vars(ours):
                continue
            place = f"{base.__module__}.{base.__qualname__}.{name}"
            assert place in contract.HOOKS, f"{place} is not in HOOKS"
            own = [each for each in inspect.signature(getattr(ours, name)).parameters if each != "self"]
            assert own == contract.HOOKS[place].split(), f"{ours.__name__}.{name} takes {own}"
            hooks += 1
    assert hooks


def test_every_attribute_that_the_connector_reads_of_vllms_objects_is_in_the_table() -> None:
    known = {
        contract.find(owner): names.split()
        for owner, names in contract.ATTRIBUTES.items()
        if contract.is_expected(owner)
    }
    called = [(contract.find(place.rpartition(".")[0]), place.rpartition(".")[2]) for place in contract.CALLS]
    files = sorted((contract.CLIENT / "connector").rglob("*.py"))
    read = {(owner, name, file.name) for file in files for owner, name in attributes_read(ast.parse(file.read_text()))}
    assert len(read) > 40
    missing = []
    for owner, name, file in sorted(read):
        kind = getattr(vllm_api, owner)
        listed = {each for one, names in known.items() if related(one, kind) for each in names}
        listed |= {each for one, each in called if related(one, kind)}
        if name not in listed:
            missing.append(f"{file}: {owner}.{name}")
    assert not missing, f"client/lmkv_client/vllm_contract.py lacks {missing}"


def related(one: object, other: object) -> bool:
    """Whether one of two classes extends the other."""
    return isinstance(one, type) and isinstance(other, type) and (issubclass(one, other) or issubclass(other, one))


def attributes_read(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The attributes that a module reads of parameters whose class it has from `vllm_api`, with the class."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == API)
    classes = {alias.name for node in imports for alias in node.names}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        kinds = {one.arg: ast.unparse(one.annotation) for one in parameters if one.annotation}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                kind = kinds.get(node.value.id, "")
                if kind in classes and kind != "KVConnectorWorkerMetadata":  # lmkv's own report
                    yield kind, node.attr
