"""Rows that entries add are gone after a test, and so is the configuration of their runs."""

from collections.abc import Iterator

import pytest

import train
from powergossip.algorithms import AVERAGING


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before, config = dict(AVERAGING), train.config
    yield
    train.config = config
    AVERAGING.clear()
    AVERAGING.update(before)
