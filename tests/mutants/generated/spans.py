"""Parts of a module that are not mutated, since no test could notice it, or no test should."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Position = tuple[int, int]
"""Line, from 1, and column, from 0."""
Span = tuple[Position, Position]


def excluded_spans(source: str) -> list[Span]:
    """Where a module is not mutated.

    These are annotations, which are not evaluated; options of dataclasses and imports for type checkers, which mypy
    checks; assertions, of which a weaker one fails as seldom as before; and functions that assert invariants for tests:
    their docstrings begin with "Asserts".
    """
    return [_span(node) for node in _excluded(ast.parse(source))]


def is_excluded(begin: Position, end: Position, spans: list[Span]) -> bool:
    """Whether a position is within one of the spans."""
    return any(first <= begin and end <= last for first, last in spans)


def _excluded(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign() | ast.arg():
                yield from filter(None, [node.annotation])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if (ast.get_docstring(node) or "").startswith("Asserts"):
                    yield node
                yield from filter(None, [node.returns])
            case ast.ClassDef():
                yield from (one for one in node.decorator_list if "dataclass" in ast.unparse(one))
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assert():
                yield node


def _span(node: ast.AST) -> Span:
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
