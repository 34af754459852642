"""Fills a running LMCache controller and asks it; run by LMCache's own Python, for `benchmarks.control_plane`.

It speaks the controller's protocol as LMCache's workers do, and prints one JSON object.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec  # type: ignore[import-not-found, unused-ignore]
import zmq  # type: ignore[import-not-found, unused-ignore]
from lmcache.v1.cache_controller.message import (  # type: ignore[import-not-found, unused-ignore]
    BatchedKVOperationMsg,
    BatchedP2PLookupMsg,
    KVOpEvent,
    Msg,
    OpType,
    RegisterMsg,
)
from lmcache.v1.token_database import ChunkedTokenDatabase  # type: ignore[import-not-found, unused-ignore]

BATCH = 50
"""Operations in a message and messages in a frame, as LMCache's workers have it."""
PROMPT_CHUNKS = 40
HTTP_TOKENS = 131_072
CHUNK_SIZE = 256
FILL_SECONDS = 120.0
ANSWER_MILLISECONDS = 10_000


def main() -> None:
    """Registers instances, reports chunks, sends lookups, and prints the results."""
    parser = argparse.ArgumentParser()
    for name in ("pull", "reply", "http", "pid", "instances", "chunks", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    load = ControllerLoad(args)
    load.register(args.instances)
    before = load.resident_bytes()
    cpu_before = load.cpu_seconds()
    count = load.fill(args.instances, args.chunks)
    cpu_seconds = load.cpu_seconds() - cpu_before
    pairs = load.resident_bytes() - before
    lookups = load.time_lookups(args.rounds)
    print(
        json.dumps(
            {
                "report_ingest_per_s": count / cpu_seconds,
                "map_bytes_per_pair": pairs / count,
                "lookup_p50_ms": 1e3 * statistics.median(lookups),
                "lookup_p99_ms": 1e3 * sorted(lookups)[int(0.99 * len(lookups))],
                f"http_lookup_{HTTP_TOKENS}_ms": 1e3 * statistics.median(load.time_http(args.rounds // 10)),
            }
        )
    )


class ControllerLoad:
    """What workers of many instances would say to one controller."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._http_port = args.http
        self._pid = args.pid
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        context: Any = zmq.Context.instance()
        self._push = context.socket(zmq.PUSH)
        self._push.setsockopt(zmq.SNDHWM, 0)
        self._push.connect(f"tcp://127.0.0.1:{args.pull}")
        self._ask = context.socket(zmq.DEALER)
        self._ask.setsockopt(zmq.RCVTIMEO, ANSWER_MILLISECONDS)
        self._ask.connect(f"tcp://127.0.0.1:{args.reply}")
        chance = random.Random(1)
        self._chance = chance
        self._prompt = [chance.randrange(128_000) for _ in range(HTTP_TOKENS)]
        self._prompt_keys = [key for _, _, key in ChunkedTokenDatabase().process_tokens(self._prompt, make_key=False)]

    def resident_bytes(self) -> int:
        """Memory of the controller that is its own."""
        lines = Path(f"/proc/{self._pid}/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))

    def cpu_seconds(self) -> float:
        """Processor time of the controller."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def register(self, instance_count: int) -> None:
        """One worker per instance."""
        for index in range(instance_count):
            message = RegisterMsg(_name(index), 0, "127.0.0.1", 20_000 + index, f"127.0.0.1:{21_000 + index}")
            self._call(message)

    def fill(self, instance_count: int, chunk_count: int) -> int:
        """Admits chunks, those of the prompt among the first instance's; how many, once the controller has them all."""
        each = chunk_count // instance_count
        frame: list[bytes] = []
        for index in range(instance_count):
            keys = list(self._prompt_keys) if index == 0 else []
            keys += [self._chance.getrandbits(63) - (1 << 62) for _ in range(each - len(keys))]
            for start in range(0, each, BATCH):
                events = [
                    KVOpEvent(OpType.ADMIT, key, start + number)
                    for number, key in enumerate(keys[start : start + BATCH])
                ]
                frame.append(self._encode(BatchedKVOperationMsg(_name(index), 0, "LocalCPUBackend", events)))
                if len(frame) == BATCH:
                    self._push.send_multipart(frame)
                    frame = []
        if frame:
            self._push.send_multipart(frame)
        deadline = time.monotonic() + FILL_SECONDS
        while self._known() < each * instance_count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the controller knows {self._known()} of {each * instance_count} chunks")
            time.sleep(0.05)
        return each * instance_count

    def time_lookups(self, rounds: int) -> list[float]:
        """Seconds of lookups of one prompt by its keys, by another worker."""
        message = self._encode(
            BatchedP2PLookupMsg(hashes=self._prompt_keys[:PROMPT_CHUNKS], instance_id="x", worker_id=0)
        )
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            self._ask.send_multipart([b"", message])
            answer = self._ask.recv_multipart()[-1]
            seconds.append(time.perf_counter() - started)
        found = msgspec.msgpack.decode(answer, type=Msg).layout_info
        assert found[0][2] == PROMPT_CHUNKS, found
        return seconds

    def time_http(self, rounds: int) -> Iterator[float]:
        """Seconds of lookups of a long prompt by its tokens, over a connection that stays."""
        body = json.dumps({"tokens": self._prompt})
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=30)
        for number in range(rounds + 1):
            started = time.perf_counter()
            connection.request("POST", "/lookup", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            seconds = time.perf_counter() - started
            assert answer["layout_info"][_name(0)][1] == HTTP_TOKENS, answer
            if number:  # the first one warms up
                yield seconds

    def _known(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=30)
        connection.request("GET", "/controller/key-stats")
        count: int = json.loads(connection.getresponse().read())["total_key_count"]
        connection.close()
        return count

    def _call(self, message: Any) -> None:
        self._ask.send_multipart([b"", self._encode(message)])
        self._ask.recv_multipart()


def _name(index: int) -> str:
    return f"instance-{index}"


if __name__ == "__main__":
    main()
