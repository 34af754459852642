"""Tiny random models of transformers in float32, and caches of them with a small node of their own."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers warns about when it is imported is not ours to mend
    from transformers import AutoModelForCausalLM

    from lmkv_client.transformers import LmkvCache

from lmkv.config import ConnectorConfig
from lmkv_client.demo.process import end_processes, pids_with_environment
from tests.client.engine.nodes import connector_config
from tests.support.models import make_architecture, make_plain

MODELS = ("llama", "qwen2", "gemma2", "gemma3")
"""Two plain models, and two in which some layers have a window."""
PLAIN = ("qwen2", "mistral", "qwen3")
CHUNK = 32
PROMPT_TOKENS = 300
"""More than a window, and no multiple of a chunk."""
NEW_TOKENS = 16
PAD = 2
"""Not among the tokens of prompts."""

MakeCache = Callable[..., LmkvCache]
GetModel = Callable[[str], Any]


def make_folder(folder: Path, name: str, **changes: Any) -> Path:
    """The folder of the model of this name."""
    return make_plain(folder, name, **changes) if name in PLAIN else make_architecture(folder, name, **changes)


def open_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of models by name, each made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_folder(tmp_path_factory.mktemp("models") / name, name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def get_model(model_folder: Callable[[str], Path]) -> GetModel:
    """Models by name, each opened once."""
    opened: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in opened:
            opened[name] = open_model(model_folder(name))
        return opened[name]

    return get


@pytest.fixture
def config(runtime_dir: Path) -> Iterator[ConnectorConfig]:
    """A small node; a busy machine makes tests slow, not wrong."""
    yield connector_config(
        runtime_dir,
        chunk_size=CHUNK,
        lookup_timeout=20.0,
        load_timeout=20.0,
        node_start_timeout=60.0,
    )
    end_processes(pids_with_environment({"LMKV_RUNTIME_DIR": str(runtime_dir)}, "node"))


@pytest.fixture
def make_cache(config: ConnectorConfig) -> Iterator[MakeCache]:
    """Makes caches that use the node."""
    with ExitStack() as stack:
        yield lambda model, own=config: stack.enter_context(LmkvCache(model, config=own))


def make_prompt(seed: int, token_count: int = PROMPT_TOKENS, *, prefix: Sequence[int] = ()) -> torch.Tensor:
    """Token ids `[1, token_count]`: `prefix`, then random ones."""
    choose = random.Random(seed)
    return torch.tensor([[*prefix, *(choose.randrange(3, 500) for _ in range(token_count - len(prefix)))]])


def compute(model: Any, input_ids: torch.Tensor, **options: Any) -> list[int]:
    """What the model generates without lmkv, prompt included."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None} | options
    output: list[int] = model.generate(input_ids, **options)[0].tolist()
    return output


def generate(cache: LmkvCache, input_ids: torch.Tensor, **options: Any) -> list[int]:
    """As `compute`, with the cache."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None} | options
    output: list[int] = cache.generate(input_ids, **options)[0].tolist()
    return output
