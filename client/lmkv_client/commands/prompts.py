"""Commands about the chunks of a prompt: `lmkv lookup`, `explain`, `hint`, `pin`, `pins` and `unpin`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from lmkv import rpc
from lmkv.config import ClientConfig, load
from lmkv.errors import ConfigError, LmkvError
from lmkv.hints import HintOutcome
from lmkv.misses import ADVICE, MissReason, reason_from_proto, reason_name
from lmkv.rpc.messages import OUTCOMES_BY_NUMBER, REASONS_BY_NUMBER
from lmkv.tiers import format_position
from lmkv.units import format_duration
from lmkv.v1.cache_service_pb2 import (
    ExplainResponse,
    HintResponse,
    InstanceExplanation,
    ListPinsResponse,
    LookupResponse,
    PinResponse,
    UnpinResponse,
)
from lmkv.v1.chunk_pb2 import PinnedChunks, PromptSpan, RequestReport
from lmkv_client import Coordinator
from lmkv_client.commands.calls import call, names_chunks, read_chunks
from lmkv_client.commands.engines import ProxyClient
from lmkv_client.commands.output import Number, count, print_json, print_table, seconds_until, to_json

HOLDER_COLUMNS = ("INSTANCE", "TIER", Number("TOKENS"), Number("CHUNKS"))


def look_up(args: argparse.Namespace) -> int:
    """Prints the holders; succeeds also on a miss."""
    tokens, chunks = read_chunks(args)

    async def ask(coordinator: Coordinator) -> tuple[LookupResponse, bool]:
        """The response, and whether any engine has registered."""
        response = await coordinator.lookup(tokens, **chunks)
        if response.is_complete and not (response.holders or args.json):
            with suppress(LmkvError):  # a token may be good for lookups only
                return response, any(instance.specs for instance in await coordinator.instances())
        return response, True

    response, has_engines = call(args, ask)
    if args.json:
        print_json(response)
    elif not has_engines:
        print("no instance holds any of it: no engine has registered yet (`lmkv instances` lists the fleet)")
    else:
        print_holders(response)
    return 0


def holder_rows(response: LookupResponse) -> list[tuple[str, ...]]:
    """The table holder_rows: one per run of chunks in one tier of one instance."""
    return [
        (holder.instance_id, run.tier, str(run.token_count), str(run.chunk_count))
        for holder in response.holders
        for run in holder.runs
    ]


def print_holders(response: LookupResponse) -> None:
    """Prints one line per run of chunks in one tier of one instance."""
    if held := holder_rows(response):
        print_table(HOLDER_COLUMNS, held)
    else:
        print("no instance holds any of it")
    if not response.is_complete:
        print("instances are still reporting what they hold: ask again for the whole answer")


PROMPT_COLUMNS = ("INSTANCE", Number("TOKENS"), "HELD IN", "MISSING", "SINCE", "WHAT TO CHANGE")


REQUEST_COLUMNS = ("REQUEST", "INSTANCE", Number("TOKENS"), "LOADED FROM", "COMPUTED", "SINCE", "WHAT TO CHANGE")


UNKNOWN_REQUEST = (
    "no instance knows this request: check the id against the `id` of the answer; a node keeps the last 1,000 "
    "requests; for an older one, name its prompt by --tokens-file or --prompt"
)


UNKNOWN_PROMPT = "no instance knows this prompt's model: check --model against `lmkv instances`"


def explain(args: argparse.Namespace) -> int:
    """Prints the spans; 1 if no instance knows the request, or the prompt's model."""
    if names_chunks(args) == bool(args.request):
        raise ConfigError("name a prompt (--tokens, --tokens-file, --keys, --prompt), or a request (--request)")
    if args.proxy and args.request:
        raise ConfigError("--proxy is for prompts: name one by --tokens, --tokens-file, --keys or --prompt")
    tokens, chunks = read_chunks(args)
    response = call(
        args,
        lambda coordinator: coordinator.explain(
            tokens, instance_id=args.instance, engine_request_id=args.request, **chunks
        ),
    )
    route = {}
    if args.proxy:
        route = _route(args, len(tokens), call(args, lambda coordinator: coordinator.lookup(tokens, **chunks)))
    if args.json and route:
        print(json.dumps({**to_json(response), "route": route}, indent=2))
    elif args.json:
        print_json(response)
    else:
        print_explanations(response, time.time())
        print_route(route, time.time())
    if any(spans_of(one) or one.HasField("error") for one in response.explanations):
        return 0
    print(f"lmkv: error: {UNKNOWN_REQUEST if args.request else UNKNOWN_PROMPT}", file=sys.stderr)
    return 1


def _route(args: argparse.Namespace, token_count: int, found: LookupResponse) -> dict[str, Any]:
    """Asks a proxy or picker for the cost of the prompt at each engine, and for its last copies."""
    held = {holder.instance_id: holder.matched_token_count for holder in found.holders}
    body = {"token_count": token_count or max(held.values(), default=0), "held": held}
    proxy = ProxyClient(args.proxy, load(ClientConfig, file=args.config, flags={}).credentials)
    return proxy.answer("POST", "/engines/explain", body)


ROUTE_COLUMNS = ("ENGINE", "INSTANCE", *map(Number, ("HELD", "WAIT", "PROMPT", "MEMORY", "COST")), "CHOSEN")
COPY_COLUMNS = ("COPIED TO", "FROM", Number("TOKENS"), Number("WAITED"), "OUTCOME", Number("AGE"))


def print_route(route: Mapping[str, Any], now: float) -> None:
    """Prints what the prompt would cost at each engine, and the last copies of any prompts."""
    if engines := route.get("engines", []):
        print_table(ROUTE_COLUMNS, [route_row(engine) for engine in engines])
        if not any(engine["tokens_per_second"] for engine in engines):
            print("no engine has reported its rate yet: a second stands for one token")
    if copies := route.get("copies", []):
        print_table(COPY_COLUMNS, [copy_row(copy, now) for copy in copies])


def route_row(engine: Mapping[str, Any]) -> tuple[str, ...]:
    """The row of an engine."""
    seconds = [engine[f"{part}_seconds"] for part in ("wait", "prompt", "memory")]
    costs = (f"{one:,.2f} s" for one in (*seconds, sum(seconds)))
    held, chosen = str(engine["held_token_count"]), "yes" if engine["is_chosen"] else ""
    return (engine["url"], engine["instance_id"], held, *costs, chosen)


def copy_row(copy: Mapping[str, Any], now: float) -> tuple[str, ...]:
    """The row of a copy, which a router has asked for since requests waited."""
    age_seconds = max(0.0, now - copy["time"])
    waited = f"{copy['waited_seconds']:,.2f} s"
    return (
        copy["instance_id"],
        copy["source"],
        str(copy["token_count"]),
        waited,
        copy["outcome"],
        format_duration(age_seconds),
    )


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


UNDONE_HINTS = (HintOutcome.REJECTED, HintOutcome.MISSING)
"""Outcomes of hints that did nothing."""


def hint(args: argparse.Namespace) -> int:
    """Sends the hint and prints its outcome; 1 if nothing was done."""
    tokens, chunks = read_chunks(args)
    response = call(
        args,
        lambda coordinator: coordinator.hint(
            args.action, tokens, instance=args.at, ttl_seconds=args.ttl, priority=args.priority, **chunks
        ),
        instance_flag="--at",
    )
    if args.json:
        print_json(response)
    else:
        print(describe_hint(args.action, args.at, response))
    outcome = OUTCOMES_BY_NUMBER.get(response.result.outcome, HintOutcome.REJECTED)
    return 1 if outcome in UNDONE_HINTS else 0


def describe_hint(action: str, instance_id: str, response: HintResponse) -> str:
    """The line that is printed."""
    result = response.result
    outcome = OUTCOMES_BY_NUMBER.get(result.outcome, HintOutcome.REJECTED)
    text = f"{action} on {instance_id}: {outcome}, {count(result.chunk_count, 'chunk')}"
    if result.ttl.ToNanoseconds():
        text += f" for {format_duration(result.ttl.ToNanoseconds() / 1e9)}"
    if response.pin_id:
        text += f", pin {response.pin_id}"
    if result.reason:
        text += f"; {REASONS_BY_NUMBER.get(result.reason, result.reason)}: {result.detail}"
    return text


PIN_COLUMNS = ("PIN", "POSITION", Number("CHUNKS"), Number("TOKENS"), Number("ENDS IN"))


def pin(args: argparse.Namespace) -> int:
    """Pins the chunks, and prints those that are held and pinned."""
    tokens, chunks = read_chunks(args)
    pin = call(args, lambda coordinator: coordinator.pin(tokens, position=args.at, ttl_seconds=args.ttl, **chunks))
    if args.json:
        print_json(PinResponse(pin=pin))
    else:
        kept = f"{count(pin.chunk_count, 'chunk')} ({count(pin.token_count, 'token')})"
        print(f"{pin.pin_id}: {kept} on {format_position(pin.position)} for {_rest(pin)}")
    return 0


def pins(args: argparse.Namespace) -> int:
    """Lists the pins; succeeds also without pins."""
    pins = call(args, lambda coordinator: coordinator.pins())
    if args.json:
        print_json(ListPinsResponse(pins=pins))
    elif pins:
        print_table(PIN_COLUMNS, pin_rows(pins))
    else:
        print("nothing is pinned")
    return 0


def pin_rows(pins: Iterable[PinnedChunks]) -> list[tuple[str, ...]]:
    """The table pin_rows: one per pin."""
    return [
        (pin.pin_id, format_position(pin.position), str(pin.chunk_count), str(pin.token_count), _rest(pin))
        for pin in pins
    ]


def unpin(args: argparse.Namespace) -> int:
    """Releases the pin; succeeds too if it has ended, and fails if it never existed."""
    call(args, lambda coordinator: coordinator.unpin(args.pin_id))
    if args.json:
        print_json(UnpinResponse())
    else:
        print(f"{args.pin_id}: ended")
    return 0


def _rest(pin: PinnedChunks) -> str:
    return format_duration(max(seconds_until(pin.expire_time), 0.0))
