"""Hypothesis profiles: short for every run, long when GLM53D_LONG=1 asks for it (make test-all); and the summary."""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.matrix import Matrix

# No deadlines and no "too slow": a busy machine is not a bug. The profile's name is printed by pytest's header.
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("short", max_examples=100, deadline=None, suppress_health_check=RELAXED, print_blob=True)
settings.register_profile("long", max_examples=5000, deadline=None, suppress_health_check=RELAXED, print_blob=True)
settings.load_profile("long" if os.environ.get("GLM53D_LONG") == "1" else "short")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Matrix())
