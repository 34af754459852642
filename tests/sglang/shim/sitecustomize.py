"""Shim for CPUs, imported by every Python process whose PYTHONPATH has this folder.

PyPI's torchvision is a CUDA build. Beside torch for CPUs its compiled part does not load, and then two operators are
unknown that it registers implementations of; this declares them.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is first imported."""

    library: Any = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Finds nothing; other finders do."""
        if name == "torchvision" and TorchvisionOperators.library is None:
            import torch

            library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            TorchvisionOperators.library = library
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, TorchvisionOperators())
