"""Commands that start operations, wait for them and print their results: `lmkv move`, `copy`, `clear`, `drain`, `ops`.

Exit codes: 0 done, 1 rejected or failed, 3 partly done, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from google.longrunning.operations_pb2 import ListOperationsResponse

from lmkv.errors import ConfigError, LmkvError
from lmkv.tiers import format_position
from lmkv.units import format_bytes, format_duration
from lmkv.v1.cache_service_pb2 import ClearProgress, ClearResult, DrainProgress, DrainResult, MoveProgress, MoveResult
from lmkv.v1.chunk_pb2 import ChunkFailure
from lmkv_client import Coordinator, Operation
from lmkv_client.commands.calls import call, names_chunks, read_chunks
from lmkv_client.commands.output import Number, count, print_json, print_table
from lmkv_client.operation import RETRY_TIMEOUT_SECONDS, WAIT_SECONDS

DONE, FAILED, PARTLY_DONE = 0, 1, 3

AnyOperation = Operation[Any, Any]
Progress = MoveProgress | ClearProgress | DrainProgress


def move(args: argparse.Namespace) -> int:
    """Moves chunks: once they have arrived, the source drops them."""
    return _transfer(args, copy=False)


def copy(args: argparse.Namespace) -> int:
    """Copies chunks: the source keeps them."""
    return _transfer(args, copy=True)


def _transfer(args: argparse.Namespace, *, copy: bool) -> int:
    """Starts the operation, waits for it unless `--no-wait`, and prints it."""
    tokens, chunks = read_chunks(args)

    async def order(coordinator: Coordinator) -> AnyOperation:
        operation = await start(
            coordinator.move(tokens, source=args.source, destination=args.destination, copy=copy, **chunks)
        )
        if not args.no_wait:
            await wait_for(operation, args.timeout)
        return operation

    return show_operation(call(args, order), as_json=args.json)


def clear(args: argparse.Namespace) -> int:
    """Asks for confirmation unless the chunks are named; then starts the operation and waits for it.

    Raises `ConfigError` if it cannot ask.
    """
    if not (names_chunks(args) or args.model or args.all):
        raise ConfigError("nothing is selected: name a prompt with --tokens, a model with --model, or --all")
    if (args.weight_version or args.keep_weight_version) and (names_chunks(args) or not args.model):
        raise ConfigError("a version of the weights is of a model: add --model, and name no prompt")
    tokens, chunks = read_chunks(args)
    is_broad = args.all or not names_chunks(args)
    asks_first = is_broad and not (args.yes or args.dry_run)
    if asks_first and not sys.stdin.isatty():
        raise ConfigError(
            "this clears more than one prompt's chunks, and there is no terminal to ask on: add --yes to clear them, "
            "or --dry-run to count them"
        )

    async def order(coordinator: Coordinator) -> AnyOperation | None:
        request = partial(
            coordinator.clear,
            tokens,
            instance_id=args.instance,
            tier=args.tier,
            everything=args.all,
            weight_version=args.weight_version,
            kept_weight_version=args.keep_weight_version,
            **chunks,
        )
        if asks_first:
            would = await (await request(dry_run=True)).wait(args.timeout or WAIT_SECONDS)
            if not await asyncio.to_thread(_confirm, would):
                return None
        operation = await start(request(dry_run=args.dry_run))
        if not args.no_wait:
            await wait_for(operation, args.timeout)
        return operation

    operation = call(args, order)
    if operation is None:
        print("nothing was dropped", file=sys.stderr)
        return FAILED
    return show_operation(operation, as_json=args.json)


def _confirm(would: ClearResult) -> bool:
    question = f"drop {count(would.chunk_count, 'chunk')} ({count(would.token_count, 'token')})? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def drain(args: argparse.Namespace) -> int:
    """Starts the drain, waits for it unless `--no-wait`, and prints whether the instance may be stopped.

    Tries again while no coordinator responds: Kubernetes runs the hook of a pod that stops only once.
    """
    request_id = str(uuid.uuid4())  # the same for all attempts, which start one operation

    async def order(coordinator: Coordinator) -> AnyOperation:
        operation = await start(
            coordinator.drain(
                args.instance,
                destinations=args.destinations,
                evict=args.evict,
                deadline_seconds=args.timeout,
                request_id=request_id,
            )
        )
        if not args.no_wait:
            await wait_for(operation, WAIT_SECONDS)
        return operation

    operation = call(args, order, retry_seconds=min(RETRY_TIMEOUT_SECONDS, args.timeout))
    return show_operation(operation, as_json=args.json)


OPERATION_COLUMNS = ("OPERATION", "SUBJECT", "STATE", Number("PROGRESS"), Number("AGE"))


def ops(args: argparse.Namespace) -> int:
    """Runs the action. Raises `ConfigError` if the operation is missing or not allowed."""
    if args.action == "list":
        if args.operation:
            raise ConfigError(f"`lmkv ops list` takes no ID; `lmkv ops show {args.operation}` shows one")
        operations = call(args, lambda coordinator: coordinator.operations(running=args.running))
        return _print_operations(operations, as_json=args.json)
    if not args.operation:
        raise ConfigError(f"`lmkv ops {args.action}` needs the ID of an operation; `lmkv ops` lists them")

    async def act(coordinator: Coordinator) -> AnyOperation:
        operation = await coordinator.operation(args.operation)
        if args.action == "cancel":
            await operation.cancel()
        if args.action in ("wait", "cancel"):  # cancelling takes a moment
            await wait_for(operation, args.timeout)
        return operation

    operation = call(args, act)
    if args.action == "cancel" and operation.state == "cancelled" and not args.json:
        print(f"{operation.name}: {operation.error}")  # that is no failure now
        return DONE
    return show_operation(operation, as_json=args.json)


def _print_operations(operations: list[AnyOperation], *, as_json: bool) -> int:
    """Prints one line per operation; succeeds also without operations."""
    if as_json:
        print_json(ListOperationsResponse(operations=[operation.message for operation in operations]))
    elif operations:
        print_table(OPERATION_COLUMNS, [operation_row(operation) for operation in operations])
    else:
        print("there are no operations")
    return DONE


def operation_row(operation: AnyOperation) -> tuple[str, ...]:
    """The table operation_row of an operation."""
    age = age_seconds(operation)
    return (
        operation.name,
        describe_subject(operation.progress),
        operation.state,
        describe_progress(operation.progress),
        "-" if age is None else format_duration(max(age, 0.0)),
    )


async def start(request: Awaitable[AnyOperation]) -> AnyOperation:
    """Starts an operation. After an interrupt it is unknown whether the coordinator has started it."""
    try:
        return await request
    except asyncio.CancelledError:  # Ctrl-C
        print(
            "the coordinator has not responded yet; `lmkv ops` shows whether the operation was started", file=sys.stderr
        )
        raise


async def wait_for(operation: AnyOperation, timeout_seconds: float | None) -> None:
    """Waits until the operation completes, with a progress bar on a terminal. Raises `LmkvError` on timeout.

    Without a timeout, it is longer than the coordinator's deadline of any operation.
    """
    if timeout_seconds is None:
        timeout_seconds = WAIT_SECONDS
    try:
        with _progress_bar(operation) as show:
            async with asyncio.timeout(timeout_seconds):
                async for progress in operation:
                    show(progress)
    except TimeoutError:
        raise LmkvError(f"{operation.name} is still running after {timeout_seconds:g} s; {_hints(operation)}") from None
    except asyncio.CancelledError:  # Ctrl-C
        print(f"{operation.name} continues; {_hints(operation)}", file=sys.stderr)
        raise


def _hints(operation: AnyOperation) -> str:
    return f"`lmkv ops wait {operation.name}` waits for it, `lmkv ops cancel {operation.name}` cancels it"


def show_operation(operation: AnyOperation, *, as_json: bool) -> int:
    """Prints the state of the operation; returns the exit code."""
    if as_json:
        print_json(operation.message)
    elif _moved_nothing(operation):
        pass
    elif not operation.done:
        where = f" at coordinator {operation.progress.coordinator}" if operation.progress.coordinator else ""
        print(f"{operation.name}: {operation.state}{where}, {describe_progress(operation.progress)} done")
    elif operation.result is not None:
        for line in _describe_result(operation, operation.result):
            print(line)
    if operation.error:
        print(f"lmkv: error: {operation.name}: {operation.error}", file=sys.stderr)
        return FAILED
    if _moved_nothing(operation):
        progress, verb = operation.progress, "copied" if operation.kind == "copy" else "moved"
        where = format_position(progress.old_position) if progress.HasField("old_position") else "the source"
        print(
            f"lmkv: error: {operation.name}: nothing was {verb}, since {where} holds none of these chunks; "
            "`lmkv lookup` shows which instances hold a prompt",
            file=sys.stderr,
        )
        return FAILED
    return PARTLY_DONE if operation.result is not None and operation.result.failures else DONE


def _moved_nothing(operation: AnyOperation) -> bool:
    result = operation.result
    if not isinstance(result, MoveResult) or result.failures or operation.is_repeated:
        return False
    return result.chunk_count == result.arrived_before_chunk_count


def describe_progress(progress: Progress) -> str:
    """`12/20 chunks`, `1/3 instances`."""
    done, total, noun = _counts(progress)
    return f"{done:,}/{count(total, noun)}"


def describe_subject(progress: Progress) -> str:
    """Its subject: `lmkv-1/host to lmkv-2/host`, `lmkv-1`, `everywhere`; `-` if it is no longer known."""
    if not progress.HasField("create_time"):
        return "-"
    if isinstance(progress, DrainProgress):
        return progress.instance_id
    if isinstance(progress, MoveProgress):
        return f"{format_position(progress.old_position)} to {format_position(progress.new_position)}"
    where = [progress.instance_id or "everywhere"] + ([progress.tier] if progress.tier else [])
    return "/".join(where) + (", dry run" if progress.dry_run else "")


def age_seconds(operation: AnyOperation) -> float | None:
    """Time since its start; None if another coordinator started it."""
    progress: Progress = operation.progress
    return time.time() - progress.create_time.ToNanoseconds() / 1e9 if progress.HasField("create_time") else None


def _counts(progress: Progress) -> tuple[int, int, str]:
    if isinstance(progress, MoveProgress | DrainProgress):
        return progress.done_chunk_count, progress.chunk_count, "chunk"
    return progress.done_instance_count, progress.instance_count, "instance"


def _describe_result(operation: AnyOperation, result: MoveResult | ClearResult | DrainResult) -> Iterator[str]:
    chunks = f"{count(result.chunk_count, 'chunk')} ({count(result.token_count, 'token')})"
    if isinstance(result, DrainResult):
        yield f"{operation.name}: {chunks} copied, {format_bytes(result.transferred_bytes)} transferred"
        yield from _describe_drain(operation.progress.instance_id, result)
        return
    if isinstance(result, ClearResult):
        kept = f", {result.pinned_chunk_count:,} kept by pins" if result.pinned_chunk_count else ""
        yield f"{operation.name}: {chunks} {'would be ' if operation.progress.dry_run else ''}dropped{kept}"
        for instance in result.failures:
            yield from _describe_failures(instance.failures, f"on {instance.instance_id} ")
        return
    dropped = "" if operation.kind == "copy" else f"; the source dropped {result.dropped_chunk_count:,}"
    yield f"{operation.name}: {chunks} arrived, {format_bytes(result.transferred_bytes)} transferred{dropped}"
    yield from _describe_failures(result.failures)


def _describe_drain(instance_id: str, result: DrainResult) -> Iterator[str]:
    """Whether the instance may be stopped, and otherwise why not."""
    if result.remaining_chunk_count:
        verb = "is" if result.remaining_chunk_count == 1 else "are"
        chunks = count(result.remaining_chunk_count, "chunk")
        yield f"not safe to stop: {chunks} {verb} held by {instance_id} only"
    else:
        yield f"safe to stop: all chunks of {instance_id} are held elsewhere"
    for failure in result.failures:
        yield f"  {count(failure.chunk_count, 'chunk')}: {failure.status.message}"
    if result.pin_count:
        yield f"note: {count(result.pin_count, 'pin')} of {instance_id} will end with it"


def _describe_failures(failures: Sequence[ChunkFailure], where: str = "") -> Iterator[str]:
    for failure in failures:
        keys = failure.chunk_keys
        which = f"{count(len(keys), 'chunk')} from {keys[0].hex()} on" if keys else "everything"
        yield f"  failed {where}for {which}: {failure.status.message}"


@contextmanager
def _progress_bar(operation: AnyOperation) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on standard error; nothing if that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TextColumn("{task.fields[far]}"))
    with bars.Progress(*columns, bars.TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(operation.name, total=None, far="")

        def show(progress: Progress) -> None:
            done, total, _ = _counts(progress)
            bar.update(task, completed=done, total=total or None, far=describe_progress(progress))

        yield show
