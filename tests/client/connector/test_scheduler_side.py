"""smoke"""

from __future__ import annotations

import time


def test_smoke(make_engine):
    t = time.time()
    engine = make_engine()
    print("made", time.time() - t)
    prompt = list(range(200))
    print(engine.serve("a", prompt))
    print(time.time() - t, engine.node.commits, engine.take_stats())
    engine.check_nothing_is_left()
    engine.scheduler.reset_prefix_cache()
    print(engine.serve("b", prompt))
    engine.check_nothing_is_left()
    print(engine.take_stats())
