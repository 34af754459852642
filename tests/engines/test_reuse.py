"""Engines whose prefixes vLLM itself does not reuse are refused in one line; those that it reuses are served."""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster
from tests.engines.conftest import SETTINGS
from tests.engines.llm import READY_TIMEOUT_SECONDS

HEADS: dict[str, Any] = {"num_attention_heads": 2, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
EMBEDDING = ("--runner", "pooling", "--convert", "embed")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """No engine yet, and no coordinator."""
    logs = tmp_path_factory.mktemp("logs")
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Cluster(Path(folder), tiny_model, logs=logs, settings=SETTINGS, coordinator=False) as cluster,
    ):
        yield cluster


def prefix_lm() -> Any:
    """HRM-Text: a prompt's tokens attend to all of the prompt."""
    config = transformers.HrmTextConfig(
        **HEADS,
        vocab_size=512,
        head_dim=64,
        H_cycles=1,
        L_cycles=2,
        embedding_scale=1.0,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.HrmTextForCausalLM(config)


def encoder() -> Any:
    """A BERT: no layer keeps a KV cache."""
    return transformers.BertModel(transformers.BertConfig(**HEADS, vocab_size=512, max_position_embeddings=512))


def encoder_decoder() -> Any:
    """A Whisper: its decoder attends to what its encoder makes of sound."""
    config = transformers.WhisperConfig(
        vocab_size=512,
        d_model=128,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=80,
        max_source_positions=1500,
        max_target_positions=448,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    return transformers.WhisperForConditionalGeneration(config)


def saved(make: Callable[[], Any], tokenizer: Path, folder: Path) -> Path:
    """A model with random weights, and the tokenizer of another one."""
    torch.manual_seed(5)
    make().to(torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    if make is encoder_decoder:
        transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "arguments", "reason"),
    [
        (prefix_lm, (), "its prompts are attended to in both directions"),
        (encoder, ("--runner", "pooling"), "the model keeps no KV cache"),
        (None, (*EMBEDDING, "--pooler-config", '{"seq_pooling_type": "MEAN"}'), "vLLM does not reuse prefixes of it"),
        (None, (*EMBEDDING, "--pooler-config", '{"seq_pooling_type": "CLS"}'), "vLLM does not reuse prefixes of it"),
    ],
    ids=("prefix-LM", "encoder", "MEAN", "CLS"),
)
def test_an_engine_whose_prefixes_cannot_be_reused_ends_with_one_line(
    cluster: Cluster,
    tiny_model: Path,
    tmp_path: Path,
    make: Callable[[], Any] | None,
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    model = saved(make, tiny_model, tmp_path / "model") if make else tiny_model
    engine = cluster.add_engine(
        f"refused-{len(cluster.engines)}",
        model=model,
        context_tokens=512,
        kv_cache_bytes=64 << 20,
        extra_arguments=arguments,
    )
    engine.ready_timeout_seconds = READY_TIMEOUT_SECONDS
    engine.start()
    with pytest.raises(LmkvError):
        engine.wait_ready()
    last = engine.log().rstrip("\n").splitlines()[-1]
    assert last.startswith(f"lmkv: error: LMKVConnector: model {model.name} cannot be cached: {reason}")
    assert last.endswith("remove --kv-transfer-config or change the engine")


@pytest.mark.parametrize("more", [(), ("--no-enable-prefix-caching",)], ids=("cache", "no cache of its own"))
def test_pooling_of_the_last_token_is_served_and_answers_the_same(cluster: Cluster, more: tuple[str, ...]) -> None:
    engine = cluster.add_engine(
        f"last-{len(cluster.engines)}",
        context_tokens=512,
        kv_cache_bytes=64 << 20,
        extra_arguments=(*EMBEDDING, "--pooler-config", '{"seq_pooling_type": "LAST"}', *more),
    )
    engine.ready_timeout_seconds = READY_TIMEOUT_SECONDS
    engine.start()
    engine.wait_ready()
    body = {"model": engine.model.name, "input": [7 * token % 400 + 50 for token in range(300)]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.port}/v1/embeddings",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    first, second = (
        json.loads(urllib.request.urlopen(request, timeout=READY_TIMEOUT_SECONDS).read())["data"][0]["embedding"]
        for _ in range(2)
    )
    assert second == pytest.approx(first, abs=1e-5)
    engine.stop()
