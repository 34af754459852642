"""Generated mutants: which parts of a module are left out, and that a mutant takes a module's place in forked runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.mutants.generated.cores import CORES
from tests.mutants.generated.mutation import Equivalent, GeneratedMutant, equivalents, file_of
from tests.mutants.generated.spans import Position, excluded_spans, is_excluded
from tests.mutants.mutant import ROOT

BATCHES = "lmkv_server.node.cache.host"
SOURCE = """\
LIMITS = -1, 1 << 20
RATE = float(64 << 21)
NAMES = ("one", size_of(22))

@dataclass(frozen=True)
class Value:
    size: int | None = 1

def call(value: A | B = 2, *rest: int | str) -> A | None:
    assert value < 3
    return zip(value | 4, rest, strict=True)

if TYPE_CHECKING:
    import five

class Like(Protocol):
    def size(self, most=10): ...

def check():
    "Asserts something."
    return 6 < 7

def check_room():
    "Raises `Full`."
    return 8 > 9
"""
RUNS = """
import json, sys
from tests.mutants.generated.mutation import GeneratedMutant
from tests.mutants.generated.runner import preload, run, run_all
tests, mutants = json.load(sys.stdin)
clean = run(tests, 100)
preload(clean.imported)
mutants = [GeneratedMutant(**one) for one in mutants]
results = {mutant.line: result.caught_by for mutant, result in run_all(mutants, tests, 100, 2)}
print(json.dumps([clean.caught_by, results[1], results[2], results[3]]))
"""


@pytest.mark.parametrize("module", CORES)
def test_each_core_and_its_tests_exist(module: str) -> None:
    assert file_of(module).is_file()
    assert CORES[module]
    assert [test for test in CORES[module] if not (ROOT / test).is_file()] == []


def test_a_module_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match=r"no module lmkv\.nothing"):
        file_of("lmkv.nothing")


@pytest.mark.parametrize(("change", "why"), list(equivalents().items()), ids=lambda value: getattr(value, "was", ""))
def test_each_equivalent_change_is_one_of_the_code_as_it_is(change: Equivalent, why: str) -> None:
    assert change.module in CORES
    assert why
    assert change.was != change.now
    source = " ".join(file_of(change.module).read_text(encoding="utf-8").split())
    assert change.was in source, "the code has changed; remove the entry, or adapt it"


@pytest.mark.parametrize(
    ("text", "is_left_out"),
    [
        ("frozen=True", True),
        ("int | None", True),
        ("1\n", False),
        ("A | B", True),
        ("2,", False),
        ("int | str", True),
        ("A | None", True),
        ("value < 3", True),
        ("value | 4", False),
        ("strict=True", True),
        ("1 << 20", True),
        ("64 << 21", True),
        ("22", False),
        ("6 < 7", True),
        ("10", True),
        ("8 > 9", False),
    ],
)
def test_what_no_test_can_or_should_notice_is_left_out(text: str, is_left_out: bool) -> None:
    before = SOURCE[: SOURCE.index(text)]
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n") - 1
    begin: Position = line, column
    end: Position = line, column + len(text.strip())
    assert is_excluded(begin, end, excluded_spans(SOURCE)) is is_left_out


def test_a_change_is_compared_without_white_space() -> None:
    source = file_of(BATCHES).read_text(encoding="utf-8")
    mutated = source.replace("batch_bytes += item.size_bytes", "batch_bytes  -= item.size_bytes")
    mutant = GeneratedMutant(module=BATCHES, operator="", line=1, source=mutated)
    was, now = "batch_bytes += item.size_bytes", "batch_bytes -= item.size_bytes"
    assert mutant.change() == Equivalent(module=BATCHES, was=was, now=now)
    assert f"-        {was}" in mutant.diff()


def test_a_mutant_takes_the_place_of_its_module_in_its_own_run_only() -> None:
    source = file_of(BATCHES).read_text(encoding="utf-8")
    sources = [source, source.replace("batch_bytes >= size_bytes", "batch_bytes < size_bytes"), "raise OSError"]
    mutants = [
        {"module": BATCHES, "operator": "", "line": number, "source": one} for number, one in enumerate(sources, 1)
    ]
    made = subprocess.run(
        [sys.executable, "-c", RUNS],
        cwd=ROOT,
        input=json.dumps([CORES[BATCHES], mutants]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    clean, same, changed, broken = json.loads(made.stdout)
    assert (clean, same) == ("", "")
    assert changed.startswith(f"{CORES[BATCHES][0]}::test_"), "whichever test runs first"
    assert broken == f"import of {CORES[BATCHES][0]}"
