"""How vLLM's KV-cache groups make up the parts of a chunk. Pure.

vLLM splits the layers of a model into groups; layers of one group share block ids. A part has all layers of one kind,
so that it may have several groups:

    part 1, extent  [layers of group 1][layers of group 2][layers of group 3]     gemma3: 5 of 6 layers slide
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """One of vLLM's KV-cache groups: its layers on this rank, and where an extent of their part has them."""

    part: int
    block_size: int
    """Tokens per page."""
    layer_names: tuple[str, ...]
    """In the order in which an extent has them."""
    first_layer: int = 0
    """Index of the first of these layers in the part."""
