"""Where settings come from, which one counts, and what is refused with which words."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from broker.cli import main
from broker.commands.print_config import as_toml
from broker.configuration import CONFIG_VARIABLE, OTHER_VARIABLES, Found, configure
from broker.errors import BadRequest, NotFound
from broker.limits import LIMITS
from broker.settings import BY_NAME, SETTINGS, Kind

ROOT = Path(__file__).parents[1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "broker.toml"


def found(
    options: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    path: Path | None = None,
) -> dict[str, Found]:
    return configure(options or {}, environ or {}, None if path is None else str(path)).settings


# --- which value counts -------------------------------------------------------------------------


def test_precedence(file: Path) -> None:
    """Option before variable before file before default, whatever is left away."""
    file.write_text('memory-limit = "1g"\n')
    option, environ = {"memory_limit": "3g"}, {"WEIGHT_BROKER_MEMORY_LIMIT": "2g"}
    chosen = [
        found(option, environ, file),
        found({}, environ, file),
        found({}, {}, file),
        found(),
    ]
    assert [each["memory-limit"] for each in chosen] == [
        Found("3g", "--memory-limit"),
        Found("2g", "WEIGHT_BROKER_MEMORY_LIMIT"),
        Found("1g", str(file)),
        Found(None, "default"),
    ]


def test_lists_replace_each_other(file: Path) -> None:
    """A list is taken whole from the place that counts most."""
    file.write_text('preload = ["/a", "/b"]\n')
    assert found({}, {}, file)["preload"].value == ["/a", "/b"]
    assert found({}, {"WEIGHT_BROKER_PRELOAD": "/c:/d"}, file)["preload"].value == ["/c", "/d"]
    assert found({"preload": ["/e"]}, {}, file)["preload"].value == ["/e"]


def test_limits_are_taken_one_by_one(file: Path) -> None:
    """Each limit counts by itself, with its own source."""
    file.write_text('[limit]\nsessions = 7\nmanifest_bytes = "1m"\nloaders = 3\n')
    environ = {"WEIGHT_BROKER_LIMIT": "sessions=8, loaders=4"}
    configuration = configure({"limit": ["loaders=5"]}, environ, str(file))
    assert configuration.limits == {
        "sessions": Found(8, "WEIGHT_BROKER_LIMIT"),
        "manifest_bytes": Found(1 << 20, str(file)),
        "loaders": Found(5, "--limit"),
    }
    limits = configuration.broker_config().limits
    assert (limits.sessions, limits.manifest_bytes, limits.loaders) == (8, 1 << 20, 5)


def test_the_file_may_be_named_by_a_variable(file: Path) -> None:
    """$WEIGHT_BROKER_CONFIG names the file where --config does not."""
    file.write_text('name = "a"\n')
    other = file.with_name("other.toml")
    other.write_text('name = "b"\n')
    environ = {CONFIG_VARIABLE: str(file)}
    assert found({}, environ)["name"].value == "a"
    assert found({}, environ, other)["name"].value == "b"


def test_an_empty_variable_is_none() -> None:
    """Files of environment variables often have empty ones."""
    assert found({}, {setting.variable: "" for setting in SETTINGS}) == found()


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("false", False), ("off", False)]
)
def test_switches_as_variables(text: str, value: bool) -> None:
    """A switch is told in the usual words."""
    assert found({}, {"WEIGHT_BROKER_ALLOW_LOADERS": text})["allow-loaders"].value is value


def test_a_switch_of_the_file_is_turned_off_by_its_option(file: Path) -> None:
    """`--no-allow-loaders` counts more than what the file allows."""
    file.write_text("allow-loaders = true\n")
    assert found({}, {}, file)["allow-loaders"].value is True
    assert found({"allow_loaders": False}, {}, file)["allow-loaders"].value is False


def test_everything_at_once(file: Path) -> None:
    """A file that says everything makes the configuration that it says."""
    file.write_text(
        'name = "n"\ndir = "/d"\ndevice = "simulated"\nmemory-limit = "8g"\npreload = ["/m"]\n'
        'allow-loaders = true\ngroup = "12"\nloader-threads = 3\nlog-format = "json"\n'
        'journal-limit = "1m"\nmetrics = "[::1]:9"\nlimit.sessions = 9\n'
    )
    config = configure({}, {}, str(file)).broker_config()
    assert (config.name, config.directory, config.device) == ("n", "/d", "simulated")
    assert (config.memory_limit, config.preload, config.group) == ("8g", ("/m",), 12)
    assert (config.allow_loaders, config.loader_threads) == (True, 3)
    assert (config.log_format, config.journal_limit) == ("json", 1 << 20)
    assert (config.metrics, config.limits.sessions) == ("[::1]:9", 9)


@pytest.mark.parametrize("quote", ["", '"'])
def test_amounts_and_groups_may_be_numbers(file: Path, quote: str) -> None:
    """What is bytes, or the number of a group, needs no quotes in the file."""
    values = {"memory-limit": 1048576, "journal-limit": 0, "group": 0}
    file.write_text("".join(f"{name} = {quote}{n}{quote}\n" for name, n in values.items()))
    config = configure({}, {}, str(file)).broker_config()
    assert (config.memory_limit, config.journal_limit, config.group) == ("1048576", 0, 0)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('memory-limt = "8g"', "there is no setting 'memory-limt'; did you mean memory-limit"),
        ('memory_limit = "8g"', "did you mean memory-limit"),
        ("qqq = 1", "known are allow-loaders"),
        ("[limit]\nsesions = 1", "--limit sesions: there is no such limit; did you mean sessions"),
        ("limit.sessions = 0", "--limit sessions=0"),
        ("limit.sessions = true", "give a whole number"),
        ("limit = 3", "limit must be a table of numbers, not 3"),
        ('loader-threads = "2"', "loader-threads must be a whole number, not '2'"),
        ("loader-threads = true", "loader-threads must be a whole number, not True"),
        ("loader-threads = 0", "must be at least 1"),
        ("loader-threads = 1025", "must be at most 1024"),
        ("loader-threads = 99999999999999999999", "must be 9223372036854775807 at most"),
        ("loader-threads = " + "9" * 5000, "is not a TOML file"),
        ("loader-threads = 0x" + "f" * 5000, "must be 9223372036854775807 at most, not that"),
        ("limit.sessions = 0x" + "f" * 5000, "limit must be 9223372036854775807 at most, not that"),
        ("name = 0x" + "f" * 5000, "name must be a text, not that"),
        ("a = " + "[" * 3000, "nested too deeply"),
        ("# " + "x" * (1 << 20), "more than 1048576 bytes"),
        ('memory-limit = "1e30"', "9223372036854775807 bytes is the most"),
        ('journal-limit = "1e30"', "9223372036854775807 bytes is the most"),
        ('group = "\\u0000"', "there is no group '\\x00'"),
        ('group = "99999999999999"', "there can be no group '99999999999999'"),
        ('name = "../x"', "'../x' cannot be a broker's name"),
        ('name = ""', "'' cannot be a broker's name"),
        ('name = "\\u001b[31m"', "cannot be a broker's name"),
        ('dir = "/tmp/\\u0000"', "no path has a NUL in it"),
        ('preload = ["/a\\u0000b"]', "no path has a NUL in it"),
        ("preload = [1]", "preload must be a list of texts, not [1]"),
        ('log-format = "xml"', "log-format must be text or json, not 'xml'"),
        ("name = 7", "name must be a text, not 7"),
        ('memory-limit = "150%"', "that is more memory than a device has"),
        ('metrics = "9464"', "give an IP address of this machine and a port"),
        ('metrics = "node:9464"', "give an IP address of this machine and a port"),
        ('metrics = "127.0.0.1:99999"', "give an IP address of this machine and a port"),
        ('journal-limit = "1k"', "a journal needs 65536 bytes"),
        ('journal-limit = "-1"', "a journal needs 65536 bytes"),
        ("journal-limit = -1", "a journal needs 65536 bytes"),
        ("memory-limit = true", "memory-limit must be a text or a whole number, not True"),
        ("memory-limit = 0.5", "memory-limit must be a text or a whole number, not 0.5"),
        ("group = -1", "there is no group '-1'"),
        ("group = 0x" + "f" * 5000, "group must be 9223372036854775807 at most, not that"),
        ('journal-limit = "nan"', "that is no number of bytes"),
        ("name = ", "is not a TOML file"),
    ],
)
def test_the_file_is_refused(file: Path, text: str, words: str) -> None:
    """A name or value that means nothing is one sentence with the file's path and a way out."""
    file.write_text(text)
    with pytest.raises(BadRequest) as caught:
        configure({}, {}, str(file)).broker_config()
    assert caught.value.sentence.startswith(str(file))
    assert words in caught.value.sentence


@pytest.mark.parametrize(
    ("typed", "variables"),
    [
        ([], {CONFIG_VARIABLE: "/nope\x1b"}),
        ([], {"WEIGHT_BROKER_X\x1b[31m": "1"}),
        (["--config", "/nope\x1b"], {}),
        (["--nope\x1b"], {}),
    ],
    ids=ascii,
)
def test_nothing_foreign_moves_the_cursor(
    typed: list[str],
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Paths and names that are refused are shown with their escapes written out."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(SystemExit):
        main(["serve", *typed])
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert r"\x1b" in said


def test_no_such_file(file: Path) -> None:
    """A file that is not there is told by its path."""
    with pytest.raises(NotFound, match=re.escape(str(file))):
        configure({}, {}, str(file))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A folder is no file."""
    with pytest.raises(BadRequest, match="cannot be read"):
        configure({}, {}, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("WEIGHT_BROKER_MEMORY_LIMT", "8g", "did you mean WEIGHT_BROKER_MEMORY_LIMIT"),
        ("WEIGHT_BROKER_LOADER_THREADS", "two", "='two': it must be a whole number"),
        ("WEIGHT_BROKER_ALLOW_LOADERS", "maybe", "it must be 1 or true or yes or on"),
        ("WEIGHT_BROKER_MEMORY_LIMIT", "0", "no weights at all would fit"),
        ("WEIGHT_BROKER_LIMIT", "sessions", "give NAME=VALUE"),
        ("WEIGHT_BROKER_LOG_FORMAT", "xml", "it must be text or json"),
        ("WEIGHT_BROKER_DIR", "run", "is a relative path"),
    ],
)
def test_a_variable_is_refused(name: str, text: str, words: str) -> None:
    """A variable of ours that means nothing is one sentence with its name."""
    with pytest.raises(BadRequest) as caught:
        configure({}, {name: text}, None).broker_config()
    assert name in caught.value.sentence
    assert words in caught.value.sentence


@pytest.mark.parametrize(
    "name",
    [
        "WEIGHT_BROKER_TEST_SCALE",
        "WEIGHT_BROKER_SERVICE_HOST",
        "WEIGHT_BROKER_SERVICE_PORT_METRICS",
        "WEIGHT_BROKER_PORT",
        "WEIGHT_BROKER_PORT_9464_TCP_ADDR",
        "WEIGHT_BROKER_METRICS_PORT_9464_TCP",
        "WEIGHT_BROKER_METRICS_SERVICE_HOST",
        *OTHER_VARIABLES,
    ],
)
def test_variables_of_others(name: str) -> None:
    """What tests set, and what Kubernetes tells of a Service of our name, is not ours to judge."""
    assert found({}, {name: "x"}) == found()


def test_no_setting_is_named_as_kubernetes_names_things() -> None:
    """A Service called weight-broker must not look like a setting of ours."""
    for setting in SETTINGS:
        assert not re.search(r"_(SERVICE_HOST|SERVICE_PORT|PORT)\b", setting.variable)


# --- the table ----------------------------------------------------------------------------------


def test_every_variable_in_the_code_is_known() -> None:
    """A variable that some part of the broker reads is not refused by `serve`."""
    folders = (ROOT / "broker", ROOT / "engine_client", ROOT / "tests")
    texts = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    named = set(re.findall(r"WEIGHT_BROKER_(?:CUDA|HIP|NVML|SYSFS|RE)[A-Z_]*", texts))
    assert named == set(OTHER_VARIABLES)


def test_the_documented_table() -> None:
    """docs/configuration.md has each setting's option, variable and text, in order."""
    documented = re.findall(
        r"^\| `(--[\w-]+)` \| `(\w+)` \| (.*) \| (.*) \|$",
        (ROOT / "docs" / "configuration.md").read_text(),
        re.MULTILINE,
    )
    assert documented == [
        (setting.option, setting.variable, shown_default(setting.default), in_a_cell(setting.help))
        for setting in SETTINGS
    ]


def in_a_cell(text: str) -> str:
    """As a page has it, which is rendered: `<uid>` would be a tag, and not be seen."""
    return text.replace("<", "&lt;")


def shown_default(default: object) -> str:
    if default in (None, []):
        return "none"
    if isinstance(default, list):
        return ", ".join(default)
    return str(default).lower() if isinstance(default, bool) else str(default)


# --- printed ------------------------------------------------------------------------------------


def test_what_is_printed_says_the_same(file: Path) -> None:
    """`--print-config` prints a file that leads to the same values, and each value's source."""
    options = {"preload": ['/with "quotes" and \\', "/ü\x7f"], "limit": ["sessions=9"]}
    given = configure(options, {"WEIGHT_BROKER_NAME": "n"}, None)
    printed = as_toml(given)
    assert re.search(r'^name = "n" +# WEIGHT_BROKER_NAME$', printed, re.MULTILINE)
    assert re.search(r"^preload = .* # --preload$", printed, re.MULTILINE)
    assert re.search(r"^sessions = 9 +# --limit$", printed, re.MULTILINE)
    assert re.search(r"^loaders = 8 +# default$", printed, re.MULTILINE)
    file.write_text(printed, "utf-8")
    again = configure({}, {}, str(file))
    assert again.broker_config() == given.broker_config()
    assert set(again.limits) == set(LIMITS)


def test_print_config(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command prints precedence and sources, starts nothing, and refuses what serve would."""
    file.write_text("loader-threads = 3\n")
    assert main(["serve", "--config", str(file), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# An option counts more than a variable")
    assert re.search(rf"^loader-threads = 3 +# {re.escape(str(file))}$", printed, re.MULTILINE)
    monkeypatch.setenv("WEIGHT_BROKER_LOADER_THREADS", "0")
    assert main(["serve", "--config", str(file), "--print-config"]) == BadRequest.exit_code
    assert "WEIGHT_BROKER_LOADER_THREADS: --loader-threads" in capsys.readouterr().err


def test_names() -> None:
    """Option, variable and key of a setting differ in nothing but their spelling."""
    setting = BY_NAME["memory-limit"]
    assert setting.kind is Kind.TEXT_OR_NUMBER
    assert (setting.option, setting.variable) == ("--memory-limit", "WEIGHT_BROKER_MEMORY_LIMIT")
