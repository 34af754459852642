"""Flags that name chunks: token ids, a file with token ids, keys, or a prompt with its tokenizer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lmkv import tokenizer
from lmkv.errors import ConfigError
from lmkv.keys import KEY_BYTES, ChunkKey
from lmkv_client.chunks import Chunks


def add_chunk_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the flags that name chunks."""
    prompt = parser.add_mutually_exclusive_group(required=required)
    prompt.add_argument("--tokens", metavar="ID,ID,...", help="token ids of the prompt")
    prompt.add_argument(
        "--tokens-file", metavar="FILE", help="file with the token ids as a JSON list; -: standard input"
    )
    prompt.add_argument("--keys", metavar="HEX,HEX,...", help="keys of the prompt's chunks, 32 hex digits each")
    prompt.add_argument("--prompt", metavar="TEXT", help="text of the prompt; requires the model's folder")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model or LoRA adapter, by its served name; with --prompt the model's folder",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder with tokenizer.json, if --model is only a name")
    parser.add_argument("--cache-salt", metavar="SALT", default="", help="cache salt of the prompt")
    parser.add_argument("--lora", metavar="NAME", default="", help="LoRA adapter of the prompt, by name or name@digest")


def names_chunks(args: argparse.Namespace) -> bool:
    """Whether the flags name chunks."""
    return any(given is not None for given in (args.tokens, args.tokens_file, args.keys, args.prompt))


def read_chunks(args: argparse.Namespace) -> tuple[Sequence[int], Chunks]:
    """The tokens and other fields that name the chunks. Raises `ConfigError`."""
    keys = parse_keys(args.keys) if args.keys is not None else []
    tokens = _read_tokens(args) if names_chunks(args) and args.keys is None else []
    # A folder that only says which tokenizer to use need not be the name under which the model is served.
    only_folder = args.prompt is not None and not args.tokenizer
    model_name = "" if only_folder else args.model or ""
    return tokens, Chunks(keys=keys, model_name=model_name, cache_salt=args.cache_salt, lora_name=args.lora)


def _read_tokens(args: argparse.Namespace) -> Sequence[int]:
    if args.tokens is not None:
        return parse_tokens(args.tokens)
    if args.tokens_file is not None:
        return read_tokens_file(args.tokens_file)
    return tokenize(args.prompt, args.tokenizer or args.model)


def parse_tokens(text: str) -> list[int]:
    """Parses comma-separated token ids, with or without brackets. Raises `ConfigError`."""
    try:
        return [int(token) for token in text.strip().removeprefix("[").removesuffix("]").split(",")]
    except ValueError:
        raise ConfigError(f"--tokens must be token ids such as 128000,849,21435, not {text!r}") from None


def read_tokens_file(name: str) -> list[int]:
    """Reads a JSON list of token ids from a file or standard input. Raises `ConfigError`."""
    try:
        tokens = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text())
    except OSError as error:
        raise ConfigError(f"--tokens-file: cannot read {name}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--tokens-file: {name} is not JSON: {error}") from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ConfigError(f"--tokens-file: {name} must hold one JSON list of token ids, such as [128000, 849]")
    return tokens


def parse_keys(text: str) -> list[ChunkKey]:
    """Parses comma-separated chunk keys in hex. Raises `ConfigError`."""
    try:
        keys = [ChunkKey(bytes.fromhex(key)) for key in text.split(",")]
    except ValueError:
        raise ConfigError(f"--keys must be chunk keys in hex, not {text!r}") from None
    if any(len(key) != KEY_BYTES for key in keys):
        raise ConfigError(f"--keys must be chunk keys of {2 * KEY_BYTES} hex digits each, not {text!r}")
    return keys


def tokenize(prompt: str, folder: str | None) -> list[int]:
    """Tokenizes a prompt as vLLM does. Raises `ConfigError` if there is no tokenizer."""
    if folder is None:
        raise ConfigError("--prompt needs the model's folder: add --model FOLDER")
    try:
        return tokenizer.load(folder).encode(prompt)
    except ConfigError as error:
        raise ConfigError(f"--prompt: {error}; or give token ids with --tokens") from None
