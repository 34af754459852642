"""Small Llama models with random weights, generated for the engines of `lmkv demo`, the tests and the benchmarks.

They need no network and no weights of anyone. The scale of the weights makes every greedy token depend on the whole
prompt, so that one wrong byte of KV cache changes what the model says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BOS_TOKEN_ID = 0
EOS_TOKEN_ID = 1
FIRST_BYTE_TOKEN_ID = 2
"""Tokens 2 to 257 are the bytes of text, in order; larger ids are separate words."""
FIRST_WORD_TOKEN_ID = FIRST_BYTE_TOKEN_ID + 256

CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a Llama model. Raises `ValueError` if the vocabulary cannot hold every byte."""

    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    vocab_size: int
    context_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.vocab_size < FIRST_WORD_TOKEN_ID:
            raise ValueError(f"vocab_size must be at least {FIRST_WORD_TOKEN_ID}, not {self.vocab_size}")

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of KV cache that one token takes in all layers, with elements of this size."""
        return 2 * self.layer_count * self.kv_head_count * self.head_size * element_bytes


TINY = ModelShape(
    hidden_size=128,
    intermediate_size=256,
    layer_count=4,
    head_count=4,
    kv_head_count=2,
    head_size=64,
    vocab_size=512,
)
"""The fastest that still has several layers and KV heads: 2 KiB of KV cache a token in bfloat16."""

MID = ModelShape(
    hidden_size=512,
    intermediate_size=1024,
    layer_count=16,
    head_count=8,
    kv_head_count=8,
    head_size=64,
    vocab_size=512,
)
"""Heavy enough that a long prompt takes seconds on one core: 32 KiB of KV cache a token in bfloat16."""

LLAMA_VOCAB = ModelShape(
    hidden_size=64,
    intermediate_size=128,
    layer_count=4,
    head_count=4,
    kv_head_count=2,
    head_size=64,
    vocab_size=128256,
)
"""A model as small as `TINY` with the vocabulary size of Llama 3, so that token ids of its prompts are valid."""

SHAPES = {"tiny": TINY, "mid": MID, "llama_vocab": LLAMA_VOCAB}
"""The presets by name."""


Draw = Callable[[tuple[int, ...], float], bytes | memoryview]
"""Draws a tensor of these dimensions from a normal distribution with this standard deviation, as bfloat16."""


def make_model(folder: Path, shape: ModelShape = TINY, seed: int = 0, draw: Draw | None = None) -> Path:
    """Writes a model with its tokenizer into `folder`, which is made if missing, and returns `folder`.

    Equal arguments write equal bytes, whatever the machine; another seed gives another model of the same shape.
    Weights are bfloat16. Overwrites an incomplete folder; keeps a complete folder with the same arguments.

    `draw` replaces NumPy's generator, which takes minutes for billions of weights; `seed` is then only a name.
    """
    config = _config(shape, seed)
    config_file = folder / "config.json"
    if config_file.exists() and json.loads(config_file.read_text()) == config:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config_file.unlink(missing_ok=True)
    _write_weights(folder / "model.safetensors", shape, draw or _numpy_draw(seed))
    write_tokenizer(folder, shape.vocab_size, shape.context_tokens)
    config_file.write_text(json.dumps(config, indent=2) + "\n")  # last: marks the folder as complete
    return folder


def _config(shape: ModelShape, seed: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layer_count,
        "num_attention_heads": shape.head_count,
        "num_key_value_heads": shape.kv_head_count,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "dtype": "bfloat16",
        "lmkv_demo_seed": seed,
    }


def _parameters(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """Name, dimensions and standard deviation of each tensor; None for a tensor of ones."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key_value = shape.head_count * shape.head_size, shape.kv_head_count * shape.head_size
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden), 1.0
    for layer in range(shape.layer_count):
        prefix = f"model.layers.{layer}"
        # Sharper queries and keys than usual: attention picks single tokens out of a long prompt.
        # Larger values: what it picks weighs more than the token at hand.
        yield f"{prefix}.self_attn.q_proj.weight", (query, hidden), 2.0 * hidden**-0.5
        yield f"{prefix}.self_attn.k_proj.weight", (key_value, hidden), 2.0 * hidden**-0.5
        yield f"{prefix}.self_attn.v_proj.weight", (key_value, hidden), 2.0 * hidden**-0.5
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, query), query**-0.5
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden), hidden**-0.5
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden), hidden**-0.5
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner), inner**-0.5
        yield f"{prefix}.input_layernorm.weight", (hidden,), None
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), None
    yield "model.norm.weight", (hidden,), None
    # Wide logits: the two best tokens seldom tie, so greedy completions are the same however a prompt is split.
    yield "lm_head.weight", (shape.vocab_size, hidden), 4.0 * hidden**-0.5


def _write_weights(file: Path, shape: ModelShape, draw: Draw) -> None:
    """Writes the safetensors format: length of the header, header in JSON, tensors in its order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dimensions, _ in _parameters(shape):
        end = offset + 2 * math.prod(dimensions)
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors must be aligned
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, dimensions, deviation in _parameters(shape):
            if deviation is None:
                out.write(_to_bfloat16(np.ones(dimensions, dtype=np.float32)).tobytes())
            else:
                out.write(draw(dimensions, deviation))


def _numpy_draw(seed: int) -> Draw:
    random = np.random.default_rng(seed)

    def draw(dimensions: tuple[int, ...], deviation: float) -> bytes:
        values = random.standard_normal(dimensions, dtype=np.float32) * np.float32(deviation)
        return _to_bfloat16(values).tobytes()

    return draw


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper half of each float32, which is what bfloat16 is; NumPy has no such type."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_tokenizer(folder: Path, vocab_size: int, context_tokens: int) -> None:
    """Writes a tokenizer with one token per byte, and a distinct text for every token id.

    The text of a token above the bytes, `<300>`, is that token again when it is encoded.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<bos>": BOS_TOKEN_ID, "<eos>": EOS_TOKEN_ID}
    vocabulary |= {letter: FIRST_BYTE_TOKEN_ID + byte for byte, letter in enumerate(_byte_letters())}
    vocabulary |= {f"<{token_id}>": token_id for token_id in range(FIRST_WORD_TOKEN_ID, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"<\d+>"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_letters() -> list[str]:
    """The character for each byte in byte-level tokenizers: printable ones unchanged, others shifted."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
