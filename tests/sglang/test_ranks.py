"""Real SGLang servers of two tensor-parallel ranks, of attention with heads and of latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.conftest import Fleet, open_fleet
from tests.sglang.latent_model import make_latent_model
from tests.sglang.prompts import HIT_TOKENS, PAGE_COUNT, STORE_SECONDS, make_prompt
from tests.waiting import wait_until

RANKS = 2


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet without engines of one rank: these have other specs."""
    with open_fleet(model, tmp_path_factory.mktemp("ranks")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose ranks all have the same latents."""
    return make_latent_model(tmp_path_factory.mktemp("models") / "latent")


WAYS = pytest.mark.parametrize("links", [False, True], ids=["hicache", "linker"])


@WAYS
def test_each_rank_stores_and_loads_its_own_heads(fleet: Fleet, model: Path, links: bool) -> None:
    check_ranks(fleet, "ranks", model, stored_count=RANKS * PAGE_COUNT, links=links)
    specs = fleet.coordinator.instances()["ranks"].specs  # those of both ways
    assert len({spec.fingerprint for spec in specs}) == RANKS


@WAYS
def test_one_rank_stores_latents_and_all_load_them(fleet: Fleet, latent_model: Path, links: bool) -> None:
    check_ranks(fleet, "latents", latent_model, stored_count=PAGE_COUNT, links=links)
    specs = fleet.coordinator.instances()["latents"].specs
    assert len({spec.fingerprint for spec in specs}) == 1


def check_ranks(fleet: Fleet, instance_id: str, model: Path, *, stored_count: int, links: bool) -> None:
    """Has two ranks store a prompt that they have computed, and load it after a flush."""
    prompt = make_prompt(8 + links)  # a prompt for each way: they share pages
    name = f"{instance_id}-{'linker' if links else 'hicache'}"
    with fleet.engine(name, instance_id=instance_id, model=model, rank_count=RANKS, links=links) as engine:
        before = fleet.chunk_count(instance_id)
        cold = engine.answer(prompt)
        assert cold.cached_tokens == 0
        wait_until(
            lambda: fleet.chunk_count(instance_id) >= before + stored_count,
            "every rank that stores has stored",
            STORE_SECONDS,
        )
        engine.flush()
        found_before = fleet.found_chunks(instance_id, "own")
        warm = engine.answer(prompt)
        found = fleet.found_chunks(instance_id, "own") - found_before
    assert (warm.token_ids, warm.cached_tokens) == (cold.token_ids, HIT_TOKENS)
    assert found >= RANKS * PAGE_COUNT
    assert fleet.chunk_count(instance_id) == before + stored_count
