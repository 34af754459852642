"""Waits for an operation, prints its result, and maps it to an exit code."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lmkv.errors import LmkvError
from lmkv.tiers import format_position
from lmkv.units import format_bytes
from lmkv.v1.cache_service_pb2 import (
    ClearProgress,
    ClearResult,
    DrainProgress,
    DrainResult,
    MoveProgress,
    MoveResult,
)
from lmkv.v1.chunk_pb2 import ChunkFailure
from lmkv_client import Operation
from lmkv_client.commands import DONE, FAILED, PARTLY_DONE, count, print_json, read_seconds
from lmkv_client.operation import WAIT_SECONDS

AnyOperation = Operation[Any, Any]
Progress = MoveProgress | ClearProgress | DrainProgress

EXIT_CODES = """\
exit codes:
  0  done                1  rejected or failed     2  bad usage or configuration
  3  done for some of the chunks only             130  interrupted; the operation continues"""


def add_waiting_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds whether and how long to wait for the operation."""
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the operation is started")
    add_timeout_argument(parser)


def add_timeout_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the deadline."""
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=read_seconds,
        default=WAIT_SECONDS,
        help="deadline, such as 30s, after which the operation continues (default: 15m)",
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


async def wait_for(operation: AnyOperation, timeout_seconds: float) -> None:
    """Waits until the operation completes, with a progress bar on a terminal. Raises `LmkvError` on timeout."""
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
