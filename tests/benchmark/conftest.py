"""Rows that entries add are gone after a test, and so is the configuration of their runs."""

from collections.abc import Iterator
from typing import Any

import pytest

import train
from powergossip.algorithms import AVERAGING
from powergossip.algorithms.aggregation import AGGREGATIONS


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    registries: tuple[dict[str, Any], ...] = (AVERAGING, AGGREGATIONS)
    before, config = [dict(registry) for registry in registries], train.config
    yield
    train.config = config
    for registry, rows in zip(registries, before, strict=True):
        registry.clear()
        registry.update(rows)
