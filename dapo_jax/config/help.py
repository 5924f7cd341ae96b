"""Text of `--help`: the settings changed most, all of them, or those that a word names."""

import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from dapo_jax.config.settings import defaults, explain, leaves, sections
from dapo_jax.types.errors import ConfigError, nearest

COLUMNS = 80
SHORT, EVERYTHING = "--help", "all"
SHOWN_SETTINGS = 10  # by --help
CHANGED_MOST = (
    "run_dir out model.folder start data.source data.template reward.parts total_steps "
    "rollout.prompts_per_step sampler.max_response_tokens optimizer.learning_rate seed "
    "reward.verifier rollout.samples_per_prompt data.max_prompt_tokens packing.row_tokens "
    "evaluation.every_steps examples_per_step"
).split()
HELP_FLAGS = dict.fromkeys(("h", "help", "helpshort"), SHORT)
HELP_FLAGS |= dict.fromkeys(("help-all", "help_all", "helpfull"), EVERYTHING)


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, COLUMNS, initial_indent=indent, subsequent_indent=indent)


def help_text(config: Any, usage: str, topic: str, short_names: Mapping[str, str]) -> str:
    """Return the help of a command with the values of `config`.

    `topic` is `SHORT`, `EVERYTHING`, a section or a word in names or texts; raises `ConfigError`
    for any other. `short_names` has settings by their short flags.
    """
    titles = {}
    for name, section in sections(config):
        paragraph = (inspect.getdoc(type(section)) or "").split("\n\n")[0]
        titles[name] = f"{name}: {' '.join(paragraph.split())}"
    flags = {name: short for short, name in short_names.items()}
    usual, entries = defaults(type(config)), {}
    for name, field, value in leaves(config):
        line = f"  --{flags.get(name, f'config.{name}')}={value!r}"
        line += f"  (--config.{name})" * (name in flags and "." in name)
        line += f"  (default {usual[name]!r})" * (value != usual[name])
        entries[name] = f"{line}\n{_wrap(explain(field), ' ' * 6)}"
    # A config of one section has its settings in the order of their importance.
    most = [name for name in CHANGED_MOST if name in entries and len(titles) > 1]
    paragraphs = usage.strip().split("\n\n")
    ending = "--help-all explains every setting, --help=SECTION a section, and --help=WORD all"
    ending += f" settings with that word in name or text. Sections: {', '.join(titles) or 'none'}"
    if topic == SHORT:
        own_flags = re.findall(r"^  (--\w+)", usage, re.MULTILINE)
        paragraphs[2:] = [f"Flags: {' '.join(own_flags)}"] * bool(own_flags)
        first = [name for name in flags if "." in name]
        shown = [*dict.fromkeys([*first, *most, *entries])][:SHOWN_SETTINGS]
        groups = {"Changed most" if most else "Settings": shown}
    elif topic == EVERYTHING:
        groups = {"Changed most": most}
        for name, title in {"": "The run" if most else "Settings", **titles}.items():
            own = [n for n in entries if n.rpartition(".")[0] == name and n not in most]
            groups[title] = own
        groups = {title: names for title, names in groups.items() if names}
    else:
        groups, paragraphs, ending = _search(topic, entries, titles), [], ""
    shown = [p if p.startswith(" ") else _wrap(p) for p in paragraphs]
    for title, names in groups.items():
        shown.append("\n".join([*[_wrap(title)] * bool(title), *(entries[n] for n in names)]))
    return "\n\n".join([*shown, *[_wrap(ending)] * bool(ending)])


def _search(
    word: str, entries: Mapping[str, str], titles: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return a section with its settings, or every setting with the word in name or text."""
    word = f"extras.{word}" if f"extras.{word}" in titles else word
    if word in titles:
        return {titles[word]: [name for name in entries if name.startswith(f"{word}.")]}
    about = [f"{t} (--help={name})" for name, t in titles.items() if word in t.lower()]
    matches = [n for n, entry in entries.items() if word in " ".join(entry.split()).lower()]
    if not (about or matches):
        hint = nearest(word, [*titles, *entries]) or f"; sections are {', '.join(titles)}"
        raise ConfigError(f"--help={word}: no section, setting or text has that word{hint}")
    return {**{title: [] for title in about}, "": matches}
