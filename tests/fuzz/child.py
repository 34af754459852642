"""Runs one target under Atheris: `python -m tests.fuzz.child TARGET FOLDER SECONDS`. `__main__` starts it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

import atheris

from tests.fuzz.harness import MAX_INPUT_BYTES, OWN_PACKAGES, load_target


def functions_of(owner: Any) -> Iterator[FunctionType]:
    """The functions of a module or a class that are written there."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == getattr(owner, "__module__", owner.__name__):
            yield from functions_of(value)
        for part in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "__wrapped__"))):
            if isinstance(part, FunctionType) and part.__module__.partition(".")[0] in OWN_PACKAGES:
                yield part
        if isinstance(value, cached_property):
            yield value.func  # type: ignore[misc]


def instrument() -> int:
    """Instruments all functions of lmkv that are imported. Atheris's import hook does not see editable installs."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in OWN_PACKAGES]
    found = {id(function): function for module in modules for function in functions_of(module)}
    for function in found.values():
        atheris.instrument_func(function)
    return len(found)


def main(name: str, folder: Path, seconds: int) -> None:
    """Never returns: the fuzzer exits the process, with 0 if it found nothing."""
    target = load_target(name)
    print(f"{instrument()} functions are instrumented")
    corpus = folder / "corpus"
    for number, data in enumerate(target.corpus()):
        (corpus / f"committed-{number}").write_bytes(data)
    options = [
        str(corpus),
        f"-artifact_prefix={folder}/",
        f"-max_total_time={seconds}",
        f"-max_len={MAX_INPUT_BYTES}",
        "-timeout=30",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
