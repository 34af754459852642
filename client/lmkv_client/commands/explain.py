"""`lmkv explain`: where the parts of a prompt are, why others are missing, and what to change."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from lmkv import rpc
from lmkv.cli import Command
from lmkv.errors import ConfigError
from lmkv.misses import ADVICE, MissReason, reason_from_proto, reason_name
from lmkv.units import format_duration
from lmkv.v1.cache_service_pb2 import ExplainResponse, InstanceExplanation
from lmkv.v1.chunk_pb2 import PromptSpan, RequestReport
from lmkv_client.commands import add_common_arguments, call, print_json
from lmkv_client.commands.chunks import add_chunk_arguments, names_chunks, read_chunks
from lmkv_client.commands.tables import Number, print_table

EXAMPLES = """\
  lmkv explain --tokens-file prompt.json
  lmkv explain --prompt "Explain the significance of KV cache." --model /models/llama --instance lmkv-1
  lmkv explain --request cmpl-4f1c                 a request by the id in its answer, as its engine reports it"""

PROMPT_COLUMNS = ("INSTANCE", Number("TOKENS"), "HELD IN", "MISSING", "SINCE", "WHAT TO CHANGE")
UNKNOWN_REQUEST = (
    "no instance knows this request: check the id against the `id` of the answer; a node keeps the last 1,000 "
    "requests; for an older one, name its prompt by --tokens-file or --prompt"
)
UNKNOWN_PROMPT = "no instance knows this prompt's model: check --model against `lmkv instances`"
REQUEST_COLUMNS = ("REQUEST", "INSTANCE", Number("TOKENS"), "LOADED FROM", "COMPUTED", "SINCE", "WHAT TO CHANGE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv explain`."""
    parser.add_argument("--request", metavar="ID", default="", help="an engine's id of a request, or a part of it")
    parser.add_argument("--instance", metavar="INSTANCE", default="", help="ask this instance only")
    add_chunk_arguments(parser, required=False)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the spans; 1 if no instance knows the request, or the prompt's model."""
    if names_chunks(args) == bool(args.request):
        raise ConfigError("name a prompt (--tokens, --tokens-file, --keys, --prompt), or a request (--request)")
    tokens, chunks = read_chunks(args)
    response = call(
        args,
        lambda coordinator: coordinator.explain(
            tokens, instance_id=args.instance, engine_request_id=args.request, **chunks
        ),
    )
    if args.json:
        print_json(response)
    else:
        print_explanations(response, time.time())
    if any(spans_of(one) or one.HasField("error") for one in response.explanations):
        return 0
    print(f"lmkv: error: {UNKNOWN_REQUEST if args.request else UNKNOWN_PROMPT}", file=sys.stderr)
    return 1


def print_explanations(response: ExplainResponse, now: float) -> None:
    """Prints a line per span, then the instances that have not answered."""
    if requests := list(request_rows(response, now)):
        print_table(REQUEST_COLUMNS, requests)
    elif prompts := list(prompt_rows(response, now)):
        print_table(PROMPT_COLUMNS, prompts)
    for one in response.explanations:
        if one.HasField("error"):
            print(f"{one.instance_id}: {rpc.from_status(one.error)}")


def spans_of(one: InstanceExplanation) -> Sequence[PromptSpan]:
    """The spans of a prompt, or of all requests."""
    return [*one.explanation.spans, *(span for report in one.explanation.requests for span in report.spans)]


def prompt_rows(response: ExplainResponse, now: float) -> Iterator[tuple[str, ...]]:
    """The spans of a prompt, by instance."""
    for one in response.explanations:
        start = f"start of the node, {age(one.explanation.start_time, now)}"
        for tokens, tier, why, since, advice in span_rows(one.explanation.spans, now):
            yield one.instance_id, tokens, tier, why, start if why == MissReason.NEVER_STORED else since, advice


def request_rows(response: ExplainResponse, now: float) -> Iterator[tuple[str, ...]]:
    """The spans of requests, the latest request first."""

    def time_of(found: tuple[InstanceExplanation, RequestReport]) -> int:
        return found[1].create_time.ToMilliseconds()

    reports = [(one, report) for one in response.explanations for report in one.explanation.requests]
    for one, report in sorted(reports, key=time_of, reverse=True):
        yield from ((report.engine_request_id, one.instance_id, *cells) for cells in span_rows(report.spans, now))


def span_rows(spans: Sequence[PromptSpan], now: float) -> Iterator[tuple[str, str, str, str, str]]:
    """Tokens, tier, reason, time and advice of each span."""
    position = 0
    for span in spans:
        begin, position = position, position + span.token_count
        tokens = f"{begin}-{max(begin, position - 1)}"
        if not span.reason:
            yield tokens, span.tier, "", "", ""
            continue
        reason = reason_from_proto(span.reason)
        why = reason_name(span.reason) + (f" ({span.tier})" if span.tier else "")
        since = age(span.remove_time, now) if span.HasField("remove_time") else ""
        yield tokens, "", why, since, ADVICE[reason] if reason else ""


def age(time: Timestamp, now: float) -> str:
    """The time since then, in words."""
    return f"{format_duration(max(0.0, now - time.ToNanoseconds() / 1e9))} ago"


command = Command(
    name="explain",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
