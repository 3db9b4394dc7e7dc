"""Settings for all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests run two at a time; before anything loads torch

# A busy machine is no bug: neither a slow example nor slow generation fails a property.
settings.register_profile("whale-tui", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whale-tui")

SLOWEST = ("test_quickstart.py", "test_engine.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first: a long test that comes last keeps one process waiting for the other."""
    items.sort(key=lambda item: item.path.name not in SLOWEST)
