"""Which class a checkpoint's model is of, and its configuration, as the library finds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from broker.errors import BadRequest, UsageError
from engine_client.arguments import said_of

_OF_MODELS = ("dtype", "torch_dtype", "generation_config", "key_mapping")
"""Options that the library takes off before it makes a configuration of the others."""
_OF_BOTH = ("attn_implementation", "experts_implementation")
"""Options that it gives to the configuration and looks at again when it builds the model."""


class Chosen(NamedTuple):
    """A concrete model class, the configuration to build it with, and what options are left.

    Attributes:
        for_generation: options that the library also gives to the generation configuration.
    """

    model_class: Any
    config: Any
    options: dict[str, Any]
    for_generation: Mapping[str, Any] = MappingProxyType({})


def choose_class(
    path: str | os.PathLike[str], model_class: Any, options: Mapping[str, Any]
) -> Chosen:
    """Find class and configuration. Reads config.json unless the options bring a configuration.

    Args:
        model_class: a concrete class, an Auto class, or None for the class that config.json names.

    Raises:
        BadRequest: a configuration that is neither an object of the library nor a path.
        UsageError: no class, no class for such a configuration, or only code that lies beside the
            weights.
        What the library raises about the configuration.
    """
    for_model = {key: value for key, value in options.items() if key in _OF_MODELS}
    others = {key: value for key, value in options.items() if key not in _OF_MODELS}
    if model_class is not None and not hasattr(model_class, "from_pretrained"):
        raise UsageError(
            "from_pretrained: model_class must be a class of the library, "
            f"transformers.AutoModelForCausalLM, not {said_of(model_class)}"
        )
    config, left = _configuration(path, model_class, others)
    is_auto = hasattr(model_class, "_model_mapping")
    for_generation = {k: v for k, v in (left if is_auto else others).items() if k != "config"}
    model_class = _named_class(config) if model_class is None else model_class
    if is_auto:
        model_class, config = _of_auto_class(model_class, config)
    return Chosen(model_class, config, left | for_model, for_generation)


def _configuration(
    path: str | os.PathLike[str], model_class: Any, options: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the options that it has not taken."""
    from transformers import PreTrainedConfig

    others = dict(options)
    config = others.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        return config, others
    if not (config is None or isinstance(config, (str, os.PathLike))):
        raise BadRequest(
            "from_pretrained: config has to be a configuration of the library, or the path of one, "
            f"not {type(config).__name__}; make one, for example with "
            "transformers.AutoConfig.for_model"
        )
    source = path if config is None else config
    again = {key: others[key] for key in _OF_BOTH if key in others}
    config_class = _config_class(model_class)
    _refuse_code(config_class, source)
    read, unused = config_class.from_pretrained(
        source, return_unused_kwargs=True, trust_remote_code=False, **others
    )
    unused.pop("trust_remote_code", None)
    return read, unused | again


def _refuse_code(config_class: Any, source: str | os.PathLike[str]) -> None:
    """An Auto class would ask on the terminal whether to run the code that lies in the folder."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    if config_class is not AutoConfig:
        return
    read, _unused = PreTrainedConfig.get_config_dict(source)
    if (
        "AutoConfig" in (read.get("auto_map") or {})
        and read.get("model_type") not in CONFIG_MAPPING
    ):
        raise UsageError(
            f"from_pretrained: the configuration in {os.fspath(source)!r} is of a class whose code "
            "comes with the checkpoint (auto_map), and such code is not run from here; import the "
            "model's class yourself and pass it as model_class"
        )


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
