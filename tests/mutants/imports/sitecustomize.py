"""On the path of mutated copies: removes the editable installation, which would precede PYTHONPATH, from imports."""

from __future__ import annotations

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
