"""Settings for all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings


def keep_to_own_cores() -> None:
    """Of tests that run side by side, each takes its share of the cores: the threads of two processes that multiply on
    the same ones wait for each other most of the time.
    """
    side_by_side = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if side_by_side == 1 or not hasattr(os, "sched_setaffinity"):
        return
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))
    share = cores[number * len(cores) // side_by_side : (number + 1) * len(cores) // side_by_side]
    os.sched_setaffinity(0, share or cores)


keep_to_own_cores()  # before anything loads torch
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A busy machine is no bug: neither a slow example nor slow generation fails a property.
settings.register_profile("whale-tui", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whale-tui")

SLOWEST = ("test_quickstart.py", "test_engine.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first: a long test that comes last keeps one process waiting for the other."""
    items.sort(key=lambda item: item.path.name not in SLOWEST)
