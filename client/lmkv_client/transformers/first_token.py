"""When a call of `generate` has its first token: until then it computes the prompt."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import StoppingCriteria


class FirstToken(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """A criterion that stops nothing and measures the time from when it was made to the first token."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """0 before the first token."""
        self._began = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """No sequence ends here."""
        del scores
        if not self.seconds:
            input_ids[:, -1].tolist()  # waits for the device
            self.seconds = time.perf_counter() - self._began
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
