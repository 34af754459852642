"""The scheduler side of the encoder cache: looks outputs up, and plans what workers load and store in a step.

asked ──found──► loading ──all chunks are in the pool──► ready ──the step that needs it──► in the plan
  └──────────────────┴──not found, not loaded, too late──► the encoder runs, and its output is stored
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from lmkv_client.connector.encoder.outputs import EncoderPlan, LoadedOutput, OutputName, OutputWidths
from lmkv_client.connector.multimodal import MediaDigests, UnknownMedia
from lmkv_client.connector.vllm_api import Request, init_logger
from lmkv_client.engine import Engine, Extent, Held
from lmkv_client.engine.late_engine import LateEngine

logger = init_logger("vllm.lmkv")

EMBEDDINGS = "prompt_embeds"
"""vLLM's name of the modality that no encoder runs for."""


class OutputLookup:
    """The lookup of one output, and the load that follows."""

    def __init__(self, engine: Engine, name: OutputName) -> None:
        self.name = name
        self.is_done = False
        self.has_failed = False
        """Whether the output was found and did not arrive."""
        self._load_timeout = engine.config.load_timeout
        self._asked = engine.begin_lookup(name.keys, is_counted=False)
        self._held: Held | None = None
        self._loading: Future[list[Extent]] | None = None
        self._extents: list[Extent] = []

    @property
    def is_ready(self) -> bool:
        """Whether the output is in the pool."""
        return bool(self._extents)

    def poll(self) -> bool:
        """Handles the answers that have arrived. Returns whether the lookup is done. Never blocks."""
        if self.is_done:
            return True
        if self._held is None:
            if not self._asked.done():
                return False
            self._held = self._asked.result()
            if self._held.hit_count < len(self.name.keys):
                return self._end()
            self._loading = self._held.begin_load(timeout=self._load_timeout)
        assert self._loading is not None
        if not self._loading.done():
            return False
        extents = self._loading.result()
        if sum(extent.token_count for extent in extents) == self.name.row_count:
            self._extents = extents
            self.is_done = True
            return True
        self.has_failed = True
        return self._end()

    def output(self) -> LoadedOutput:
        """The output, which is ready; valid until `release`."""
        chunks = tuple(np.frombuffer(extent.view, np.uint8) for extent in self._extents)
        return LoadedOutput(chunks=chunks, place_count=self.name.place_count, embeddings=self.name.embeddings)

    def release(self) -> None:
        """Ends the lookup: the node may evict the output. Idempotent."""
        self._extents = []
        self.is_done = True
        if self._held is None:
            self._asked.cancel()
        else:
            self._held.release()

    def _end(self) -> bool:
        self.release()
        return True


@dataclass(kw_only=True, slots=True)
class RequestMedia:
    """The media of one request whose outputs it still needs, by vLLM's names."""

    end: int
    """The first token behind the last medium."""
    computed_count: int = 0
    """Tokens that were computed when vLLM last asked."""
    names: dict[str, OutputName] = field(default_factory=dict)
    """Names of the outputs of media whose content is known."""
    lookups: dict[str, OutputLookup] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    """Names of outputs that are loaded or encoded."""

    def progressed(self, computed_count: int) -> None:
        """Records how many tokens are computed; after a preemption fewer, and all media are needed again."""
        if computed_count < self.computed_count:
            self.settled.clear()
        self.computed_count = computed_count

    def poll(self, name: str, engine: Engine) -> bool:
        """Whether the lookup of an output is done, or there is none; begins it if need be."""
        if name in self.settled or name not in self.names:
            return True
        if name not in self.lookups:
            self.lookups[name] = OutputLookup(engine, self.names[name])
        return self.lookups[name].poll()


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderRoles:
    """Whether an engine loads outputs, stores them, or both."""

    may_load: bool
    """Whether its workers need them: `ec_consumer` or `ec_both`."""
    may_store: bool
    """Whether its workers store what encoders make: `ec_producer` or `ec_both`."""
    adapts_encoders: bool
    """Whether LoRA adapters change what encoders make."""


class EncoderScheduler:
    """The scheduler side. vLLM calls all methods on the thread that schedules."""

    def __init__(self, engine: LateEngine, widths: OutputWidths, roles: EncoderRoles) -> None:
        self._engine = engine
        self._widths = widths
        self._roles = roles
        self._digests = MediaDigests()
        self._requests: dict[str, RequestMedia] = {}
        self._admitted: RequestMedia | None = None
        """The media of the request that vLLM asks about."""
        self._plan = EncoderPlan()
        self._planned: list[OutputLookup] = []
        """Lookups of the outputs in the plan that is made."""
        self._sent: list[OutputLookup] = []
        """Lookups of the outputs in the last plan, which the workers read."""
        self._counts: Counter[str] = Counter()
        self._weights_changed = False

    def admit(self, request: Request, computed_count: int) -> bool:
        """Begins lookups for the media behind a request's computed tokens. Returns whether all of them have ended."""
        engine = self._engine.engine
        self._admitted = None
        if engine is None or self._weights_changed:
            return True
        media = self._requests.get(request.request_id)
        if media is None:
            media = self._begin(engine, request)
        self._admitted = media
        media.progressed(computed_count)
        if computed_count >= media.end and not media.lookups:
            return True
        is_ready = True
        for feature in request.mm_features:
            if feature.mm_position.offset + feature.mm_position.length <= computed_count:
                if (lookup := media.lookups.pop(feature.identifier, None)) is not None:  # vLLM had the output or the KV
                    lookup.release()
                continue
            if not media.poll(feature.identifier, engine):
                is_ready = False
        return is_ready

    def has(self, name: str) -> bool:
        """Whether the output for a medium of the request that was admitted last is in the pool."""
        lookup = self._admitted.lookups.get(name) if self._admitted else None
        return lookup is not None and lookup.is_ready

    def allocated(self, request: Request, index: int) -> None:
        """Plans the load of an output, or the store of what the encoder makes in this step."""
        media, name = self._requests.get(request.request_id), request.mm_features[index].identifier
        lookup = media.lookups.pop(name, None) if media else None
        if media is None or lookup is None:
            return
        media.settled.add(name)
        if lookup.is_ready:
            output = lookup.output()
            self._planned.append(lookup)
            self._counts["encoder_hits"] += 1
            if self._roles.may_load:
                self._plan.loads[name] = output
                self._counts["encoder_loaded_bytes"] += sum(chunk.nbytes for chunk in output.chunks)
            return
        self._counts["encoder_misses"] += 1
        self._counts["encoder_load_failures"] += lookup.has_failed
        if self._roles.may_store and self._engine.engine is not None:
            self._plan.stores[name] = lookup.name
            self._plan.spec = self._engine.engine.spec
        lookup.release()

    def plan(self) -> EncoderPlan:
        """The plan of a step. The workers have read the last one by now."""
        for lookup in self._sent:
            lookup.release()
        self._sent, self._planned = self._planned, []
        plan, self._plan = self._plan, EncoderPlan()
        return plan

    def finished(self, request: Request) -> None:
        """Ends the lookups of a request."""
        media = self._requests.pop(request.request_id, None)
        for lookup in media.lookups.values() if media else ():
            lookup.release()

    def weights_changed(self) -> None:
        """Loads and stores nothing from now on: keys name the weights that the engine has started with."""
        if self._weights_changed:
            return
        self._weights_changed = True
        self._admitted = None
        logger.warning("weights change in place: encoders run for everything until the engine restarts")
        for media in self._requests.values():
            for lookup in media.lookups.values():
                lookup.release()
        self._requests.clear()

    def count(self, counts: dict[str, int]) -> None:
        """Adds what workers have counted."""
        self._counts.update(counts)

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call that are not 0, by the names of `ENCODER_COUNTERS`."""
        counts, self._counts = self._counts, Counter()
        return dict(+counts)

    def _begin(self, engine: Engine, request: Request) -> RequestMedia:
        """Names the outputs of a request's media."""
        features = [one for one in request.mm_features if one.modality != EMBEDDINGS]
        end = max((one.mm_position.offset + one.mm_position.length for one in features), default=0)
        media = self._requests[request.request_id] = RequestMedia(end=end)
        is_adapted = self._roles.adapts_encoders and request.lora_request is not None
        try:
            digests = [b""] * len(features) if is_adapted else self._digests.note(features)
        except UnknownMedia as reason:
            logger.debug("outputs of encoders are not looked up: %s", reason)
            digests = [b""] * len(features)
        for feature, digest in zip(features, digests, strict=True):
            places, embeddings = feature.mm_position.get_num_embeds(), self._widths.of(feature.modality)
            if not digest or not places or not embeddings:
                self._counts["encoder_unknown_media"] += 1
                continue
            name = OutputName.of(engine, digest, places, embeddings, salt=request.cache_salt or "")
            media.names[feature.identifier] = name
        self._forget(self._digests.take_ambiguous())
        return media

    def _forget(self, names: set[str]) -> None:
        """Ends the lookups for names under which vLLM may keep another medium from now on."""
        for media in self._requests.values() if names else ():
            for name in names & media.names.keys():
                del media.names[name]
                if (lookup := media.lookups.pop(name, None)) is not None:
                    lookup.release()
