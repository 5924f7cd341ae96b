"""Text of `--help`: every setting by section, the most frequently changed ones first."""

import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from dapo_jax.runtime.settings import ConfigError, explain, leaves, nearest

COLUMNS = 80
EVERYTHING = "all"
CHANGED_MOST = (
    "run_dir model.folder data.source data.template reward.parts reward.verifier total_steps "
    "rollout.prompts_per_step rollout.samples_per_prompt data.max_prompt_tokens "
    "sampler.max_response_tokens packing.row_tokens optimizer.learning_rate "
    "evaluation.every_steps seed out start examples_per_step"
).split()
HELP_FLAGS = ("-h", "--help", "-help", "--helpshort", "--helpfull")


def take_help(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the section of `--help[=SECTION]` (`all`; empty: no help) and other arguments."""
    asked = ""
    others = []
    rest = [*arguments]
    while rest:
        argument = rest.pop(0)
        name, _, value = argument.partition("=")
        if name not in HELP_FLAGS:
            others.append(argument)
            continue
        if not value and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        asked = value.lower() or EVERYTHING
    return asked, others


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, COLUMNS, initial_indent=indent, subsequent_indent=indent)


def _sections(config: Any, prefix: str = "") -> dict[str, str]:
    """Return the first paragraph of every section's docstring by the section's dotted name."""
    texts: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            name = f"{prefix}{field.name}"
            text = (inspect.getdoc(type(value)) or "").split("\n\n")[0]
            texts[name] = " ".join(text.split())
            texts |= _sections(value, f"{name}.")
    return texts


def help_text(config: Any, usage: str, asked: str, short_names: Mapping[str, str]) -> str:
    """Return the help of a command, or of a section, with the values of `config`.

    `short_names` has settings by their short flags. Raises `ConfigError` for an unknown section.
    """
    defaults = {name: value for name, _, value in leaves(type(config)())}
    flags = {name: short for short, name in short_names.items()}
    sections = _sections(config)
    names = ", ".join(sections) or "there are none"
    entries: dict[str, list[str]] = {}
    for name, field, value in leaves(config):
        shown = f"  --{flags.get(name, f'config.{name}')}={value!r}"
        if value != defaults[name]:
            shown += f"  (default {defaults[name]!r})"
        entries[name] = [shown, _wrap(explain(field), " " * 6)]
    if asked != EVERYTHING:
        if asked not in sections:
            hint = nearest(asked, sections)
            raise ConfigError(f"--help={asked}: there is no such section{hint} (there are {names})")
        lines = [_wrap(f"{asked}: {sections[asked]}")]
        for name, entry in entries.items():
            lines += entry if name.startswith(f"{asked}.") else []
        return "\n".join(lines)
    paragraphs = usage.strip().split("\n\n")
    lines = ["\n\n".join(p if p.startswith(" ") else _wrap(p) for p in paragraphs), ""]
    if any("." in name for name in flags):
        lines += [f"  --{short}=..".ljust(22) + f"is --config.{n}=.." for n, short in flags.items()]
        lines.append("")
    if sections:
        lines += [_wrap(f"--help=SECTION shows a single section: {names}"), ""]
    # A config of one section has its settings in the order of their importance.
    most = CHANGED_MOST if len(sections) > 1 else ()
    groups = {"Changed most": [entries.pop(name) for name in most if name in entries]}
    for section, text in {"": "The run" if most else "Settings", **sections}.items():
        title = f"{section}: {text}" if section else text
        groups[title] = [e for name, e in entries.items() if name.rpartition(".")[0] == section]
    for title, group in groups.items():
        if group:
            lines += [_wrap(title), *(line for entry in group for line in entry), ""]
    return "\n".join(lines).rstrip()
