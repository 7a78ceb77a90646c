"""One client for each process and broker."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from broker.errors import BrokerNotFound
from engine_client.integrations.vllm.connection import client_for
from engine_client.integrations.vllm.options import Options
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import eventually

LOGGER = logging.getLogger("test-vllm-connection")


def test_a_process_has_one_client_until_its_broker_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then the log is told, and the old one is not handed out again."""
    with private_directory() as directory, brokers(directory) as start:
        options = Options(device="simulated", directory=str(directory))
        broker = start()
        first = client_for(options, "simulated", LOGGER)
        assert client_for(options, "simulated", LOGGER) is first
        broker.kill()
        eventually(lambda: not first.is_connected, 5, "the news that the broker is gone")
        eventually(lambda: "the broker is gone" in caplog.text, 5, "the warning")
        with pytest.raises(BrokerNotFound):
            client_for(options, "simulated", LOGGER)


def test_no_broker_is_an_error(tmp_path: Path) -> None:
    """The client's own sentence, with every path that was tried."""
    options = Options(device="simulated", directory=str(tmp_path / "none"))
    with pytest.raises(BrokerNotFound, match="none"):
        client_for(options, "simulated", LOGGER)
