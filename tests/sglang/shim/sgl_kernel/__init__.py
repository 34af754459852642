"""Shim for CPUs: the names that SGLang imports of its kernels with `SGLANG_USE_CPU_ENGINE=1`.

PyPI's sgl-kernel is for GPUs. A dense model without speculative decoding calls none of these; a call is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0"
_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _absent(name: str) -> Callable[..., NoReturn]:
    def call(*arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return call


for _name in _NAMES:
    globals()[_name] = _absent(_name)
