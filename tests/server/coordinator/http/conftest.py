"""A coordinator that speaks HTTP, a client of it, and nodes that hold what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv_server.coordinator.coordinator import Coordinator
from tests.tokenizers import save_tokenizer


@pytest.fixture
def tokenizers(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Tokenizers of the models that a test parametrizes it with: `t7` is token 7. Else none."""
    folder = save_tokenizer(tmp_path / "model", {f"t{token}": token for token in range(1, 1000)})
    return dict.fromkeys(getattr(request, "param", ()), str(folder))


@pytest.fixture
def coordinator_options(tokenizers: dict[str, str]) -> dict[str, Any]:
    return {"http_port": 0, "tokenizers": tokenizers}


@pytest.fixture
async def http(coordinator: Coordinator) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{coordinator.http_address}", trust_env=False, timeout=60) as client:
        yield client
