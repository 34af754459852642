"""Recorded traces in the format of Mooncake: one JSON object per line and request, optionally compressed by gzip.

`input_length` is the number of tokens of the prompt, and `hash_ids` has one id for each block of it: equal ids mean
equal prompts up to the end of that block. `timestamp`, in milliseconds, and `output_length` may be missing. Answers are
part of the next turn's prompt.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from benchmarks.replay.traces import Request, Trace
from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey

TRACE_HELP = "a recorded trace: JSON lines with input_length and hash_ids, or a .gz of it"


def trace_name(file: Path) -> str:
    """A short name of a trace, which the names of its rows contain."""
    return re.sub(r"[^a-z0-9]+", "_", file.name.split(".")[0].lower())


def read_trace(file: Path) -> Trace:
    """The requests of a file. Raises `ConfigError` if it is no trace."""
    requests: list[Request] = []
    keys: dict[int, ChunkKey] = {}  # one object for each id: prompts of a session repeat theirs
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            for line in lines:
                record = json.loads(line)
                ids = [int(one) for one in record["hash_ids"]]
                prompt = tuple(keys.setdefault(one, ChunkKey(one.to_bytes(16, "big"))) for one in ids)
                requests.append(
                    Request(
                        keys=prompt,
                        token_count=int(record["input_length"]),
                        stored=prompt,
                        arrival_seconds=int(record.get("timestamp", 0)) / 1000,
                        answer_tokens=int(record.get("output_length", 0)),
                    )
                )
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ConfigError(f"--trace: {file} is no trace: {error!r}", key="trace") from None
    if not any(request.keys for request in requests):
        raise ConfigError(f"--trace: {file} has no blocks", key="trace")
    return Trace(requests=requests, chunk_tokens=_block_tokens(requests))


def _block_tokens(requests: list[Request]) -> int:
    """The smallest power of two that no prompt has more blocks of than tokens allow, the last one being partial."""
    tokens = 1
    while any(request.token_count > len(request.keys) * tokens + tokens for request in requests if request.keys):
        tokens *= 2
    return tokens
