"""`lmkv audit`: has engines compute again what the cache holds, of one prompt or of every hit of a node for a time."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.status import Status

from lmkv import rpc
from lmkv.errors import ConfigError, LmkvError, Unreachable
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.engine_service_pb2_grpc import EngineServiceStub
from lmkv_client.commands.calls import read_tokens_file
from lmkv_client.commands.output import Number, count, print_table
from lmkv_client.demo.bench import make_endpoint
from lmkv_client.demo.endpoint import Endpoint

MAX_REQUESTS = 4
"""Requests that have a prompt audited, or a suspect chunk confirmed, before the lookup of one is answered in time."""
COMPUTED: Mapping[str, object] = {"prompt_logprobs": 0}
"""With these parameters of a request vLLM reads nothing from its own prefix cache."""
SETTLE_SECONDS = 20.0
"""Longest wait for comparisons that have begun."""
POLL_SECONDS = 0.2
FIRST_SECONDS = 10.0
"""Longest wait for a node."""
OUTCOMES: Mapping[pb.AuditOutcome.ValueType, str] = {
    pb.AUDIT_OUTCOME_EQUAL: "equal",
    pb.AUDIT_OUTCOME_SUSPECT: "suspect",
    pb.AUDIT_OUTCOME_WRONG: "wrong",
}
"""Outcomes as metrics name them; any other is `void`."""
RESULT_COLUMNS = tuple(map(Number, ("AUDITED", "MATCHED", "SUSPECT", "WRONG")))
SKIPPED_COLUMNS = (Number("CHUNKS"), "NOT COMPARED, BECAUSE")
LAYER_COLUMNS = tuple(map(Number, ("PART", "LAYER", "MEAN ERROR", "LARGEST ERROR")))
REASONS = {
    "void": "they were evicted meanwhile",
    "behind": "a chunk before them was wrong, so they were dropped with it",
    "pending": "the pool had no room to compare them",
}
NOTHING = (
    "nothing was compared: send the prompt once, so that it is stored, or see which engines and models are not audited "
    "in docs/concepts/audit.md"
)


class Results:
    """The results of an audit so far."""

    def __init__(self) -> None:
        self.outcomes = Counter[str]()
        self.skipped: dict[str, int] = {}
        """Chunks that were not compared, by the reason."""
        self.layers: dict[tuple[int, int], tuple[float, float]] = {}
        """The largest errors, mean and most, by part and layer."""
        self.wrong_keys: list[str] = []
        self.records: list[str] = []
        """The node's records of wrong chunks."""

    @property
    def compared_count(self) -> int:
        """Comparisons that say something."""
        return sum(self.outcomes[outcome] for outcome in ("equal", "suspect", "wrong"))

    @property
    def exit_code(self) -> int:
        """1 if a chunk differs, 3 if nothing was compared, else 0."""
        if self.outcomes["suspect"] or self.outcomes["wrong"]:
            return 1
        return 0 if self.compared_count else 3

    def read(self, report: Mapping[str, Any]) -> None:
        """Takes an engine's report, which replaces an earlier one."""
        self.outcomes = Counter({str(name): int(number) for name, number in report["outcomes"].items()})
        self.outcomes["pending"] = int(report["pending_count"])
        self.skipped = {str(reason): int(number) for reason, number in report["skipped"].items()}
        self.layers = {(one["part"], one["layer"]): (one["mean"], one["most"]) for one in report["layers"]}
        self.wrong_keys = [str(key) for key in report["wrong_keys"]]

    def add(self, response: pb.AuditResponse) -> None:
        """Adds a comparison that a node reports."""
        audited, chunk = response.audited, response.audited.chunk
        outcome = OUTCOMES.get(audited.outcome, "void")
        self.outcomes[outcome] += 1
        if outcome == "wrong":
            self.wrong_keys.append(chunk.chunk_key.hex())
            self.records.append(response.record)
        for layer in chunk.layers if outcome != "void" else ():
            mean, most = self.layers.get((chunk.part, layer.layer), (0.0, 0.0))
            self.layers[chunk.part, layer.layer] = max(mean, layer.mean), max(most, layer.most)

    def line(self) -> str:
        """The counts as one line."""
        found = self.outcomes
        return f"{count(self.compared_count, 'comparison')}: {found['suspect']} suspect, {found['wrong']} wrong"

    def to_json(self) -> dict[str, Any]:
        """Other programs read these names."""
        return {
            "compared_count": self.compared_count,
            "outcomes": {name: number for name, number in sorted(self.outcomes.items()) if number},
            "skipped": self.skipped,
            "wrong_keys": self.wrong_keys,
            "records": self.records,
            "layers": [
                {"part": part, "layer": layer, "mean": mean, "most": most}
                for (part, layer), (mean, most) in sorted(self.layers.items())
            ],
        }

    def show(self, *, as_json: bool) -> None:
        """Prints the tables, or the numbers as JSON."""
        if as_json:
            print(json.dumps(self.to_json(), indent=2))
            return
        found = self.outcomes
        judged = (found[outcome] for outcome in ("equal", "suspect", "wrong"))
        print_table(RESULT_COLUMNS, [tuple(map(str, (self.compared_count, *judged)))])
        skipped = [(str(number), reason) for reason, number in self.skipped.items()]
        skipped += [(str(found[name]), reason) for name, reason in REASONS.items() if found[name]]
        if skipped:
            print_table(SKIPPED_COLUMNS, skipped)
        if self.layers:
            rows = [
                (str(part), str(layer), f"{mean:.2g}", f"{most:.2g}")
                for (part, layer), (mean, most) in sorted(self.layers.items())
            ]
            print_table(LAYER_COLUMNS, rows)
        for key in self.wrong_keys:
            print(f"wrong: chunk {key}, dropped at all instances; the log of the node has its record")
        if not self.compared_count:
            print(NOTHING)


def run(args: argparse.Namespace) -> int:
    """Audits, and prints the results: also what is known when it is interrupted. 1 if a chunk differs."""
    if bool(args.url) == bool(args.node):
        raise ConfigError("name an engine and a prompt (--url, --prompt), or a node (--node)")
    results = Results()
    try:
        with Console(stderr=True).status("") as status:
            if args.url:
                _audit_prompt(args, results, status)
            else:
                asyncio.run(_audit_node(args, _socket_of(args.node), results, status))
    except KeyboardInterrupt:
        results.show(as_json=args.json)
        raise
    results.show(as_json=args.json)
    return results.exit_code


# ---- a prompt


def _audit_prompt(args: argparse.Namespace, results: Results, status: Status) -> None:
    prompt: str | list[int]
    if args.tokens_file:
        prompt = read_tokens_file(args.tokens_file)
    elif args.file:
        try:
            prompt = sys.stdin.read() if args.file == "-" else Path(args.file).read_text()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--file: cannot read {args.file}: {error}") from None
    elif args.prompt:
        prompt = args.prompt
    else:
        raise ConfigError("name the prompt: --prompt, --file or --tokens-file")
    endpoint = make_endpoint(args.url, args.model)
    endpoint.model_name = endpoint.model_name or endpoint.models()[0]
    more = {"cache_salt": args.cache_salt} if args.cache_salt else {}
    PromptAudit(endpoint, prompt, more).run(results, status)


class PromptAudit:
    """The audit of one prompt: requests that an engine answers without what it has of the prompt."""

    def __init__(self, endpoint: Endpoint, prompt: str | list[int], more: Mapping[str, object]) -> None:
        """`more` are further parameters of the requests."""
        self._endpoint = endpoint
        self._prompt = prompt
        self._more = dict(more)
        self._params = {"kv_transfer_params": {"lmkv": {"audit": secrets.token_hex(8)}}}

    def run(self, results: Results, status: Status) -> None:
        """Audits the prompt, then once more if a chunk is suspect. Raises `LmkvError` if the engine does not."""
        status.update("the engine computes the prompt")
        for _ in range(MAX_REQUESTS):
            if self._ask(results, **COMPUTED):
                break
        self._settle(results, status)
        if suspects := results.outcomes["suspect"]:
            status.update(f"the engine computes the prompt again: {count(suspects, 'chunk')} differ")
            before = results.outcomes.total()
            for _ in range(MAX_REQUESTS):
                self._ask(results, **COMPUTED)
                if results.outcomes.total() > before:
                    self._settle(results, status)
                    results.outcomes["suspect"] = 0  # each was judged again, or is behind a wrong one
                    break

    def _settle(self, results: Results, status: Status) -> None:
        """Waits for the comparisons; each answer to a request says how they are."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while results.outcomes["pending"] and time.monotonic() < deadline:
            status.update(results.line())
            time.sleep(POLL_SECONDS)
            self._ask(results)

    def _ask(self, results: Results, **parameters: object) -> bool:
        """Sends the prompt; whether the node has answered in time what it holds of it."""
        answer = self._endpoint.answer(self._prompt, 1, **self._params, **self._more, **parameters)
        own = (answer.get("kv_transfer_params") or {}).get("lmkv")
        if own is None:
            raise LmkvError(f"{self._endpoint.name} is no engine with lmkv's connector: name the engine, not a proxy")
        if report := own.get("audit"):
            results.read(report)
        return report is not None


# ---- a node


def _socket_of(text: str) -> Path:
    path = Path(text.removeprefix("unix:"))
    return path / "engine.sock" if path.is_dir() else path


async def _audit_node(args: argparse.Namespace, path: Path, results: Results, status: Status) -> None:
    request = pb.AuditRequest(chunk_count=args.chunks)
    request.duration.FromNanoseconds(int(args.time * 1e9))
    channel = rpc.open_channel(f"unix:{path}")
    try:
        call: Any = EngineServiceStub(channel).Audit(request, timeout=args.time + FIRST_SECONDS)
        first = True
        while isinstance(response := await call.read(), pb.AuditResponse):
            if first and not response.engine_count:
                raise LmkvError(f"no engine is attached to the node at {path}")
            if not first:
                results.add(response)
                for record in results.records[-1:] if response.record else ():
                    print(record, file=sys.stderr)
            first = False
            status.update(f"{count(response.engine_count, 'engine')}, {results.line()}")
    except grpc.RpcError as error:
        found = rpc.from_rpc_error(error)
        if isinstance(found, Unreachable):
            raise Unreachable(f"no node answers at {path}; name its engine.sock, or its folder ({found})") from None
        raise found from None
    finally:
        await channel.close(None)
