"""The coordinator makes tokens of text for the models whose folders it was given."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv.auth.caller import Caller, Role, caller_context
from lmkv.config import CoordinatorConfig
from lmkv.errors import ConfigError
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.http.tokenizers import Tokenizers
from tests.server.coordinator.scripted_instance import Make
from tests.tokenizers import save_tokenizer

LLAMA = pytest.mark.parametrize("tokenizers", [["llama"]], indirect=True)
SEVERAL = pytest.mark.parametrize("tokenizers", [["qwen", "llama"]], indirect=True)


async def refusal(http: httpx.AsyncClient, **body: Any) -> tuple[int, str, str]:
    """Status, reason and words of what a text is refused with."""
    response = await http.post("/tokenize", json=body)
    error = response.json()["error"]
    details = error.get("details", [{}])
    return response.status_code, details[0].get("reason", ""), error["message"]


def break_tokenizer(folder: str) -> None:
    Path(folder, "tokenizer.json").write_text("{}")


@LLAMA
@pytest.mark.parametrize("model", [{}, {"model": ""}, {"model": "llama"}], ids=str)
async def test_a_text_is_answered_with_its_tokens(http: httpx.AsyncClient, model: dict[str, str]) -> None:
    response = await http.post("/tokenize", json={"prompt": "t5 t7  nonsense t5", **model})
    assert response.status_code == 200
    assert response.json() == {"count": 4, "tokens": [5, 7, 0, 5]}


@LLAMA
async def test_an_empty_text_has_no_tokens(http: httpx.AsyncClient) -> None:
    assert (await http.post("/tokenize", json={"prompt": ""})).json() == {"count": 0, "tokens": []}


@SEVERAL
async def test_of_several_models_one_must_be_named(http: httpx.AsyncClient) -> None:
    assert (await http.get("/tokenizers")).json() == {"models": ["llama", "qwen"]}
    status, reason, words = await refusal(http, prompt="t5")
    assert (status, reason) == (400, "MODEL_AMBIGUOUS")
    assert words.endswith("set model to one of: llama, qwen")
    assert (await http.post("/tokenize", json={"prompt": "t5", "model": "qwen"})).json()["tokens"] == [5]


@LLAMA
async def test_a_model_without_a_tokenizer_is_refused_with_those_there_are(http: httpx.AsyncClient) -> None:
    assert await refusal(http, prompt="t5", model="gpt") == (
        404,
        "MODEL_NOT_FOUND",
        "the coordinator has no tokenizer of model 'gpt'; there are those of: llama",
    )


@pytest.mark.parametrize("tokenizers", [["llama"]], indirect=True)
async def test_every_name_of_a_model_and_its_adapters_has_the_models_tokenizer(
    http: httpx.AsyncClient, make: Make
) -> None:
    async with make("a", served={"nickname": "", "tuned": "tuned@1"}):
        for model in ("llama", "nickname", "tuned"):
            answer = await http.post("/tokenize", json={"prompt": "t7", "model": model})
            assert answer.json()["tokens"] == [7]
        assert (await http.post("/tokenize", json={"prompt": "t7", "model": "qwen"})).status_code == 404


async def test_without_tokenizers_the_refusal_says_how_to_have_some(http: httpx.AsyncClient) -> None:
    assert (await http.get("/tokenizers")).json() == {"models": []}
    status, reason, words = await refusal(http, prompt="t5")
    assert (status, reason) == (404, "MODEL_NOT_FOUND")
    assert "set tokenizers to the models' folders by name" in words


@LLAMA
@pytest.mark.parametrize("body", [{}, {"prompt": 5}, {"prompt": "t5", "text": "t5"}, {"tokens": [1], "prompt": "t5"}])
async def test_a_body_that_names_no_text_is_refused(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await http.post("/tokenize", json=body)).status_code == 400


@LLAMA
async def test_a_file_that_broke_meanwhile_is_refused(http: httpx.AsyncClient, tokenizers: dict[str, str]) -> None:
    break_tokenizer(tokenizers["llama"])
    status, _, words = await refusal(http, prompt="t5")
    assert status == 500  # not the fault of the client
    assert "tokenizer.json is not a tokenizer" in words


async def test_a_folder_without_a_tokenizer_is_refused_at_the_start(tmp_path: Path) -> None:
    coordinator = Coordinator(CoordinatorConfig(port=0, http_port=0, tokenizers={"llama": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"tokenizers\['llama'\]: .*/tokenizer\.json does not exist; name the folder"):
        async with coordinator:
            pass


async def test_texts_of_one_tenant_leave_the_tokenizer_to_another(tmp_path: Path) -> None:
    """A tenant whose texts wait is served after at most one text of each other tenant, and the one that is encoded."""
    tokenizers = Tokenizers({"m": str(save_tokenizer(tmp_path, {"[UNK]": 0, "a": 1}))})
    done: list[str] = []

    async def encode(tenant: str) -> None:
        with caller_context(Caller(name=tenant, role=Role.READER, tenant=tenant), lambda: None, lambda: None):
            await tokenizers.encode("a " * 1000, "m")
            done.append(tenant)

    async with asyncio.TaskGroup() as group:
        for tenant in ["hog"] * 20 + ["honest"]:
            group.create_task(encode(tenant))
    assert done.index("honest") <= 2
