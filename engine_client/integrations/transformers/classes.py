"""Which class a checkpoint's model is of, and its configuration, as the library finds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from broker.errors import UsageError

_OF_MODELS = ("dtype", "torch_dtype", "generation_config", "key_mapping")
"""Options that the library takes off before it makes a configuration of the others."""
_OF_BOTH = ("attn_implementation", "experts_implementation")
"""Options that it gives to the configuration and looks at again when it builds the model."""


class Chosen(NamedTuple):
    """A concrete model class, the configuration to build it with, and what options are left."""

    model_class: Any
    config: Any
    options: dict[str, Any]


def choose_class(
    path: str | os.PathLike[str], model_class: Any, options: Mapping[str, Any]
) -> Chosen:
    """Find class and configuration. Reads config.json unless the options bring a configuration.

    Args:
        model_class: a concrete class, an Auto class, or None for the class that config.json names.

    Raises:
        UsageError: no class for such a configuration.
        What the library raises about the configuration.
    """
    for_model = {key: value for key, value in options.items() if key in _OF_MODELS}
    others = {key: value for key, value in options.items() if key not in _OF_MODELS}
    config = others.pop("config", None)
    if config is None or isinstance(config, (str, os.PathLike)):
        again = {key: others[key] for key in _OF_BOTH if key in others}
        config, unused = _config_class(model_class).from_pretrained(
            path if config is None else config, return_unused_kwargs=True, **others
        )
        others = unused | again
    model_class = _named_class(config) if model_class is None else model_class
    if hasattr(model_class, "_model_mapping"):
        model_class, config = _of_auto_class(model_class, config)
    return Chosen(model_class, config, others | for_model)


def _config_class(model_class: Any) -> Any:
    from transformers import AutoConfig

    return getattr(model_class, "config_class", None) or AutoConfig


def _named_class(config: Any) -> Any:
    import transformers

    named = list(getattr(config, "architectures", None) or ())
    for name in named:
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    said = f"names {' and '.join(named)}" if named else "names no class"
    raise UsageError(
        f"from_pretrained: config.json {said}, and transformers {transformers.__version__} has no "
        f"such class for a {config.model_type!r}: pass model_class, for example "
        "transformers.AutoModelForCausalLM"
    )


def _of_auto_class(auto: Any, config: Any) -> tuple[Any, Any]:
    """The class that an Auto class would take, and the part of the configuration it is built of."""
    try:
        found = auto._model_mapping[type(config)]  # noqa: SLF001 - the library has no other way
    except KeyError:
        raise UsageError(
            f"from_pretrained: {auto.__name__} has no class for a {config.model_type!r}; pass the "
            "model's own class as model_class"
        ) from None
    if isinstance(found, (list, tuple)):
        found = _among(found, config)
    text = getattr(config, "sub_configs", {}).get("text_config")
    if text is not None and getattr(found, "config_class", None) == text:
        quantization = getattr(config, "quantization_config", None)
        config = config.get_text_config()
        if quantization is not None:
            config.quantization_config = quantization
    return found, config


def _among(classes: Any, config: Any) -> Any:
    by_name = {one.__name__: one for one in classes}
    named = (by_name.get(name) for name in getattr(config, "architectures", None) or ())
    return next((one for one in named if one is not None), classes[0])
