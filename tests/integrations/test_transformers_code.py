"""What tells two engines apart whose code computes other weights from the same files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_client.integrations.transformers.code import digest_of_code
from tests.integrations.models import MIXTRAL


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is an extra (transformers)")


def digest(transformers: Any, model_class: Any = None, key_mapping: Any = None) -> str:
    with torch.device("meta"):
        model = (model_class or transformers.MixtralForCausalLM)(
            transformers.MixtralConfig(**MIXTRAL)
        )
    return digest_of_code(model, key_mapping)


def edited(transformers: Any, factor: float, **members: Any) -> Any:
    """A class with always the same name."""

    class Mine(transformers.MixtralForCausalLM):  # type: ignore[misc]
        def tie_weights(self, *args: Any, **kwargs: Any) -> Any:
            self.factor = factor
            return super().tie_weights(*args, **kwargs)

    for name, value in members.items():
        setattr(Mine, name, value)
    return Mine


def test_the_same_code(transformers: Any) -> None:
    """The library's class, and one's own made twice: the same each time."""
    assert digest(transformers) == digest(transformers)
    first, again = (digest(transformers, edited(transformers, 1.0)) for _ in range(2))
    assert first == again != digest(transformers)
    assert not first.startswith("unknown")


def test_an_edited_class_of_the_same_name(transformers: Any) -> None:
    """Another value that a method holds, another attribute, another method: another code."""
    classes = [
        edited(transformers, 1.0),
        edited(transformers, 2.0),
        edited(transformers, 1.0, table={"a": "b"}),
        edited(transformers, 1.0, extra=lambda self: self + 1),
        edited(transformers, 1.0, extra=lambda self: self + 2),
    ]
    assert len({digest(transformers, one) for one in classes}) == len(classes)


def test_what_cannot_be_written_down_is_not_shared(transformers: Any) -> None:
    """Another one each time: an object that says nothing, and a class without source."""
    opaque = edited(transformers, 1.0, opaque=object())
    typed_in = type("Typed", (transformers.MixtralForCausalLM,), {"__module__": "nowhere"})
    for model_class in (opaque, typed_in):
        assert digest(transformers, model_class) != digest(transformers, model_class)


def test_another_registered_conversion(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up in the other order is another tensor of the same shape."""
    mapping = pytest.importorskip("transformers.conversion_mapping")
    before = digest(transformers)
    turned = [
        type(one)(list(reversed(one.source_patterns)), one.target_patterns, one.operations)
        if isinstance(one, mapping.WeightConverter)
        else one
        for one in mapping.get_checkpoint_conversion_mapping("mixtral")
    ]
    monkeypatch.setattr(mapping, "USER_REGISTERED_MAPPINGS", set())
    cache = dict(mapping._checkpoint_conversion_mapping_cache)
    monkeypatch.setattr(mapping, "_checkpoint_conversion_mapping_cache", cache)
    mapping.register_checkpoint_conversion_mapping("mixtral", turned, overwrite=True)
    assert digest(transformers) != before
    assert digest(transformers, key_mapping={"a": "b"}) != digest(transformers)
