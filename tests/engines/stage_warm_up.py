"""Warms the stages of a pipeline-parallel engine up on CPUs, as `worker_extension_cls` of vLLM.

vLLM's CPU workers skip their warm-up with `enforce_eager`. With several stages the first request then ends the engine,
because the second stage has no buffers for what it receives.
"""

from __future__ import annotations

from typing import Any


class StageWarmUp:
    """Adds a method to each worker, which `LLM.collective_rpc` calls."""

    model_runner: Any

    def warm_up(self, token_count: int) -> None:
        """Runs the model over as many tokens as a step may have."""
        import torch

        with torch.no_grad():
            self.model_runner._dummy_run(token_count)
