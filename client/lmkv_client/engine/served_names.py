"""The names under which an engine serves its model and LoRA adapters, with what chunk keys contain for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from lmkv.errors import BadKvSpec
from lmkv.spec import MAX_SERVED_MODELS, ServedModel
from lmkv.v1 import chunk_pb2


class ServedNames:
    """Changed by the scheduler's thread; `messages` may be read by any.

    At most `MAX_SERVED_MODELS`: beyond that, the adapter that was not used for longest gives way.
    """

    def __init__(self, model_names: Iterable[str] = ()) -> None:
        """`model_names` are the names of the model itself; those that cannot be registered are left out."""
        models = [model for name in model_names if (model := _served(name, "")) is not None]
        self._models = models[: MAX_SERVED_MODELS // 2]
        self._adapters: OrderedDict[str, tuple[str, ServedModel | None]] = OrderedDict()
        """Identity by name, and None where that cannot be registered; the one that was used last at the end."""
        self.messages: tuple[chunk_pb2.ServedModel, ...] = ()
        """All of them, as they are announced; replaced as a whole."""
        self._publish()

    def use(self, name: str, lora_identity: str) -> chunk_pb2.ServedModel | None:
        """A request uses a LoRA adapter: what is to be announced, None if it was before."""
        known = self._adapters.get(name)
        if known is not None and known[0] == lora_identity:
            self._adapters.move_to_end(name)
            return None
        model = _served(name, lora_identity)
        self._adapters[name] = (lora_identity, model)
        self._adapters.move_to_end(name)
        while len(self._models) + len(self._adapters) > MAX_SERVED_MODELS:
            self._adapters.popitem(last=False)
        self._publish()
        return model.to_proto() if model else None

    @property
    def has_adapters(self) -> bool:
        """Whether any adapter was used."""
        return bool(self._adapters)

    def _publish(self) -> None:
        adapters = (model for _, model in self._adapters.values() if model is not None)
        self.messages = tuple(model.to_proto() for model in (*self._models, *adapters))


def _served(name: str, lora_identity: str) -> ServedModel | None:
    try:
        return ServedModel(name=name, fingerprint=b"", lora_identity=lora_identity)
    except BadKvSpec:  # too long, or not printable: the engine serves it, lookups by this name do not find it
        return None
