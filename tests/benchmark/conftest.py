"""The configuration of runs that entries start is gone after a test."""

import pytest

import train


@pytest.fixture(autouse=True)
def _config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "config", train.config)
