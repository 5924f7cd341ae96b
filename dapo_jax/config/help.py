"""Text of `--help`: every setting by section, those that people change most first."""

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from dapo_jax.runtime.setting_texts import explain
from dapo_jax.runtime.settings import ConfigError, leaves, nearest

COLUMNS = 80
EVERYTHING = "all"
MAX_CHANGED = (
    "run_dir model.folder data.source data.template reward.parts reward.verifier total_steps "
    "rollout.prompts_per_step rollout.samples_per_prompt data.max_prompt_tokens "
    "sampler.max_response_tokens packing.row_tokens optimizer.learning_rate "
    "evaluation.every_steps seed out start examples_per_step"
).split()
ASKS = ("-h", "--help", "-help", "--helpshort", "--helpfull")


def take_help(arguments: list[str]) -> tuple[str, list[str]]:
    """The section that `--help[=SECTION]` asks for (`all`; empty: none), and other arguments."""
    asked, others, rest = "", [], [*arguments]
    while rest:
        argument = rest.pop(0)
        name, _, value = argument.partition("=")
        if name not in ASKS:
            others.append(argument)
            continue
        if not value and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        asked = value.lower() or EVERYTHING
    return asked, others


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, COLUMNS, initial_indent=indent, subsequent_indent=indent)


def _fill(usage: str) -> str:
    """The text with its paragraphs at the width of a terminal; indented ones stay."""
    parts = usage.strip().split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else _wrap(part, "") for part in parts)


def _sections(config: Any) -> dict[str, str]:
    """The first sentence of every section's docstring, by its dotted name."""
    sentences: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            text = (inspect.getdoc(type(value)) or "").split("\n\n")[0]
            sentences[field.name] = " ".join(text.split())
            inner = _sections(value).items()
            sentences |= {f"{field.name}.{name}": text for name, text in inner}
    return sentences


class _Settings:
    """Settings as help shows them."""

    def __init__(self, config: Any, short_names: Mapping[str, str]):
        self._values = {name: (field, value) for name, field, value in leaves(config)}
        self._defaults = {name: value for name, _, value in leaves(type(config)())}
        self._short = {name: short for short, name in short_names.items()}

    def names(self, section: str | None) -> list[str]:
        """Names of a section's settings; '': of those in no section; None: of all."""
        return [n for n in self._values if section is None or n.rpartition(".")[0] == section]

    def text(self, name: str) -> Iterator[str]:
        """Lines of one setting: flag, value, explanation."""
        field, value = self._values[name]
        flag = self._short.get(name, f"config.{name}")
        other = value != self._defaults[name]
        yield f"  --{flag}={value!r}" + f"  (default {self._defaults[name]!r})" * other
        yield _wrap(explain(field), " " * 6)


def help_text(config: Any, usage: str, asked: str, short_names: Mapping[str, str]) -> str:
    """Help of a command, at most 80 columns wide where no value is longer.

    Args:
        config: the values to show, beside the defaults that they replace.
        usage: purpose and examples of the command.
        asked: a section, or 'all'.
        short_names: settings by the flag that may stand for them.

    Raises:
        ConfigError: there is no such section.
    """
    settings, sections = _Settings(config, short_names), _sections(config)
    if asked != EVERYTHING:
        if asked not in sections:
            hint = nearest(asked, sections)
            raise ConfigError(
                f"--help={asked}: there is no such section{hint} (there are {_list(sections)})"
            )
        names = [n for n in settings.names(None) if n.startswith(f"{asked}.")]
        lines = [_wrap(f"{asked}: {sections[asked]}", "")]
        lines += [line for name in names for line in settings.text(name)]
        return "\n".join(lines)
    lines = [_fill(usage), ""]
    if any("." in name for name in short_names.values()):
        lines += [
            f"  --{short}=..".ljust(22) + f"is --config.{n}=.." for short, n in short_names.items()
        ]
        lines.append("")
    first = [n for n in MAX_CHANGED if n in settings.names(None)]
    groups = {"Changed most": first, "The run": [n for n in settings.names("") if n not in first]}
    groups |= {
        f"{section}: {text}": [n for n in settings.names(section) if n not in first]
        for section, text in sections.items()
    }
    if sections:
        lines += [_wrap(f"--help=SECTION shows one of them alone: {_list(sections)}", ""), ""]
    for title, names in groups.items():
        if names:
            lines += [_wrap(title, "")]
            lines += [line for name in names for line in settings.text(name)] + [""]
    return "\n".join(lines).rstrip()


def _list(sections: Mapping[str, str]) -> str:
    return ", ".join(sections) or "there are none"
