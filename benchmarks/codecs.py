"""The bytes that codecs save, and what they cost: `python -m benchmarks.codecs`, docs/guides/codecs.md.

Bytes, speed on one core beside memcpy, and errors of keys and values by layer. How much these matter is measured with a
small model (`small_gpt`) that is trained first, on text that it makes: sentences about people and things that repeat
within a document, so that answers depend on keys and values of far tokens. The model computes the KV of a document's
beginning, which is rounded; then it continues with that. The plain cast to
`float8_e4m3fn`, without scales, stands beside the codecs: it is what LMCache's serde `fp8` computes. Where LMCache can
be imported its codec `asym_k16_v8` runs, too; its TurboQuant needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.support import timing
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row, compare
from benchmarks.support.small_gpt import HEAD_SIZE, HEADS, LAYERS, Kv, SmallGpt, documents, trained
from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv_server.node.tiers.codec import ChunkCodec, parse_codec_header

CODECS = ("fp8", "int8", "int4", "zstd")
CAST = "fp8_cast"
"""The cast without scales, as LMCache's serde `fp8` does it (0.5.6, `lmcache/v1/distributed/serde/fp8.py`)."""
ASYM = "asym_k16_v8"
"""LMCache's own: keys as they are, values as the cast, with a scale for all values of a chunk."""
CHUNK_TOKENS = 64
PREFIX_TOKENS = 96
"""A full chunk and half of one."""
ANSWER_TOKENS = 32
SPEED_TOKENS = 4096
NO_KEY = ChunkKey(bytes(16))


@dataclass(frozen=True, kw_only=True)
class Described:
    """A chunk, as codecs see it."""

    fingerprint: bytes
    size_bytes: int
    token_count: int
    key: ChunkKey = NO_KEY
    parent: ChunkKey | None = None
    checksum: int = 0


class Rounded:
    """Encodes and decodes the keys and values of a model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._spec = KvSpec(
            model_name="small",
            model_id="small",
            kv_dtype="bfloat16",
            layer_count=LAYERS,
            kv_head_count=HEADS,
            head_size=HEAD_SIZE,
            chunk_size=CHUNK_TOKENS,
            accepts_lossy=True,
        )
        self._codec = ChunkCodec(name, self) if name in CODECS else None
        self.stored_bytes = 0
        """Bytes of the encoded chunks so far."""
        self.size_bytes = 0
        """Bytes of the chunks so far."""

    def spec(self, _fingerprint: bytes) -> KvSpec:
        """The spec of all chunks."""
        return self._spec

    def __call__(self, kv: Kv) -> Kv:
        """Keys and values after a round trip, chunk by chunk: `[layer, head, K or V, token, element]`."""
        return torch.cat([self._chunk(chunk.contiguous()) for chunk in torch.split(kv, CHUNK_TOKENS, dim=3)], dim=3)

    def _chunk(self, chunk: Kv) -> Kv:
        raw = _bytes_of(chunk)
        self.size_bytes += len(raw)
        if self.name == ASYM:
            return self._asymmetric(chunk)
        if self._codec is None:
            self.stored_bytes += len(raw) // 2 if self.name == CAST else len(raw)
            return chunk.to(torch.float8_e4m3fn).to(chunk.dtype) if self.name == CAST else chunk
        described = Described(fingerprint=b"", size_bytes=len(raw), token_count=chunk.shape[3])
        pages, encoded_bytes = self._codec.encode(described, raw)
        self.stored_bytes += encoded_bytes
        decoded = torch.empty_like(chunk)
        size = self._codec.decode(b"", pages[:encoded_bytes], _bytes_of(decoded))
        if size != len(raw):
            raise RuntimeError(f"{self.name}: a chunk of {len(raw)} bytes was decoded to {size}")
        return decoded

    def _asymmetric(self, chunk: Kv) -> Kv:
        codec = import_module("lmcache.v1.kv_codec").AsymK16V8Codec()
        keys, values = chunk.unbind(2)
        stored = codec.to_bytes(codec.encode(keys.contiguous(), values.contiguous()))
        self.stored_bytes += len(stored)
        found = codec.decode(codec.from_bytes(stored), out_k_dtype=chunk.dtype, out_v_dtype=chunk.dtype)
        return torch.stack([one.view_as(keys) for one in found[:2]], dim=2)

    def acts(self, kv: Kv) -> tuple[int, Callable[[], object], Callable[[], object]]:
        """Bytes of a large chunk, and how it is encoded and decoded."""
        assert self._codec
        raw = _bytes_of(kv)
        described = Described(fingerprint=b"", size_bytes=len(raw), token_count=kv.shape[3])
        pages, encoded_bytes = self._codec.encode(described, raw)
        encoded, target = memoryview(bytes(pages[:encoded_bytes])), memoryview(bytearray(len(raw)))
        header = parse_codec_header(bytes(encoded[:64]))
        assert header
        assert header.code == self.name, "it is stored as it is"
        encode = partial(self._codec.encode, described, raw)
        return len(raw), encode, partial(self._codec.decode, b"", encoded, target)


def _bytes_of(kv: Kv) -> memoryview:
    """The bytes of a contiguous tensor, which it shares."""
    elements: NDArray[np.uint8] = kv.contiguous().view(torch.uint8).numpy().reshape(-1)
    return memoryview(elements)  # type: ignore[arg-type]  # numpy's arrays are buffers


def measure(run: BenchmarkRun) -> None:
    """Adds rows for each codec."""
    names = [name for name in CODECS if name != "zstd" or find_spec("zstandard")]
    if len(names) < len(CODECS):
        run.note("zstd was left out: zstandard is not installed")
    run.say("training a small model")
    model, loss = trained(300 if run.quick else 1200)
    run.add(Row(name="model_loss", value=loss, unit="nats a token"))
    run.say(f"loss {loss:.3f}")
    _add_quality(run, model, names)
    _add_speed(run, model, names)


def _add_quality(run: BenchmarkRun, model: SmallGpt, names: list[str]) -> None:
    texts = documents(16 if run.quick else 64, PREFIX_TOKENS + ANSWER_TOKENS, seed=2)
    exact = _continued(model, texts, Rounded("none"))
    for name in (*names, CAST, *([ASYM] if find_spec("lmcache") else ())):
        rounded = Rounded(name)
        found = _continued(model, texts, rounded)
        run.add(
            compare(f"{name}_bytes", rounded.stored_bytes / 2**20, "MiB", "none", rounded.size_bytes / 2**20),
            compare(f"{name}_perplexity", found.perplexity, "tokens", "none", exact.perplexity),
            Row(name=f"{name}_same_answers", value=100 * found.share_same(exact), unit="%"),
        )
        if name == "zstd" and found != exact:
            run.fail("zstd has changed keys or values")
        for layer, errors in enumerate(found.errors if name != "zstd" else ()):
            for kind, error in zip("kv", errors, strict=True):
                run.add(Row(name=f"{name}_error_{kind}_layer_{layer}", value=100 * error, unit="% of the RMS"))
        run.say(f"{name}: perplexity {found.perplexity:.4f} beside {exact.perplexity:.4f}")


@dataclass(frozen=True)
class Continued:
    """How the model continues documents."""

    perplexity: float
    answers: tuple[tuple[int, ...], ...]
    errors: tuple[tuple[float, float], ...]
    """Errors of keys and values by layer, relative to their root mean square."""

    def share_same(self, other: Continued) -> float:
        """The share of greedy answers that are the same, to their last token."""
        same = sum(mine == theirs for mine, theirs in zip(self.answers, other.answers, strict=True))
        return same / len(self.answers)


def _continued(model: SmallGpt, texts: torch.Tensor, rounded: Rounded) -> Continued:
    """Continues each document with the KV of its beginning after a round trip."""
    losses, answers, errors = [], [], []
    for text in texts:
        kv = model.kv_of(text[:PREFIX_TOKENS]).to(torch.bfloat16)
        found = rounded(kv)
        difference, squares = (found.float() - kv.float()).square(), kv.float().square()
        errors.append((difference.mean(dim=(1, 3, 4)) / squares.mean(dim=(1, 3, 4))).sqrt())
        losses.append(model.loss_behind(found, text[PREFIX_TOKENS - 1 :]))
        answers.append(model.answer_behind(found, text[PREFIX_TOKENS - 1 : PREFIX_TOKENS + 1], ANSWER_TOKENS))
    mean = torch.stack(errors).mean(dim=0)
    return Continued(
        perplexity=float(np.exp(np.mean(losses))),
        answers=tuple(answers),
        errors=tuple((float(keys), float(values)) for keys, values in mean),
    )


def _add_speed(run: BenchmarkRun, model: SmallGpt, names: list[str]) -> None:
    """Encodes and decodes one chunk of many tokens, on one thread."""
    texts = documents(SPEED_TOKENS // PREFIX_TOKENS + 1, PREFIX_TOKENS, seed=3)
    kv = torch.cat([model.kv_of(text) for text in texts], dim=3)[..., :SPEED_TOKENS, :].to(torch.bfloat16)
    rounds = 5 if run.quick else 20
    for name in names:
        size_bytes, encode, decode = Rounded(name).acts(kv)
        source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
        seconds = timing.in_turns([encode, decode, partial(np.copyto, target, source)], rounds)
        encoded, decoded, copied = (size_bytes / 1e9 / min(each) for each in seconds)
        run.add(
            compare(f"{name}_encode", encoded, "GB/s", "memcpy", copied),
            compare(f"{name}_decode", decoded, "GB/s", "memcpy", copied),
        )


BENCHMARK = Benchmark(
    name="codecs",
    description="Measures bytes, speed and errors of codecs, and the answers of a small trained model.",
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
