"""Nothing that comes in is unpickled, evaluated or run: no code of ours could."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
"""Modules that make objects of bytes, whatever these say."""
RUNS = {"eval", "exec", "compile", "__import__"}
"""Built-in functions that run text."""
LOADS = {"torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
"""Functions that may make any object of a file."""
SAFE = {("lmkv/config/sources.py", "yaml.load")}
"""The loader there is derived from YAML's safe one."""


def test_nothing_is_unpickled_or_evaluated(root: Path) -> None:
    found = {
        (str(file.relative_to(root)), what)
        for folder in ("lmkv", "kernels", "client/lmkv_client", "server")
        for file in (root / folder).rglob("*.py")
        for what in dangers(file.read_text())
    }
    assert found == SAFE


def dangers(source: str) -> Iterator[str]:
    """What a module uses that it must not."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in PICKLES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in RUNS:
                yield name
            case ast.Call(func=ast.Attribute() as function) if ast.unparse(function) in LOADS:
                yield ast.unparse(function)
            case ast.keyword(arg="shell" | "allow_pickle" | "trust_remote_code", value=ast.Constant(value=True)):
                yield f"{node.arg}=True"


def test_each_danger_is_seen() -> None:
    source = (
        "import pickle\nfrom marshal import loads\neval(x)\ntorch.load(x)\nrun(x, shell=True)\n"
        "import pickletools\ncursor.exec(x)\nrun(x, shell=False)\nre.compile(x)\n"
    )
    assert sorted(dangers(source)) == ["eval", "marshal", "pickle", "shell=True", "torch.load"]
