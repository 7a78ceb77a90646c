"""Fallbacks are warnings with a cause, and counted."""

from __future__ import annotations

import logging

import pytest

from broker.errors import BrokerNotFound, OverBudget
from engine_client.integrations.vllm import fallback
from engine_client.integrations.vllm.fallback import count_fallback, fallback_counts


def test_each_fallback_is_a_warning_and_counts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number, the error's class and sentence, and what the engine does instead."""
    monkeypatch.setattr(fallback, "_counts", type(fallback._counts)())
    logger = logging.getLogger("test-vllm-fallback")
    assert count_fallback(logger, BrokerNotFound("nobody listens"), "loading alone") == 1
    assert count_fallback(logger, BrokerNotFound("nobody listens"), "loading alone") == 2
    assert count_fallback(logger, OverBudget("no room"), "loading alone") == 3
    assert fallback_counts() == {"BrokerNotFound": 2, "OverBudget": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert caplog.messages[2] == (
        "weight broker: fallback 3 of this process (OverBudget): no room; loading alone"
    )
