"""Shipped code as the loader process sees it, with a claim that only notes what was done."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import cloudpickle
import pytest
import torch

from broker import wire
from broker.devices.simulated import SimulatedDevice
from broker.errors import LoadFailed
from broker.loader.code import ShippedCode
from broker.loader.shipped import MAX_TRACEBACK_BYTES, run_shipped
from broker.loaders import ShippedWork
from broker.memfd import sealed_memfd
from broker.weights import Manifest
from engine_client.claim import HeldClaim

DEVICE = SimulatedDevice()


class NotedClaim(HeldClaim):
    """A claim that nobody holds: a slab of this process, and what was sealed."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.contents = b""
        self.sealed = False

    @contextmanager
    def reserve(
        self, manifest: Manifest, dtype: str, quantization: str = "", **options: Any
    ) -> Iterator[tuple[int, int]]:
        self.manifest = manifest
        slab = DEVICE.create(DEVICE.properties.granularity)
        try:
            yield slab, DEVICE.properties.granularity
            self.contents = os.pread(slab, manifest.nbytes, 0)
        finally:
            os.close(slab)

    def seal(self, *given: Any, **options: Any) -> wire.Sealed:
        self.sealed = True
        return wire.Sealed(1, "", None, False)


def run(loader: Callable[[], object], path: list[str] | None = None) -> NotedClaim:
    code = ShippedCode(path or [], cloudpickle.dumps(loader))
    return run_code(wire.encode(code))


def run_code(code: bytes) -> NotedClaim:
    claim = NotedClaim()
    descriptor = sealed_memfd("code", code)
    try:
        run_shipped(claim, DEVICE, ShippedWork("m.load"), descriptor)
    finally:
        os.close(descriptor)
    return claim


def refused(loader: Callable[[], object]) -> LoadFailed:
    with pytest.raises(LoadFailed) as error:
        run(loader)
    return error.value


def test_what_it_returns_is_written_and_sealed() -> None:
    """A mapping of tensors: its manifest, its bytes, its seal."""
    claim = run(lambda: {"a": torch.tensor([1, 2], dtype=torch.uint8)})
    assert claim.manifest is not None
    assert claim.manifest.groups[0].names == ["a"]
    assert (claim.contents, claim.sealed) == (b"\x01\x02", True)


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (
            lambda: 5,
            "only a torch module or a mapping of names to tensors can be published, not int",
        ),
        (lambda: {"a": 1}, "a mapping to publish holds names and tensors, 'a' leads to int"),
        (
            lambda: torch.nn.Linear(1, 1, device="meta", bias=False),
            (
                "these tensors cannot be published: 'weight' (it is on meta and has no values); "
                "publish plain strided tensors that hold values"
            ),
        ),
    ],
    ids=["number", "mapping of numbers", "module on meta"],
)
def test_what_cannot_be_published(loader: Callable[[], object], sentence: str) -> None:
    """Something else than a module or tensors with values: the sentence says what it was."""
    error = refused(loader)
    said = f"what the loader m.load returned cannot be published: {sentence}"
    assert (error.sentence, error.reason) == (said, "loader-returned")


class Odd(dict[str, torch.Tensor]):
    def __getitem__(self, name: str) -> torch.Tensor:
        raise RuntimeError("not today")

    def items(self) -> NoReturn:
        raise RuntimeError("not today")


def test_what_raises_when_it_is_looked_at() -> None:
    """A mapping of its own kind is code of theirs, too."""
    error = refused(lambda: Odd(a=torch.ones(1)))
    said = "the loader m.load returned what raised when it was looked at: RuntimeError: not today"
    assert (error.sentence, error.reason) == (said, "loader-returned")


def test_what_it_raises_comes_with_its_traceback() -> None:
    """The traceback names the code's own lines, and not ours."""

    def load() -> object:
        raise KeyError("model.embed")

    error = refused(load)
    assert error.sentence == "the loader m.load raised KeyError: 'model.embed'"
    assert error.reason == "loader-raised"
    assert error.traceback.startswith("Traceback (most recent call last):")
    assert "in load\n" in error.traceback
    assert "shipped.py" not in error.traceback.replace("test_shipped.py", "")


def test_a_traceback_that_is_too_long_keeps_its_end() -> None:
    """However it is written, it fits into what an error may carry over the wire."""

    def load() -> object:
        raise ValueError("\N{GRINNING FACE}" * 20_000 + "the end")

    error = refused(load)
    assert len(error.traceback) == MAX_TRACEBACK_BYTES
    assert error.traceback.endswith("the end\n")
    carried = LoadFailed("so it is", **error.fields).to_payload()
    assert carried.split(b"\n")[1].endswith(b'the end\\n"}')


def test_a_module_that_is_not_here() -> None:
    """What the code names must be importable where it runs; if not, the sentence says so."""
    module = types.ModuleType("only_there")
    exec("def load(): return {}", module.__dict__)  # noqa: S102 - a module of no file
    sys.modules["only_there"] = module
    code = wire.encode(ShippedCode([], cloudpickle.dumps(module.load)))
    del sys.modules["only_there"]
    with pytest.raises(LoadFailed) as error:
        run_code(code)
    assert error.value.reason == "loader-unpickled"
    assert error.value.sentence == (
        "the loader m.load could not be unpacked: ModuleNotFoundError: No module named 'only_there'"
    )


def test_what_is_no_code() -> None:
    """Bytes of a peer that are not what a client sends are refused the same way."""
    with pytest.raises(LoadFailed, match=r"^the loader m.load could not be unpacked: ") as error:
        run_code(b"\xc1")
    assert error.value.reason == "loader-unpickled"


def test_the_engines_import_path_comes_behind_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the engine's script are found, but never in place of the broker's own."""
    monkeypatch.setattr(sys, "path", ["/ours"])
    run(lambda: {"a": torch.ones(1)}, ["/ours", "/engine"])
    assert sys.path == ["/ours", "/engine"]
