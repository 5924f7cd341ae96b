"""Text of `--help`: the settings changed most, all of them, or those that a word names."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.config.settings import defaults, explain, leaves
from dapo_jax.types.errors import ConfigError, nearest

COLUMNS = 80
NAME_COLUMNS = 39
SHORT, EVERYTHING = "--help", "all"
SHOWN_SETTINGS = 10  # by --help
CHANGED_MOST = (
    "run_dir out model.folder start data.source data.template reward.parts total_steps "
    "rollout.prompts_per_step sampler.max_response_tokens optimizer.learning_rate seed "
    "reward.verifier rollout.samples_per_prompt data.max_prompt_tokens packing.row_tokens "
    "evaluation.every_steps examples_per_step"
).split()
HELP_FLAGS = {"-h": SHORT, "--help": SHORT, "-help": SHORT, "--helpshort": SHORT}
HELP_FLAGS |= {"--help-all": EVERYTHING, "--help_all": EVERYTHING, "--helpfull": EVERYTHING}


def take_help(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the topic of the help and the other arguments.

    The topic is `SHORT`, `EVERYTHING`, the word of `--help=WORD`, or empty: no help.
    """
    topic, others, rest = "", [], [*arguments]
    while rest:
        argument = rest.pop(0)
        name, _, value = argument.partition("=")
        if name not in HELP_FLAGS:
            others.append(argument)
            continue
        if not value and HELP_FLAGS[name] == SHORT and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        topic = value.lower() or HELP_FLAGS[name]
    return topic, others


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, COLUMNS, initial_indent=indent, subsequent_indent=indent)


def _wrap_usage(usage: str, paragraphs: int | None = None) -> str:
    """Return the first paragraphs of a usage, or all of them; code keeps its lines."""
    shown = usage.strip().split("\n\n")[:paragraphs]
    return "\n\n".join(p if p.startswith(" ") else _wrap(p) for p in shown)


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


def help_text(config: Any, usage: str, topic: str, short_names: Mapping[str, str]) -> str:
    """Return the help of a command with the values of `config`; `topic` is that of `take_help`.

    `short_names` has settings by their short flags. Raises `ConfigError` for an unknown word.
    """
    usual = defaults(type(config))
    flags = {name: short for short, name in short_names.items()}
    sections = _sections(config)
    entries, lines = {}, {}
    for name, field, value in leaves(config):
        flag = f"  --{flags.get(name, f'config.{name}')}"
        changed = f"  (default {usual[name]!r})" * (value != usual[name])
        entries[name] = f"{flag}={value!r}{changed}\n{_wrap(explain(field), ' ' * 6)}"
        first, indent = f"{flag:<{NAME_COLUMNS - 1}} ", " " * NAME_COLUMNS
        text = field.metadata["explanation"]
        lines[name] = textwrap.fill(text, COLUMNS, initial_indent=first, subsequent_indent=indent)
    # A config of one section has its settings in the order of their importance.
    most = CHANGED_MOST if len(sections) > 1 else ()
    if topic == EVERYTHING:
        return _everything(usage, flags, entries, sections, most)
    if topic != SHORT:
        return _search(topic, entries, sections)
    short_first = flags if any("." in name for name in flags) else ()
    order = dict.fromkeys(n for n in [*short_first, *most, *entries] if n in entries)
    own_flags = re.findall(r"^  (--\w+)", usage, re.MULTILINE)
    shown = [_wrap_usage(usage, 2), ""]
    shown += [_wrap(f"Flags: {' '.join(own_flags)}"), ""] if own_flags else []
    shown += ["Changed most" if most else "Settings"]
    shown += [lines[name] for name in [*order][:SHOWN_SETTINGS]]
    ending = "--help-all explains every setting, --help=SECTION a section, and --help=WORD all"
    ending += f" settings with that word in name or text. Sections: {', '.join(sections) or 'none'}"
    return "\n".join([*shown, "", _wrap(ending)])


def _search(word: str, entries: Mapping[str, str], sections: Mapping[str, str]) -> str:
    """Return a section with its settings, or every setting with the word in name or text."""
    word = f"extras.{word}" if f"extras.{word}" in sections else word
    if word in sections:
        own = [entry for name, entry in entries.items() if name.startswith(f"{word}.")]
        return "\n".join([_wrap(f"{word}: {sections[word]}"), *own])
    about = [name for name, text in sections.items() if word in f"{name} {text}".lower()]
    matches = [entry for entry in entries.values() if word in " ".join(entry.split()).lower()]
    if not (about or matches):
        hint = nearest(word, [*sections, *entries]) or f"; sections are {', '.join(sections)}"
        raise ConfigError(f"--help={word}: no section, setting or text has that word{hint}")
    titles = [_wrap(f"{name}: {sections[name]} (--help={name})") for name in about]
    return "\n".join([*titles, *matches])


def _everything(
    usage: str,
    flags: Mapping[str, str],
    entries: Mapping[str, str],
    sections: Mapping[str, str],
    most: Sequence[str],
) -> str:
    """Return the usage, short flags, what is changed most, and the other settings by section."""
    short = [f"{f'  --{f}=..':<22}is --config.{n}=.." for n, f in flags.items() if "." in n]
    shown = [_wrap_usage(usage), *["\n".join(short)] * bool(short)]
    if sections:
        shown.append(_wrap(f"--help=SECTION shows a single section: {', '.join(sections)}"))
    groups = {"Changed most": [name for name in most if name in entries]}
    for section, text in {"": "The run" if most else "Settings", **sections}.items():
        own = [name for name in entries if name.rpartition(".")[0] == section and name not in most]
        groups[f"{section}: {text}" if section else text] = own
    for title, names in groups.items():
        if names:
            shown.append("\n".join([_wrap(title), *(entries[name] for name in names)]))
    return "\n\n".join(shown)
