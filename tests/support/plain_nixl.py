"""Provides the package `nixl`, which vLLM's connector imports and some NIXL wheels do not contain."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def plain_nixl(folder: Path) -> Path:
    """Creates a folder for `PYTHONPATH` from which `nixl` can be imported."""
    if importlib.util.find_spec("nixl") is None:
        package = folder / "nixl-alias" / "nixl"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(
            "import importlib, sys\n"
            "for part in ('_bindings', '_api'):\n"
            "    sys.modules[f'nixl.{part}'] = importlib.import_module(f'nixl_cu12.{part}')\n"
        )
    return folder / "nixl-alias"
