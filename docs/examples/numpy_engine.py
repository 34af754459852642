"""A toy transformer in NumPy that keeps its KV cache in lmkv: docs/guides/attach-your-own-engine.md explains it.

Usage: numpy_engine.py PROMPT [SOCKET]

SOCKET is the `engine.sock` of a running node. Without it the engine starts a node, which stays for `node_linger`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv_client.engine import Engine, Extent, Written

LAYERS, HEADS, HEAD_SIZE, VOCABULARY, MAX_TOKENS = 2, 4, 16, 256, 1024
WIDTH = HEADS * HEAD_SIZE
CHUNK = 16
"""Tokens in a chunk. Real engines have 256: a chunk costs a message and a copy."""
TIMEOUT = 5.0
"""Seconds that a request waits for lmkv. Real engines wait 0.1 s, and compute what they have not got by then."""

Array = NDArray[np.float32]


class Model:
    """Embeddings, two layers of causal attention with rotary positions and an MLP, and greedy decoding."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def weights(*shape: int) -> Array:
            return random.standard_normal(shape, np.float32) * np.float32(2 / math.sqrt(shape[-2]))

        self.embedding, self.head = weights(VOCABULARY, WIDTH), weights(WIDTH, VOCABULARY)
        self.qkv, self.out = weights(LAYERS, WIDTH, 3 * WIDTH), weights(LAYERS, WIDTH, WIDTH)
        self.up, self.down = weights(LAYERS, WIDTH, 4 * WIDTH), weights(LAYERS, 4 * WIDTH, WIDTH)
        parts = (self.embedding, self.head, self.qkv, self.out, self.up, self.down)
        self.identity = sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    def next_token(self, tokens: Sequence[int], start: int, kv: Array) -> int:
        """Computes `tokens[start:]`, whose keys and values it adds to `kv`, and returns the most probable next token.

        `kv` has the shape `[layer, head, key or value, token, head size]`; that of the tokens before `start` is there.
        """
        end = len(tokens)
        positions = np.arange(start, end)
        is_later = positions[:, None] < np.arange(end)
        x = self.embedding[list(tokens[start:])]
        for layer in range(LAYERS):
            heads = (normalized(x) @ self.qkv[layer]).reshape(-1, 3, HEADS, HEAD_SIZE).transpose(1, 2, 0, 3)
            kv[layer, :, 0, start:end] = rotated(heads[1], positions)
            kv[layer, :, 1, start:end] = heads[2]
            keys, values = kv[layer, :, 0, :end], kv[layer, :, 1, :end]
            scores = rotated(heads[0], positions) @ keys.transpose(0, 2, 1) / np.float32(HEAD_SIZE**0.5)
            scores[:, is_later] = -np.inf
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attended = (shares / shares.sum(axis=-1, keepdims=True)) @ values
            x = x + attended.transpose(1, 0, 2).reshape(-1, WIDTH) @ self.out[layer]
            x = x + np.maximum(normalized(x) @ self.up[layer], 0) @ self.down[layer]
        return int(np.argmax(normalized(x[-1]) @ self.head))


def normalized(x: Array) -> Array:
    """RMS norm."""
    scale: Array = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return x / scale


def rotated(x: Array, positions: NDArray[np.int64]) -> Array:
    """Rotary embedding of `[head, token, head size]`."""
    angles = positions[:, None] * 10_000.0 ** (-np.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)


def chunk_of(kv: Array, index: int) -> Array:
    """The tokens of a chunk in an engine's cache."""
    return kv[:, :, :, index * CHUNK : (index + 1) * CHUNK]


def array_of(extent: Extent) -> Array:
    """The bytes of a chunk in the node's pool, which is shared memory, with the axes of the cache."""
    return np.frombuffer(extent.view, np.float32).reshape(LAYERS, HEADS, 2, CHUNK, HEAD_SIZE)


def load(engine: Engine, keys: Sequence[ChunkKey], kv: Array) -> int:
    """Copies the chunks that lmkv has of a prompt into the cache; returns their tokens."""
    count = 0
    with engine.lookup(keys, timeout=TIMEOUT) as held:
        for extent in held.load(timeout=TIMEOUT):
            chunk_of(kv, count)[...] = array_of(extent)
            count += 1
    return count * CHUNK


def store(engine: Engine, keys: Sequence[ChunkKey], kv: Array) -> None:
    """Copies the chunks that the node has not got into its pool, as many as it has room for."""
    new = engine.missing(keys, timeout=TIMEOUT)
    first = len(keys) - len(new)
    extents = engine.reserve(len(new), timeout=TIMEOUT)
    for index, extent in enumerate(extents, first):
        array_of(extent)[...] = chunk_of(kv, index)
    engine.commit(Written.chain(new[: len(extents)], extents, parent=keys[first - 1] if first else b""))


def generate(model: Model, engine: Engine, prompt: Sequence[int], count: int) -> tuple[list[int], int]:
    """The `count` tokens that follow a prompt, and the number of the prompt's tokens that were loaded."""
    kv = np.zeros((LAYERS, HEADS, 2, MAX_TOKENS, HEAD_SIZE), np.float32)
    tokens = list(prompt)
    loaded = load(engine, engine.keys(tokens), kv)
    start = min(loaded, len(tokens) - 1)  # the last token is computed in any case: the next one follows from it
    for _ in range(count):
        tokens.append(model.next_token(tokens, start, kv))
        start = len(tokens) - 1
    store(engine, engine.keys(tokens[:-1]), kv)  # the cache has no KV of the last token
    return tokens[len(prompt) :], loaded


def main() -> None:
    prompt = sys.argv[1].encode()
    model = Model()
    spec = KvSpec(
        model_name="numpy-toy",
        model_id=model.identity,
        kv_dtype="float32",
        layer_count=LAYERS,
        kv_head_count=HEADS,
        head_size=HEAD_SIZE,
        chunk_size=CHUNK,
    )
    with Engine.attach(spec, config={"node_address": sys.argv[2]} if len(sys.argv) > 2 else None) as engine:
        answer, loaded = generate(model, engine, prompt, 20)
    print(f"loaded {loaded} of {len(prompt)} tokens")
    print("answer:", *answer)


if __name__ == "__main__":
    main()
