"""Every interleaving of a few actions of each model keeps the promises; `make models` takes more actions."""

from __future__ import annotations

import pytest

from tests.models.explorer import explore
from tests.models.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_every_interleaving_keeps_the_promises(name: str) -> None:
    model = MODELS[name]
    with model.models() as make:
        found = explore(make, depth=model.depth)
    assert found.counterexample is None, f"\n{found.counterexample}"
    assert found.is_complete or found.depth == model.depth
    assert found.state_count > 100
