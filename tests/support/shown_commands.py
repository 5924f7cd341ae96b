"""The commands that documentation shows, and the problems of each.

A command is a line of a ```bash fence, a line after "$ " in any other, or inline code that begins
like a command; flags of runs may stand alone (`--config.seed=1`). `CHECKS` load settings, read
arguments and look for files; they start nothing. A fence with a command that no check knows needs
the reason: ```bash hardware, cloud or network.
"""

import argparse
import contextlib
import io
import pathlib
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator

import pytest
from _pytest.mark.expression import Expression
from markdown_it import MarkdownIt
from markdown_it.token import Token

from dapo_jax.commands.main import COMMANDS
from dapo_jax.config.experiment import Config, ExportConfig
from dapo_jax.config.settings import leaves
from dapo_jax.extras.report.command import ReportConfig
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.extras.sft.settings import DpoConfig, SftConfig
from dapo_jax.run import command_line
from dapo_jax.runtime import registry

ROOT = pathlib.Path(__file__).parents[2]
NOT_HERE = {"torch"}  # a package that a script of the repository needs and tests do without
MARKERS = {"hardware", "cloud", "network"}
KINDS = [Config, SftConfig, DpoConfig, ExportConfig, ServeConfig, ReportConfig]
FILE = "configs/arithmetic.py"
PLACEHOLDERS = {"--config=FILE": f"--config={FILE}", "--config=...": f"--config={FILE}"}
PLACEHOLDERS |= {"mine/config.py": FILE, "my/config.py": FILE}  # `dapo-jax init` writes them
# If flags stand alone, one of these commands has to take them.
BASES = (
    f"train --config={FILE}",
    f"train --config={FILE}:ppo",
    "train --config=configs/qwen2p5_0p5b_gsm8k.py",
    "sft --config=configs/arithmetic_base.py",
    "dpo --config.data.source=FILE --config.start=FOLDER",
)


def tokens_of(page: pathlib.Path) -> list[Token]:
    """Return the blocks of a page, each followed by its inline tokens."""
    blocks = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return [token for block in blocks for token in (block, *(block.children or ()))]


def split_commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of shell text as words, without comments, here-documents, variables."""
    text = re.sub(r"<<'?(\w+)'?([^\n]*)\n.*?^\1$", r"\2", text, flags=re.DOTALL | re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words:
                    yield words
                words = []
            elif words or not re.match(r"[A-Z_]+=", word):
                words.append(word)


def commands_of(page: pathlib.Path) -> Iterator[tuple[list[str], str]]:
    """Yield the commands of a page, each with the reason why it needs no check, or ""."""
    for token in tokens_of(page):
        if token.type == "fence":
            language, *markers = token.info.lower().split() or [""]
            text = token.content
            if language != "bash":
                text = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", text, re.MULTILINE))
            excuse = " ".join(MARKERS.intersection(markers))
            yield from ((words, excuse) for words in split_commands(text))
        elif token.type == "code_inline" and BEGINS_A_COMMAND.match(token.content):
            yield from ((words, "inline") for words in split_commands(token.content))


class Accepted(Exception):
    """The command line was read and is valid."""


def and_stop(function: Callable) -> Callable:
    """Return a function that raises `Accepted` after the call, without the check of folders."""

    def read(*arguments, check_output=None, **options):
        function(*arguments, **options)
        raise Accepted

    return read


def refusal(arguments: list[str], owner: object, readers: str, work: Callable[[], object]) -> str:
    """Return the error message of a program about its command line.

    `readers` are names of functions of `owner`, after which the program is stopped.
    """
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.setattr(sys, "argv", ["program", *arguments])
        for reader in readers.split():
            patch.setattr(owner, reader, and_stop(getattr(owner, reader)))
        try:
            with contextlib.redirect_stdout(None):
                work()
        except Accepted:
            return ""
        except SystemExit as error:
            text = errors.getvalue().strip() if error.code else ""
            lacks = "pip install '.[" in text or "without the package" in text
            return "" if lacks else text  # tests do without these packages
        except ModuleNotFoundError as error:
            if error.name in NOT_HERE:
                return ""
            raise
    return "it did not read its arguments"


def check_command(words: list[str]) -> str:
    """Load and check the settings of `dapo-jax COMMAND`."""
    name, *arguments = (PLACEHOLDERS.get(word, word) for word in words[1:] or ["--help"])
    if name not in COMMANDS:
        is_name = not arguments and name in ("--help", "--help-all", "COMMAND")
        return "" if is_name else "no such command"
    if not arguments:
        return ""
    if name in ("configs", "completion"):  # they only print

        def prints() -> None:
            if registry.find("commands", name)() == 0:
                raise Accepted

        return refusal(arguments, command_line, "", prints)
    return refusal(arguments, command_line, "load", registry.find("commands", name))


def check_flags(words: list[str]) -> str:
    """Check flags alone: a command takes them. Without a value, only the name is checked."""
    if any(word.startswith("--config=") for word in words):
        return check_command(["dapo-jax", "train", *words])
    known = {f"--config.{name}" for kind in KINDS for name, _, _ in leaves(kind())}
    bare = [word.rstrip("=") for word in words if re.fullmatch(r"[^=]*=?", word)]
    if bare:
        return "".join(f"{name}: no such setting" for name in bare if name not in known)
    problems = [check_command(["dapo-jax", *base.split(), *words]) for base in BASES]
    return "" if "" in problems else problems[0]


def selects(expression: str, files: list[pathlib.Path]) -> bool:
    """Return whether `-k expression` selects a test of these files by its name."""
    matcher = Expression.compile(expression)
    texts = {file.name: re.findall(r"^ *def (test_\w+)", file.read_text(), re.M) for file in files}
    names = [f"{file}::{name}".lower() for file, tests in texts.items() for name in tests]
    return any(matcher.evaluate(lambda word, name=name: word.lower() in name) for name in names)


def check_pytest(words: list[str]) -> str:
    """Look for the files of a call of pytest, a test that `-k` selects and the marks of `-m`."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("-k")
    parser.add_argument("-m", default="")
    for flag in "-q", "-s", "--quick", "--write-durations":
        parser.add_argument(flag, action="store_true")
    try:
        given = parser.parse_args(words[1:])
    except (argparse.ArgumentError, SystemExit) as error:
        return f"pytest: {error}"
    missing = [str(file) for file in given.files if not (ROOT / file).exists()]
    if missing:
        return f"no such file: {missing}"
    if set(re.findall(r"\w+", given.m)) - {"slow", "not", "or", "and"}:
        return f"-m {given.m}: no such mark"
    files = [ROOT / file for file in given.files] or sorted(ROOT.glob("tests/*/test_*.py"))
    return "" if not given.k or selects(given.k, files) else f"-k {given.k}: selects no test"


def check_shell_script(words: list[str]) -> str:
    """Check `bash X.sh`: its text has its own flags, and the others are those of a run."""
    script, arguments = ROOT / words[1], words[2:]
    if not script.is_file():
        return f"no such file: {words[1]}"
    if words[1] == "tests/run.sh":
        return check_pytest(["pytest", *arguments])
    run = [word for word in arguments if word.startswith("--config")]
    text = script.read_text() + (ROOT / "launch/lib.sh").read_text()
    for word in arguments:
        flag = word.partition("=")[0]
        if re.match("--[a-z]", word) and word not in run:
            if not re.search(rf"{flag}(=\*)?( \||\))", text):
                return f"{words[1]} has no flag {flag}"
    default = [] if any(word.startswith("--config=") for word in run) else [f"--config={FILE}"]
    return check_command(["dapo-jax", "train", *default, *run]) if run else ""


def check_python_script(words: list[str]) -> str:
    """`python X.py`: it is run until it has read its arguments."""
    script, arguments = ROOT / words[0], words[1:]
    if not script.is_file():
        return f"no such file: {words[0]}"
    if not re.search("ArgumentParser|read_arguments", script.read_text()):
        flags = [word for word in arguments if word.startswith("-")]
        return f"it takes no flags: {flags}" if flags else ""
    return refusal(
        arguments,
        argparse.ArgumentParser,
        "parse_args parse_known_args",
        lambda: runpy.run_path(str(script), run_name="__main__"),
    )


def check_pip(words: list[str]) -> str | None:
    project = re.fullmatch(r"(?:dapo_jax|\.)(?:\[([\w,]+)\])?", words[-1])
    if words[1] != "install" or not project:
        return None
    setup = (ROOT / "setup.py").read_text()
    missing = [e for e in (project[1] or "").split(",") if e and f'"{e}": [' not in setup]
    return f"no such extra: {missing}" if missing else ""


CHECKS: dict[str, Callable[[list[str]], str | None]] = {
    r"dapo[-_]jax": check_command,
    r"--config.*": check_flags,
    r"pytest": check_pytest,
    r"bash": check_shell_script,
    r"[\w/]+\.py": check_python_script,
    r"pip": check_pip,
    r"ruff|tensorboard|mkdocs|cat|echo|mkdir|printf": lambda words: "",
}
BEGINS_A_COMMAND = re.compile(
    r"([A-Z_]+=\S+ )*((\S*/)?python3?|dapo-jax|bash|pytest|pip|ruff|tensorboard|mkdocs) \S"
    r"|--config[.=]\w"
)


def what_is_wrong(words: list[str]) -> str | None:
    """Return the problem of a command or ""; None if no check knows it."""
    if re.fullmatch(r"(.*/)?python3?", words[0]):
        words = words[2:] if words[1:2] == ["-m"] else words[1:]
    elif words[0].startswith((".venv/bin/", "./")):
        words = [pathlib.Path(words[0]).name, *words[1:]]
    for pattern, check in CHECKS.items():
        if words and re.fullmatch(pattern, words[0]):
            return check(words)
    return None
