"""Images, sounds and videos in prompts: what they add to the keys of chunks.

vLLM names an item by a hash of its content, by what the caller chose, or by a counter of one process, and no name shows
which. So lmkv hashes what the model gets to see: processed tensors, in which the options of the processor have taken
effect. Names matter in one way: vLLM keeps an encoder's output, and KV, by the name of an item. If two items have one
name, the first that is computed stands for both, whichever of them a request has.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from blake3 import blake3  # vLLM requires it, for its own names

THREADS_FROM_BYTES = 4 << 20
"""Size of a tensor from which on several threads hash it."""
MAX_NAMES = 1 << 16
"""Most names of items that are remembered: more than vLLM keeps encoded items."""


class UnknownMedia(ValueError):
    """It is not known which image, sound or video the model sees, so the prompt has no key."""


class TensorDigests:
    """Hashes each tensor once: vLLM keeps the tensors of an item that is used again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], bytes]] = {}
        """The key is the tensor's identity."""

    def digest(self, tensor: torch.Tensor) -> bytes:
        """The digest of a tensor's type, shape and content."""
        number = id(tensor)
        reference, digest = self._known.get(number, (None, b""))
        if reference is None or reference() is not tensor:
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            threads = blake3.AUTO if content.nbytes >= THREADS_FROM_BYTES else 1
            described = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
            digest = described + blake3(content, max_threads=threads).digest()
            self._known[number] = (weakref.ref(tensor, lambda _: self._known.pop(number, None)), digest)
        return digest


TENSORS = TensorDigests()
"""Shared by the connectors of KV and of the encoder cache, which get the same tensors."""


class MediaDigests:
    """Digests of items by their content."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, bytes] = OrderedDict()
        """Digests of items by vLLM's names for them, the last used at the end; empty where a name is ambiguous."""
        self._ambiguous: set[str] = set()
        self._encoded: set[str] = set()
        """Names under which vLLM's encoder cache may have something."""
        self._outdated: set[str] = set()
        """Names under which vLLM's encoder cache may have what earlier weights made."""

    def weights_changed(self) -> None:
        """Handles a change of the weights: vLLM keeps what an encoder made with the weights before."""
        self._outdated |= self._encoded

    def encoder_cleared(self, running_names: Set[str]) -> None:
        """Handles that vLLM has emptied its encoder cache, while requests with items of these names run."""
        self._encoded = set(running_names)
        self._outdated.clear()

    def take_ambiguous(self) -> set[str]:
        """The names for which vLLM may compute another item from now on, since the last call. What a request with such
        a name computes must not be stored any more."""
        taken, self._ambiguous = self._ambiguous, set()
        return taken

    def extras(self, features: Sequence[Any], chunk_size: int) -> dict[int, bytes]:
        """Returns the inputs of chunks' keys besides tokens: the items in each chunk, by content, and where they begin.

        The begin is relative to the chunk and negative where the item began in an earlier chunk. Raises `UnknownMedia`
        if vLLM does not pass the content of an item to the scheduler, or may confuse two items.
        """
        extras: dict[int, bytes] = {}
        for feature, digest in zip(features, self.note(features), strict=True):
            low, length = feature.mm_position.offset, feature.mm_position.length
            for chunk in range(low // chunk_size, -(-(low + length) // chunk_size)):
                begin = (low - chunk * chunk_size).to_bytes(8, "little", signed=True)
                extras[chunk] = extras.get(chunk, b"") + digest + begin
        return extras

    def note(self, features: Sequence[Any]) -> list[bytes]:
        """The digests of a request's items. Notes the names of all of them, before vLLM computes any of them.

        Raises `UnknownMedia` as `extras` does.
        """
        digests: list[bytes] = []
        unknown: UnknownMedia | None = None
        for feature in features:
            try:
                digests.append(self._digest(feature))
            except UnknownMedia as error:
                self._note(feature.identifier, b"")
                unknown = error
            else:
                self._note(feature.identifier, digests[-1])
        if unknown is not None:
            raise unknown
        for feature in features:
            if not self._named.get(feature.identifier):
                raise UnknownMedia(
                    f"several items are named {feature.identifier!r}, and vLLM may show the model any of them"
                )
            if feature.identifier in self._outdated:
                raise UnknownMedia("vLLM may have encoded an item before the weights changed; reset its encoder cache")
        return digests

    def _note(self, name: str, digest: bytes) -> None:
        if self._named.setdefault(name, digest) != digest:
            self._named[name] = b""
            self._ambiguous.add(name)
        self._named.move_to_end(name)
        self._encoded.add(name)
        if len(self._named) > MAX_NAMES:
            forgotten, _ = self._named.popitem(last=False)
            self._encoded.discard(forgotten)
            self._outdated.discard(forgotten)
            self._ambiguous.add(forgotten)  # whether a later item of this name is the same cannot be known

    def _digest(self, feature: Any) -> bytes:
        values = {} if feature.data is None else {name: one.data for name, one in feature.data.items()}
        parts = [feature.modality, *_parts(values), *_parts(feature.mm_position.is_embed)]
        has_content = any(isinstance(part, torch.Tensor) and part.numel() for part in _parts(values))
        if not has_content or any(part is None for part in _parts(values)):
            raise UnknownMedia(
                f"vLLM keeps the content of this {feature.modality} from the scheduler (mm_processor_cache_type shm, "
                "or an encoder elsewhere)"
            )
        hasher = blake3(max_threads=1)
        for part in parts:
            content = TENSORS.digest(part) if isinstance(part, torch.Tensor) else _content(part)
            hasher.update(len(content).to_bytes(8, "little"))
            hasher.update(content)
        return bytes(hasher.digest())


def _content(value: object) -> bytes:
    """A value by its kind and content. Raises `UnknownMedia` for values whose `repr` could omit something."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    if value is not None and type(value) not in (str, bytes, bool, int, float):
        raise UnknownMedia(f"an item has a {type(value).__name__}, whose content lmkv cannot read")
    return repr(value).encode()


def _parts(value: object) -> Iterator[Any]:
    """The leaves of nested values, each container announced by its kind and size, so that no two values look alike."""
    if isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for name in sorted(value):
            yield str(name)
            yield from _parts(value[name])
    elif isinstance(value, list | tuple):
        yield f"sequence {len(value)}"
        for one in value:
            yield from _parts(one)
    else:
        yield value
