"""Parts of a module that are not mutated, since no test could notice it, or no test should."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Position = tuple[int, int]
"""Line, from 1, and column, from 0."""
Span = tuple[Position, Position]


def excluded_spans(source: str) -> list[Span]:
    """Where a module is not mutated.

    These are annotations, which are not evaluated; protocols, options of dataclasses, and imports for type checkers,
    which mypy checks; assertions, of which a weaker one fails as seldom as before, and `strict` of `zip`; functions
    that assert invariants for tests, whose docstrings begin with "Asserts"; and constants of numbers, which a test
    would repeat.
    """
    return [_span(node) for node in _excluded(ast.parse(source))]


def is_excluded(begin: Position, end: Position, spans: list[Span]) -> bool:
    """Whether a position is within one of the spans."""
    return any(first <= begin and end <= last for first, last in spans)


def _excluded(tree: ast.Module) -> Iterator[ast.AST]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _is_number(statement.value):
            yield statement.value
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign() | ast.arg():
                yield from filter(None, [node.annotation])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if (ast.get_docstring(node) or "").startswith("Asserts"):
                    yield node
                yield from filter(None, [node.returns])
            case ast.ClassDef(bases=[ast.Name(id="Protocol"), *_]):
                yield node
            case ast.ClassDef():
                yield from (one for one in node.decorator_list if "dataclass" in ast.unparse(one))
            case ast.keyword(arg="strict"):
                yield node
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assert():
                yield node


def _span(node: ast.AST) -> Span:
    assert isinstance(node, ast.expr | ast.keyword | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _is_number(value: ast.AST) -> bool:
    """Whether a value consists of numbers."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "float":
        return all(_is_number(argument) for argument in value.args)
    parts = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.operator, ast.unaryop, ast.expr_context)
    return all(isinstance(part, parts) for part in ast.walk(value))
