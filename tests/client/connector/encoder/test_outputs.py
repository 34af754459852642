"""Outputs of encoders in a real node: stored by the worker side, found by the scheduler side, bit for bit."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmkv.errors import ConfigError
from lmkv.keys import MEDIA_HASH_SCHEME
from lmkv.spec import KvSpec
from lmkv_client.connector.encoder import worker
from lmkv_client.connector.encoder.outputs import CHUNK_ROWS, EncoderPlan, OutputName, OutputWidths, encoder_spec
from lmkv_client.connector.encoder.scheduler import EncoderRoles, EncoderScheduler, OutputLookup
from lmkv_client.connector.encoder.worker import MAX_WAITING_BYTES, EncoderStores, EncoderWorker, host_bytes, store
from lmkv_client.engine import Engine
from tests.client.engine.engines import attach_engine
from tests.client.engine.nodes import connector_config, kill_all
from tests.waiting import POLL_SECONDS, WAIT_SECONDS, wait_until

HIDDEN = 24
SPEC = KvSpec(
    model_name="pictures encoder",
    model_id="pictures",
    kv_dtype="bfloat16",
    layer_count=1,
    kv_head_count=1,
    head_size=HIDDEN,
    chunk_size=CHUNK_ROWS,
    mla=True,
    hash_scheme=MEDIA_HASH_SCHEME,
)
DIGEST = bytes(range(32))


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[Engine]:
    """An engine at a node of its own."""
    with attach_engine(runtime_dir, spec=SPEC) as engine:
        yield engine
    kill_all(runtime_dir)


def output(places: int, embeddings: int) -> torch.Tensor:
    """What an encoder might make: other numbers everywhere."""
    return torch.randn(places, embeddings * HIDDEN, generator=torch.Generator().manual_seed(places)).bfloat16()


def found(engine: Engine, name: OutputName) -> OutputLookup:
    """A lookup that is done."""
    lookup = OutputLookup(engine, name)
    deadline = time.monotonic() + WAIT_SECONDS
    while not lookup.poll():
        assert time.monotonic() < deadline, "no answer"
        time.sleep(POLL_SECONDS)
    return lookup


def make_worker(engine: Engine, *, is_writer: bool = True) -> EncoderWorker:
    return EncoderWorker(engine.config, torch.bfloat16, "cpu", is_writer=is_writer)


@pytest.mark.parametrize(
    ("places", "embeddings"),
    [(1, 1), (CHUNK_ROWS - 1, 1), (CHUNK_ROWS, 1), (CHUNK_ROWS + 1, 1), (577, 1), (300, 4), (CHUNK_ROWS, 3)],
)
def test_an_output_of_any_length_and_width_is_loaded_as_it_was_stored(
    engine: Engine, places: int, embeddings: int
) -> None:
    name = OutputName.of(engine, DIGEST, places, embeddings, salt="")
    assert not found(engine, name).is_ready
    made = output(places, embeddings)
    assert store(engine, name, host_bytes(made, None)) == made.nbytes
    lookup = found(engine, name)
    plan = EncoderPlan(loads={"picture": lookup.output()})
    here: dict[str, torch.Tensor] = {}
    elsewhere: dict[str, torch.Tensor] = {}
    make_worker(engine).load(here, plan)
    make_worker(engine).load(elsewhere, pickle.loads(pickle.dumps(plan)))
    lookup.release()
    assert torch.equal(here["picture"], made)
    assert torch.equal(elsewhere["picture"], made)


def test_a_store_reserves_a_bounded_number_of_extents_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_RESERVED", 2)
    reserve, counts = engine.reserve, list[int]()

    def count(number: int, **options: Any) -> Any:
        counts.append(number)
        return reserve(number, **options)

    monkeypatch.setattr(engine, "reserve", count)
    made = output(5 * CHUNK_ROWS - 1, 1)
    assert store(engine, OutputName.of(engine, DIGEST, len(made), 1, salt=""), host_bytes(made, None)) == made.nbytes
    assert max(counts) == worker.MAX_RESERVED
    assert sum(counts) >= 5


def test_an_output_that_lacks_a_chunk_is_not_loaded(engine: Engine) -> None:
    name = OutputName.of(engine, DIGEST, 3 * CHUNK_ROWS, 1, salt="")
    begin = replace(name, keys=name.keys[:2])
    store(engine, begin, host_bytes(output(3 * CHUNK_ROWS, 1), None))
    assert not found(engine, name).is_ready


def test_names_differ_in_content_shape_salt_and_spec(engine: Engine, runtime_dir: Path) -> None:
    names = [
        OutputName.of(engine, DIGEST, 8, 1, salt=""),
        OutputName.of(engine, DIGEST[::-1], 8, 1, salt=""),
        OutputName.of(engine, DIGEST, 9, 1, salt=""),
        OutputName.of(engine, DIGEST, 8, 2, salt=""),
        OutputName.of(engine, DIGEST, 8, 1, salt="tenant"),
    ]
    others = (replace(SPEC, model_id="other"), replace(SPEC, kv_dtype="float16"), replace(SPEC, weight_version="2"))
    for spec in others:
        with attach_engine(runtime_dir, spec=spec) as other:
            names.append(OutputName.of(other, DIGEST, 8, 1, salt=""))
    assert len({name.keys for name in names}) == len(names)
    assert OutputName.of(engine, DIGEST, 8, 1, salt="").keys == names[0].keys


def test_an_output_of_another_shape_or_dtype_than_its_name_says_is_not_stored(engine: Engine) -> None:
    name = OutputName.of(engine, DIGEST, 8, 1, salt="")
    plan = EncoderPlan(stores={"picture": name}, spec=SPEC)
    worker = make_worker(engine)
    wrong = [output(9, 1), output(8, 2), output(8, 1).float(), output(8, 1).reshape(8, 1, HIDDEN)]
    for made in wrong:
        worker.save({"picture": made}, "picture", plan)
    report = worker.report()
    assert report is not None
    assert report.counts == {"encoder_skipped_stores": len(wrong)}
    make_worker(engine, is_writer=False).save({"picture": output(8, 1)}, "picture", plan)
    assert not found(engine, name).is_ready
    worker.save({"picture": output(8, 1)}, "picture", plan)
    worker.close()
    assert found(engine, name).is_ready


def test_outputs_that_wait_to_be_stored_are_bounded(runtime_dir: Path) -> None:
    stores = EncoderStores(
        connector_config(runtime_dir, node_address=str(runtime_dir / "none"), node_start_timeout=1.0), SPEC
    )
    engine: Any = SimpleNamespace(foreign_keys=lambda names, salt: names, root=lambda salt: b"")
    made = torch.empty(
        MAX_WAITING_BYTES // HIDDEN // 4, HIDDEN, dtype=torch.bfloat16
    )  # half of them: no page is touched
    name = OutputName.of(engine, DIGEST, len(made), 1, salt="")
    for _ in range(3):
        stores.add(name, made)
    assert stores.take_counts() == {"encoder_skipped_stores": 1}
    stores.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "dtype float64 is unknown"),
        ({"multimodal_config": None}, "has no encoder"),
        ({"is_encoder_decoder": True}, "has no encoder"),
    ],
)
def test_a_model_whose_outputs_cannot_be_stored_is_refused(
    changes: dict[str, object], reason: str, runtime_dir: Path
) -> None:
    values = {"served_model_name": "pictures", "multimodal_config": object(), "is_encoder_decoder": False}
    model = SimpleNamespace(**(values | {"dtype": torch.bfloat16} | changes))
    vllm_config: Any = SimpleNamespace(model_config=model)
    with pytest.raises(ConfigError, match=reason):
        encoder_spec(vllm_config, connector_config(runtime_dir, model_id="pictures"))


def test_widths_are_those_that_vllm_measures_or_the_configuration_says() -> None:
    def widths(measured: dict[str, int], **vision: Any) -> OutputWidths:
        model = SimpleNamespace(
            get_inputs_embeds_size=lambda: HIDDEN, hf_config=SimpleNamespace(vision_config=SimpleNamespace(**vision))
        )
        transfer = SimpleNamespace(mm_encoder_output_widths=measured)
        config: Any = SimpleNamespace(model_config=model, ec_transfer_config=transfer)
        return OutputWidths(config)

    measured = widths({"image": HIDDEN, "video": 4 * HIDDEN, "pruned": HIDDEN + 5}, deepstack_visual_indexes=[1])
    assert [measured.of(modality) for modality in ("image", "video", "pruned", "audio")] == [1, 4, 0, 2]
    assert widths({}).of("image") == 1


def picture(name: str, count: int) -> Any:
    """A medium of a request, as vLLM describes it."""
    place = SimpleNamespace(offset=0, length=count, get_num_embeds=lambda: count, is_embed=None)
    data = {"pixels": SimpleNamespace(data=torch.ones(count))}
    return SimpleNamespace(identifier=name, modality="image", mm_position=place, data=data)


def end_by_finish(scheduler: EncoderScheduler, request: Any) -> None:
    scheduler.finished(request)


def end_by_weights(scheduler: EncoderScheduler, request: Any) -> None:
    scheduler.weights_changed()


def end_by_progress(scheduler: EncoderScheduler, request: Any) -> None:
    assert scheduler.admit(request, computed_count=10)


def end_by_load(scheduler: EncoderScheduler, request: Any) -> None:
    scheduler.allocated(request, 0)
    assert scheduler.plan().loads
    scheduler.plan()  # of the next step: the workers have read the last one


@pytest.mark.parametrize(
    ("end", "is_stored"),
    [(end_by_load, True), *itertools.product([end_by_finish, end_by_weights, end_by_progress], [True, False])],
)
def test_nothing_is_held_for_a_request_whose_media_are_not_needed_any_more(
    engine: Engine, end: Callable[[EncoderScheduler, Any], None], is_stored: bool
) -> None:
    widths: Any = SimpleNamespace(of=lambda modality: 1)
    roles = EncoderRoles(may_load=True, may_store=True, adapts_encoders=False)
    late: Any = SimpleNamespace(engine=engine)
    scheduler = EncoderScheduler(late, widths, roles)
    request: Any = SimpleNamespace(request_id="r", mm_features=[picture("p", 10)], cache_salt=None, lora_request=None)
    scheduler.admit(request, 0)
    (name,) = scheduler._requests["r"].names.values()
    scheduler.finished(request)
    if is_stored:
        store(engine, name, host_bytes(output(10, 1), None))
        found(engine, name).release()
        wait_until(lambda: scheduler.admit(request, 0), "the output is in the pool")
        assert scheduler.has("p")
    else:
        scheduler.admit(request, 0)
    end(scheduler, request)
    wait_until(lambda: not engine._dispatcher._session.lookups, "nothing is held")
