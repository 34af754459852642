"""A pytest plugin that runs modules, and the tests in each, in random order: no test may need another one before it.

Only modules with the mark `in_order` keep their order: their tests follow one engine from its start to its end, since
engines are slow to start.

    .venv/bin/python -m pytest -p tests.random_order [--order-seed 7] ...

The header of a run has its seed.
"""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the seed."""
    parser.addoption("--order-seed", type=int, default=None, help="seed of the order of tests; by default a random one")


def pytest_configure(config: pytest.Config) -> None:
    """Draws a seed. Processes of xdist get the options of the one that starts them, so all have the same order."""
    if config.option.order_seed is None:
        config.option.order_seed = random.randrange(1 << 16)


def pytest_report_header(config: pytest.Config) -> str:
    """Names the seed."""
    return f"random order: --order-seed {config.option.order_seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffles; modules stay whole, since their fixtures are dear."""
    dice = random.Random(config.option.order_seed)
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    names = list(modules)
    dice.shuffle(names)
    for module in modules.values():
        if not module[0].get_closest_marker("in_order"):
            dice.shuffle(module)
    items[:] = [item for name in names for item in modules[name]]
