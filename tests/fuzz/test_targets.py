"""Every fuzz target keeps its promises for its committed corpus, and for inputs that are always generated the same."""

from __future__ import annotations

import pytest

from tests.fuzz.harness import MAX_INPUT_BYTES, load_target, measure, mutants, target_names

GENERATED = 60
"""Inputs for each target. `make fuzz` runs millions."""
MAX_CORPUS_BYTES = 16 << 10


@pytest.mark.parametrize("name", target_names())
def test_the_corpus_keeps_the_promises(name: str) -> None:
    target = load_target(name)
    covered = set()
    for data in target.corpus():
        covered |= measure(target, data)
    assert covered, "its inputs reach none of the modules that it names"


@pytest.mark.parametrize("name", target_names())
def test_generated_inputs_keep_the_promises(name: str) -> None:
    target = load_target(name)
    for data in mutants(target.corpus(), GENERATED, name):
        try:
            target.run(data)
        except BaseException as error:
            error.add_note(f"input of the fuzz target {name}: {data!r}")
            raise


@pytest.mark.parametrize("name", target_names())
def test_corpora_are_small(name: str) -> None:
    target = load_target(name)
    assert target.seeds
    assert not target.corpus_file.exists() or target.corpus_file.stat().st_size <= MAX_CORPUS_BYTES
    assert max(map(len, target.corpus())) <= MAX_INPUT_BYTES
