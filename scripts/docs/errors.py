"""Statuses and errors, from their classes: broker/errors.py."""

from __future__ import annotations

from broker import errors
from broker.errors import BrokerError
from scripts.docs.tables import table

PAGE = "errors.md"


def classes() -> list[type[BrokerError]]:
    """Every error that is raised on purpose, in the order of the source."""
    return [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, BrokerError) and each is not BrokerError
    ]


def anchor(error: type[BrokerError]) -> str:
    """Of its section in reference/errors.md."""
    return error.__name__.lower()


def statuses() -> str:
    """The statuses of replies that are errors, and the class that our client raises for each."""
    rows = [
        [f"`{each.status}`", f"[`{each.__name__}`]({PAGE}#{anchor(each)})"]
        for each in classes()
        if type(errors.from_payload(each.status, b"")) is each
    ]
    return table(["status", "class in Python, cause and cure"], rows)


def summary() -> str:
    """Every class with its status and exit code."""
    rows = [
        [f"[`{each.__name__}`](#{anchor(each)})", f"`{each.status}`", str(each.exit_code)]
        for each in classes()
    ]
    return table(["error", "status", "exit code"], rows)
