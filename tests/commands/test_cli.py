"""The command line itself: help, version, what is misspelt, completion, exit codes."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from broker import VERSION, cli, errors
from broker.__main__ import EXIT_INTERRUPTED, run
from broker.cli import main, make_parser
from broker.commands import life
from broker.commands.completion import SHELLS
from broker.errors import BadRequest, BrokerError

ROOT = Path(__file__).parents[2]


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(action.choices)


COMMANDS = sorted(commands())
Capture = pytest.CaptureFixture[str]


def refused(arguments: list[str], capsys: Capture) -> str:
    """What standard error has when the command line is not one."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == BadRequest.exit_code
    return capsys.readouterr().err


# --- help ---------------------------------------------------------------------------------------


def examples_of(command: str) -> list[str]:
    return re.findall(r"^  weight-broker (.*)$", commands()[command].format_help(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does, every option with a text, examples; no line is too long for a terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    parser = commands()[command]
    text = parser.format_help()
    assert parser.description
    assert all(action.help for action in parser._actions)
    assert examples_of(command)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_can_be_typed(command: str) -> None:
    """Each example is a command line of its command, whatever follows in the shell."""
    for example in examples_of(command):
        words = shlex.split(re.split(r" [|>]", example)[0])
        assert words[0] == command
        assert make_parser().parse_args(words).command


def test_every_command_is_in_the_readme() -> None:
    """A new user sees each command where the others are."""
    readme = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"weight-broker {name}" not in readme] == []


def test_version(capsys: Capture) -> None:
    """`--version` says which."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"weight-broker {VERSION}\n"


# --- misspelt -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "meant"), [("stauts", "status"), ("publsh", "publish"), ("sutdown", "shutdown")]
)
def test_did_you_mean(word: str, meant: str, capsys: Capture) -> None:
    """A command that is nearly one is answered with that one."""
    assert f"there is no command {word!r}; did you mean {meant}" in refused([word], capsys)


def test_no_such_command(capsys: Capture) -> None:
    """A command that is like none is answered with all."""
    said = refused(["frobnicate"], capsys)
    assert all(name in said for name in COMMANDS)


MISSPELT = [
    ("serve --memory-limt 4g", "--memory-limt", "--memory-limit"),
    ("publish /m --nme prod", "--nme", "--name"),
    ("status --jsn", "--jsn", "--json"),
    ("report --lst=2h x.html", "--lst", "--last"),
    ("ping --frobnicate", "--frobnicate", ""),
]


@pytest.mark.parametrize(("typed", "option", "meant"), MISSPELT)
def test_a_misspelt_option(typed: str, option: str, meant: str, capsys: Capture) -> None:
    """The usage of that command, the word that is wrong, and the option that it is near to."""
    said = refused(typed.split(), capsys)
    command = typed.split()[0]
    assert said.startswith(f"usage: weight-broker {command} ")
    hint = f"; did you mean {meant}?" if meant else ""
    assert said.endswith(f"weight-broker {command}: error: there is no option {option}{hint}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_knows_its_options(command: str, capsys: Capture) -> None:
    """A long option whose last letter is wrong is answered with the right one."""
    for action in commands()[command]._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                typed = option[:-1] + "_"
                assert f"no option {typed}; did you mean {option}?" in refused(
                    [command, typed], capsys
                )


def test_an_option_before_the_command(capsys: Capture) -> None:
    """It is told that its place is wrong; its value is not taken for a command."""
    said = refused(["--dir", "/tmp", "status"], capsys)
    assert said.endswith("error: there is no option --dir before COMMAND\n")


def test_words_that_are_no_options(capsys: Capture) -> None:
    """What follows `--`, or has a space, is an argument; one too many is told by its command."""
    parsed = cli._parsed(["evict", "--", "--nme"])
    assert parsed.set == "--nme"
    assert cli._parsed(["evict", "--my set"]).set == "--my set"
    said = refused(["list", "prod", "\x1b[2J"], capsys)
    assert said.startswith("usage: weight-broker list ")
    assert said.endswith("error: it has no argument for 'prod' '\\x1b[2J'\n")


@pytest.mark.parametrize("typed", ["--preload A B", "--preload=A B --device simulated"])
def test_several_values_of_an_option(typed: str, capsys: Capture) -> None:
    """An option that may be given several times takes one value each time, and is said to."""
    said = refused(["serve", *typed.split()], capsys)
    assert said.endswith("it has no argument for 'B'; --preload is given once for each value\n")
    assert "once for each" not in refused(["serve", "--name", "a", "B"], capsys)


def test_abbreviated_options() -> None:
    """What begins one option only stands for it, as argparse has it."""
    assert cli._parsed(["serve", "--memory-l", "4g"]).memory_limit == "4g"


@pytest.mark.parametrize(
    ("typed", "missing"),
    [
        ("publish /m prod", "--name is missing: the name whose newest generation it becomes"),
        ("publish --name prod", "path is missing: a folder, or one safetensors file"),
        ("evict", "set is missing: a set's id, name or content identity"),
        ("report", "OUT.html is missing: the page"),
        ("completion", "shell is missing: bash, zsh or fish"),
        ("", "COMMAND is missing"),
    ],
)
def test_something_is_missing(typed: str, missing: str, capsys: Capture) -> None:
    """What is missing is named, and what belongs there said."""
    assert f"error: {missing}" in refused(typed.split(), capsys)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("serve --memory-limit -1g", "--memory-limit lacks its value; one that begins with a dash"),
        ("report --last -1h", "goes in --last=VALUE"),
        ("serve --memory-limit", "--memory-limit lacks its value"),
        ("serve --loader-threads x", "--loader-threads must be a whole number, not 'x'"),
    ],
)
def test_a_value_is_missing_or_no_number(typed: str, words: str, capsys: Capture) -> None:
    """It is said what belongs there, and how a value is given that looks like an option."""
    assert words in refused(typed.split(), capsys).partition("error: ")[2]


@pytest.mark.parametrize("option", ["--name", "--generation"])
def test_a_label_that_cannot_be(option: str, capsys: Capture) -> None:
    """Name and generation are looked at before a broker is asked, and named as they are typed."""
    typed = ["publish", "/m", "--name", "prod", option, ""]
    assert main(typed) == BadRequest.exit_code
    said = f"weight-broker: {option} '': give a printable name of 1 to 256 bytes\n"
    assert capsys.readouterr().err == said


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Ctrl-C is told, with what a command has to say about it."""

    def interrupted(_options: argparse.Namespace) -> None:
        raise KeyboardInterrupt("gave up waiting")

    monkeypatch.setattr(life, "observe", interrupted)
    assert main(["upgrade"]) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "weight-broker: interrupted: gave up waiting\n"


def test_interrupted_before_there_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Ctrl-C while the command line is still being imported is an exit code, and no traceback."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    assert run() == EXIT_INTERRUPTED
    assert capsys.readouterr() == ("", "")


# --- output that cannot be written --------------------------------------------------------------


@pytest.mark.parametrize("command", [["serve", "--print-config"], ["completion", "bash"]])
def test_output_to_a_full_disk(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """One sentence and the documented code; the end of the process has nothing left to write."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(command) == BadRequest.exit_code
    assert "standard output cannot be written (No space left" in capsys.readouterr().err


def test_output_to_a_terminal_without_the_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its encoding has not is written as an escape."""
    monkeypatch.setenv("WEIGHT_BROKER_DIR", "/tmp/ü")
    written = tmp_path / "out"
    with written.open("w", encoding="ascii") as ascii_only:
        monkeypatch.setattr("sys.stdout", ascii_only)
        assert main(["serve", "--print-config"]) == 0
    assert r'dir = "/tmp/\xfc"' in written.read_text()


# --- completion ---------------------------------------------------------------------------------


@pytest.fixture(params=SHELLS)
def completion(request: pytest.FixtureRequest, tmp_path: Path, capsys: Capture) -> tuple[str, Path]:
    """A shell that is here, and its script."""
    shell: str = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    assert main(["completion", shell]) == 0
    script = tmp_path / f"script.{shell}"
    script.write_text(capsys.readouterr().out)
    return shell, script


def test_completion_scripts(completion: tuple[str, Path]) -> None:
    """Each shell can read its script."""
    shell, script = completion
    done = subprocess.run(
        [shell, "-n", str(script)], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


ASK_BASH = """
source "$0"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_weight_broker
printf '%s\\n' "${COMPREPLY[@]}"
"""
ASK_FISH = 'source $argv[1]; complete -C "$argv[2..]" | cut -f 1'


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("weight-broker sta", "status"),
        ("weight-broker serve --log-f", "--log-format"),
        ("weight-broker completion fi", "fish"),
    ],
)
def test_what_is_completed(completion: tuple[str, Path], typed: str, offered: str) -> None:
    """Commands, options and their values."""
    shell, script = completion
    if shell == "zsh":
        pytest.skip("zsh completes on a terminal only")
    words = typed.split()
    ask = ["bash", "-c", ASK_BASH, str(script), *words]
    if shell == "fish":
        ask = ["fish", "--no-config", "-c", ASK_FISH, str(script), *words]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.split() == [offered]


def test_completion_knows_every_command(completion: tuple[str, Path]) -> None:
    """No command is forgotten."""
    text = completion[1].read_text()
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", text)] == []


# --- exit codes ---------------------------------------------------------------------------------


def test_exit_codes_are_documented() -> None:
    """docs/exit-codes.md has each code once, in order, with every error that gives it."""
    table = re.findall(
        r"^\| (\d+) \| .* \| (.*)\|$",
        (ROOT / "docs" / "exit-codes.md").read_text(),
        re.MULTILINE,
    )
    documented = {int(code): re.findall(r"`(\w+)`", named) for code, named in table}
    classes = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, BrokerError) and each is not BrokerError
    ]
    expected: dict[int, list[str]] = {0: [], EXIT_INTERRUPTED: []}
    for each in sorted(classes, key=lambda error: error.__name__):
        expected.setdefault(each.exit_code, []).append(each.__name__)
    assert documented == expected
    assert [int(code) for code, _named in table] == sorted(expected)
