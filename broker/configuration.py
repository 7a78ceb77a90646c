"""Where `serve` finds its settings, and which value counts.

An option counts more than a variable, a variable more than the file (`--config FILE`, or
$WEIGHT_BROKER_CONFIG), the file more than the default. A list that is given replaces one that
counts less; of `limit` each name is taken by itself. An empty variable is none.

A name that means nothing is an error with the nearest ones, in the file and among the variables.
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.config import BrokerConfig, journal_bytes
from broker.credentials import group_id
from broker.errors import BadRequest, NotFound
from broker.limits import Limits, parse_limits
from broker.rundir import candidate_directories
from broker.settings import BY_NAME, SETTINGS, VARIABLE_PREFIX, Setting
from broker.suggest import did_you_mean

CONFIG_OPTION = "--config"
CONFIG_VARIABLE = f"{VARIABLE_PREFIX}CONFIG"
DEFAULT = "default"
MOST_FILE_BYTES = 1 << 20
"""Of a file of settings; more is something else, and may have no end."""
PRECEDENCE = (
    "An option counts more than a variable, that more than the file, that more than the default."
)

OTHER_VARIABLES = (
    "WEIGHT_BROKER_CUDA_LIBRARY",
    "WEIGHT_BROKER_HIP_LIBRARY",
    "WEIGHT_BROKER_NVML_LIBRARY",
    "WEIGHT_BROKER_SYSFS",
    "WEIGHT_BROKER_REHEARSAL",
    "WEIGHT_BROKER_REQUIRE_FAKE_DRIVERS",
)
"""Of drivers (docs/gpu.md) and of tests: `serve` may find them in its environment."""
_TESTS = re.compile(f"{VARIABLE_PREFIX}TEST_.*")
_KUBERNETES = re.compile(
    rf"{VARIABLE_PREFIX}(\w+_)?"
    r"(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""What Kubernetes tells every container about a Service called weight-broker, or weight-broker-…"""


@dataclass(frozen=True)
class Found:
    """A value, and where it comes from: an option, a variable, a file's path, or `DEFAULT`."""

    value: Any
    source: str


@dataclass(frozen=True)
class Configuration:
    """Every setting's value by its name; limits, which have sources of their own, apart."""

    settings: dict[str, Found]
    limits: dict[str, Found]

    def broker_config(self) -> BrokerConfig:
        """The configuration itself.

        Raises:
            BadRequest: a value that cannot be; says where it comes from.
        """
        try:
            return self._broker_config()
        except BadRequest as error:
            found = self.settings.get(str(error.fields.get("setting")))
            if found is None or found.source.startswith("--"):
                raise
            raise BadRequest(f"{found.source}: {error.sentence}", **error.fields) from error

    def _broker_config(self) -> BrokerConfig:
        values = {name: found.value for name, found in self.settings.items()}
        group = values["group"]
        return BrokerConfig(
            name=values["name"],
            directory=values["dir"],
            device=",".join(values["device"]),
            memory_limit=values["memory-limit"],
            preload=tuple(values["preload"]),
            allow_loaders=values["allow-loaders"],
            loader_threads=values["loader-threads"],
            limits=Limits(**{name: found.value for name, found in self.limits.items()}),
            group=None if group is None else group_id(group),
            log_format=values["log-format"],
            metrics=values["metrics"],
            journal_limit=journal_bytes(values["journal-limit"]),
        )


def configure(
    options: Mapping[str, Any], environ: Mapping[str, str], path: str | None
) -> Configuration:
    """Look everywhere; reads the file.

    Args:
        options: by `Setting.field`; None where an option was not given.
        path: the file that `--config` names.

    Raises:
        BadRequest: a name or a value that means nothing; says where it is.
        NotFound: no such file.
    """
    _check_variables(environ)
    path = path or environ.get(CONFIG_VARIABLE) or None
    layers = [
        {s.name: Found(s.default, DEFAULT) for s in SETTINGS},
        {} if path is None else _from_file(path),
        _from_variables(environ),
        {
            s.name: Found(options[s.field], s.option)
            for s in SETTINGS
            if options.get(s.field) is not None
        },
    ]
    limits: dict[str, Found] = {}
    for layer in layers:
        limits.update(_limits(layer.get("limit")))
    settings = {name: found for layer in layers for name, found in layer.items()}
    return Configuration(settings, limits)


def _limits(found: Found | None) -> dict[str, Found]:
    if found is None:
        return {}
    limits = {}
    for item in found.value:
        name = item.partition("=")[0]
        limits[name] = Found(getattr(_parsed(item, found.source), name), found.source)
    return limits


def _parsed(item: str, source: str) -> Limits:
    """The defaults but for one limit. Raises `BadRequest`, which says where it is written."""
    try:
        return parse_limits([item])
    except BadRequest as error:
        if source.startswith("--"):
            raise
        raise BadRequest(f"{source}: {error.sentence}", **error.fields) from error


# --- the environment ----------------------------------------------------------------------------


def _check_variables(environ: Mapping[str, str]) -> None:
    candidate_directories(environ)  # refuses a relative path, as every other command does
    known = {*(setting.variable for setting in SETTINGS), CONFIG_VARIABLE, *OTHER_VARIABLES}
    for name in sorted(environ):
        is_ours = name.startswith(VARIABLE_PREFIX) and name not in known
        if is_ours and not _TESTS.fullmatch(name) and not _KUBERNETES.fullmatch(name):
            raise BadRequest(
                f"the variable {name} means nothing to serve; {_suggestion(name, known)}",
                variable=name,
            )


def _from_variables(environ: Mapping[str, str]) -> dict[str, Found]:
    found = {}
    for setting in SETTINGS:
        text = environ.get(setting.variable)
        if text:
            found[setting.name] = Found(_variable(setting, text), setting.variable)
    return found


def _variable(setting: Setting, text: str) -> Any:
    try:
        return setting.from_variable(text)
    except ValueError as error:
        raise BadRequest(f"{setting.variable}={text!r}: it {error}") from error


# --- the file -----------------------------------------------------------------------------------


def _from_file(path: str) -> dict[str, Found]:
    found = {}
    for name, value in _read(path).items():
        setting = BY_NAME.get(name)
        if setting is None:
            near = _suggestion(name.replace("_", "-"), BY_NAME)
            raise BadRequest(f"{path}: there is no setting {name!r}; {near}", setting=name)
        try:
            found[name] = Found(setting.from_file(value), path)
        except ValueError as error:
            shown = _shown(value)
            raise BadRequest(f"{path}: {name} {error}, not {shown}", setting=name) from error
    return found


def _read(path: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):  # here, since most starts read no file
        import tomllib
    else:
        import tomli as tomllib
    try:
        with Path(path).open("rb") as file:
            return tomllib.loads(_decoded(file.read(MOST_FILE_BYTES + 1)))
    except FileNotFoundError as error:
        raise NotFound(f"there is no configuration file {path}", path=path) from error
    except OSError as error:
        raise BadRequest(
            f"the configuration file {path} cannot be read ({error.strerror})", path=path
        ) from error
    except RecursionError as error:
        raise BadRequest(
            f"{path} is not a file of settings: nested too deeply", path=path
        ) from error
    except ValueError as error:  # also of bytes that are no UTF-8, and of thousands of digits
        raise BadRequest(f"{path} is not a TOML file: {error}", path=path) from error


def _decoded(data: bytes) -> str:
    if len(data) > MOST_FILE_BYTES:
        raise ValueError(f"it has more than {MOST_FILE_BYTES} bytes")
    return data.decode("utf-8").replace("\r\n", "\n")


def _shown(value: object) -> str:
    """A value of the file in a sentence, cut if it is long."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return "that"


def _suggestion(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, known) or f"known are {', '.join(sorted(known))}"
