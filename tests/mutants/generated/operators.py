"""Mutates one module with operators of Cosmic Ray; writes the mutants to standard output as JSON.

Runs in the environment of the dependency group `mutation`. `modules.py` starts it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from tests.mutants.generated.spans import Position, excluded_spans, is_excluded

BINARY = (
    *("Add_Sub", "Sub_Add", "Mul_FloorDiv", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
    *("LShift_RShift", "RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd"),
)
COMPARISONS = (
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
    *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
)
OPERATORS = (
    *(f"ReplaceBinaryOperator_{name}" for name in BINARY),
    *(f"ReplaceComparisonOperator_{name}" for name in COMPARISONS),
    *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub", "Invert")),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("ExceptionReplacer", "NumberReplacer", "RemoveDecorator"),
)
"""Of each operator of Python one or two replacements, its boundary and its contrary: all 200 of Cosmic Ray would mostly
make mutants that any call notices."""


def main() -> None:
    """Prints the number of all mutants, and a sample of them in the order of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--sample", type=int, required=True, help="0: all")
    parser.add_argument("--seed", required=True)
    arguments = parser.parse_args()
    source = arguments.file.read_text(encoding="utf-8")
    places = list(_places(source))
    count = len(places)
    if 0 < arguments.sample < count:
        places = random.Random(arguments.seed).sample(places, arguments.sample)
    mutants = [
        {"operator": name, "line": begin[0], "source": mutate_code(source, get_operator(f"core/{name}")(), occurrence)}
        for begin, name, occurrence in sorted(places)
    ]
    print(json.dumps({"count": count, "mutants": mutants}))


def _places(source: str) -> Iterator[tuple[Position, str, int]]:
    """Where each operator changes the module: position, operator, and the number of its change from 0."""
    excluded = excluded_spans(source)
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        positions = [one for node in nodes for one in operator.mutation_positions(node)]
        for occurrence, (begin, end) in enumerate(positions):
            line = lines[end[0] - 1]
            is_marker = "Binary" in name and line[end[1] :].startswith(",")  # a bare `*` or `/` between parameters
            is_dotted = name == "ExceptionReplacer" and "." in line[begin[1] : end[1]]  # Cosmic Ray replaces names only
            if not is_excluded(begin, end, excluded) and not is_marker and not is_dotted:
                yield begin, name, occurrence


if __name__ == "__main__":
    main()
