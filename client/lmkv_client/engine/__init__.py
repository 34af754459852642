"""The API for engines: what any engine needs to keep its KV cache in lmkv. Needs neither vLLM nor torch.

    with Engine.attach(spec) as engine:
        keys = engine.keys(tokens)
        with engine.lookup(keys) as held:               # load what is held
            for extent in held.load():
                ...                                     # read extent.view, or copier.scatter
        new = engine.missing(keys)                      # store the rest
        extents = engine.reserve(len(new))
        ...                                             # write extent.view, or copier.gather
        engine.commit(Written.chain(new, extents))

Blocking calls may be made on any thread; `begin_lookup`, `begin_reserve` and `Held.begin_load` return futures instead.
A lost node means empty answers and counts, never exceptions. Start with `engine.Engine`, then `held.Held` and
`extent.Extent`; `dispatcher` has the threads. vLLM's connector is built on the same `session`, `attachment` and `node`.
"""

from lmkv_client.engine.counters import EngineCounters
from lmkv_client.engine.engine import Engine
from lmkv_client.engine.extent import Copier, Extent, Written
from lmkv_client.engine.held import Held

__all__ = ["Copier", "Engine", "EngineCounters", "Extent", "Held", "Written"]
