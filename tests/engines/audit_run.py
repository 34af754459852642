"""Audits many honest chunks of all architectures, in float32 and bfloat16, and counts what is suspect.

`make audits` runs it, for an hour or more. Prompts have 1 to 8,000 tokens behind prefixes that others share; they are
computed alone and in batches, in steps of several sizes, and audited as a whole or behind what is loaded of them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.engines.llm import Answers, LlmFleet, LlmProcess, Nursery, make_prompt
from tests.support.models import ARCHITECTURES, Architecture, make_architecture

DTYPES = ("float32", "bfloat16")
MAX_TOKENS = 8_000
STEP_TOKENS = (512, 2048, 8192)
"""Most tokens of a step; each engine has another one."""
OUTCOME = 'lmkv:audited_chunks_total{outcome="'
MAX_IDLE_ROUNDS = 8
"""Rounds without a comparison after which an engine is taken for one that does not audit: models with states."""


def outcomes(answers: Answers) -> Counter[str]:
    """Audited chunks by outcome."""
    grown: Mapping[str, float] = answers.grown
    counts = {key[len(OUTCOME) : -2]: int(count) for key, count in grown.items() if key.startswith(OUTCOME)}
    return Counter({outcome: count for outcome, count in counts.items() if count})


class Load:
    """Honest prompts of one engine."""

    def __init__(self, engine: LlmProcess, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._number = 0
        self.counts = Counter[str]()
        self.worst = {"mean": 0.0, "most": 0.0}
        """The largest errors of a layer in the chunks of audits by name."""

    def round(self) -> None:
        """Computes a few prompts, then audits them: as a whole, and as hits."""
        count = self._random.choice((1, 1, 2, 4))
        prompts = [self._prompt() for _ in range(count)]
        self.counts += outcomes(self._engine.ask(*prompts, max_tokens=1))
        for prompt in prompts:
            self._audit(prompt)
        self.counts += outcomes(self._engine.ask_again(*prompts, max_tokens=1))

    def _audit(self, prompt: list[int]) -> None:
        """Audits all of a prompt; the next request of the audit's name gets the errors."""
        self._number += 1
        named = {"kv_transfer_params": {"lmkv": {"audit": f"prompt {self._number}"}}}
        self.counts += outcomes(self._engine.ask_again(prompt, max_tokens=1, extra_args=named))
        (answer,) = self._engine.ask(prompt[:1], max_tokens=1, extra_args=named).answers
        audited = answer.transfer_params["lmkv"].get("audit", {"layers": []})
        for layer in audited["layers"]:
            self.worst = {error: max(value, layer[error]) for error, value in self.worst.items()}

    def _prompt(self) -> list[int]:
        length = max(1, min(MAX_TOKENS, round(MAX_TOKENS ** self._random.uniform(0.6, 1))))
        prefix = make_prompt(self._random.randrange(4), min(length, self._random.choice((0, 300, 1500))))
        return make_prompt(self._random.randrange(1 << 30), length, prefix=prefix)


def audit(nursery: Nursery, name: str, dtype: str, goal: int, deadline: float) -> Load:
    """Audits at least `goal` chunks of one architecture, unless it has no audits or the time is up."""
    kind: Architecture = ARCHITECTURES[name]
    number = (*ARCHITECTURES,).index(name) * len(DTYPES) + DTYPES.index(dtype)
    with tempfile.TemporaryDirectory(prefix="lmkv-audit-") as folder:
        model = make_architecture(Path(folder) / name, name)
        with LlmFleet(nursery, model, Path(folder)) as fleet:
            settings = {"audit_rate": "1", "chunk_size": str(kind.chunk_size), "max_local_cpu_size": "512MiB"}
            engine = fleet.add(
                "auditor",
                settings,
                dtype=dtype,
                max_model_len=MAX_TOKENS + 128,
                max_num_batched_tokens=STEP_TOKENS[number % len(STEP_TOKENS)],
                kv_cache_memory_bytes=512 << 20,
            )
            fleet.start()
            load, idle = Load(engine, number), 0
            while load.counts.total() < goal and time.monotonic() < deadline and idle < MAX_IDLE_ROUNDS:
                before = load.counts.total()
                load.round()
                idle = idle + 1 if load.counts.total() == before else 0
            if load.counts["suspect"] or load.counts["wrong"]:
                print(*(line for line in engine.log().splitlines() if "differs from" in line), sep="\n", flush=True)
            return load


def main(arguments: Sequence[str]) -> int:
    """Prints a line of JSON for each engine, and one for all; 1 if a chunk was suspect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=20_000, help="chunks to audit in all (20000)")
    parser.add_argument("--seconds", type=float, default=4 * 3600, help="time after which it ends (4 hours)")
    parser.add_argument("--only", choices=ARCHITECTURES, help="one architecture")
    options = parser.parse_args(arguments)
    names = [options.only] if options.only else [*ARCHITECTURES]
    engines = [(name, dtype) for name in names for dtype in DTYPES if ARCHITECTURES[name].dtype in ("float32", dtype)]
    deadline, total = time.monotonic() + options.seconds, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="lmkv-audit-") as logs, Nursery(Path(logs)) as nursery:
        for index, (name, dtype) in enumerate(engines):
            goal = max(1, (options.chunks - total.total()) // (len(engines) - index))
            began = time.monotonic()
            load = audit(nursery, name, dtype, goal, deadline)
            total += load.counts
            line = {"architecture": name, "dtype": dtype, "seconds": round(time.monotonic() - began), **load.counts}
            print(json.dumps(line | {f"largest_{error}": value for error, value in load.worst.items()}), flush=True)
            if time.monotonic() >= deadline:
                break
    print(json.dumps({"total": total.total(), **total}), flush=True)
    return 1 if total["suspect"] or total["wrong"] or not total["equal"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
