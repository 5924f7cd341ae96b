"""Command lines of the shipped configs, and helpers that run commands in this process."""

import pathlib
import sys
from unittest import mock

import pytest

from dapo_jax.run import command_line
from dapo_jax.runtime import registry

ROOT = pathlib.Path(__file__).parents[2]
RL = f"--config={ROOT}/configs/arithmetic.py"
BASE = f"--config={ROOT}/configs/arithmetic_base.py"


def load(kind, *arguments, usage=""):
    with mock.patch.object(sys, "argv", ["prog", *arguments]):
        return command_line.load(kind, usage)


def refusal(kind, arguments: list[str], capsys) -> str:
    """Return the line about arguments that `load` rejects."""
    with pytest.raises(SystemExit) as stopped:
        load(kind, *arguments)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.startswith("error: "), message
    assert len(message.splitlines()) == 1, message
    return message


def run(command: str, arguments: list[str], monkeypatch, capsys) -> tuple[int, str]:
    code, _, error = run_shown(command, arguments, monkeypatch, capsys)
    return code, error


def run_shown(command: str, arguments: list[str], monkeypatch, capsys) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of a command."""
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    try:
        code = registry.find("commands", command)()
    except SystemExit as stopped:
        code = stopped.code
    return code, *capsys.readouterr()
