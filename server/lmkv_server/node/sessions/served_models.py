"""The names under which a node's engines serve models and LoRA adapters, as they announced them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lmkv.spec import MAX_SERVED_MODELS, ServedModel


class ServedModels:
    """Names of engines that are attached, and those of engines that have left: their chunks are still here.

    At most `limit`: a name beyond it replaces the oldest, of engines that have left before of those that are attached.
    """

    def __init__(self, limit: int = MAX_SERVED_MODELS) -> None:
        self._limit = limit
        self._engines: OrderedDict[ServedModel, set[str]] = OrderedDict()
        """Attached engines by what they serve, the oldest announcement first."""

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._engines)

    def announce(self, engine_id: str, models: Iterable[ServedModel]) -> bool:
        """Takes what an attached engine serves; returns whether anything is new.

        A name of the engine that has another identity now replaces the earlier one, unless another engine still has it.
        """
        before = list(self._engines)
        for model in models:
            for other, engines in list(self._engines.items()):
                if (other.name, other.fingerprint) == (model.name, model.fingerprint) and other != model:
                    engines.discard(engine_id)
                    if not engines:
                        del self._engines[other]
            self._engines.setdefault(model, set()).add(engine_id)
        while len(self._engines) > self._limit:
            self._drop_oldest()
        return before != list(self._engines)

    def move(self, engine_id: str, fingerprint: bytes) -> None:
        """The spec of an engine has this fingerprint now: it serves the same names under it, and not under the old."""
        names = [model for model, engines in self._engines.items() if engine_id in engines]
        self.detach(engine_id)
        self.announce(engine_id, [replace(model, fingerprint=fingerprint) for model in names])

    def detach(self, engine_id: str) -> None:
        """The engine has left. Its names stay."""
        for engines in self._engines.values():
            engines.discard(engine_id)

    def _drop_oldest(self) -> None:
        left = (model for model, engines in self._engines.items() if not engines)
        del self._engines[next(left, next(iter(self._engines)))]
