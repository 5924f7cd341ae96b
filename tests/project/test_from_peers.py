"""The pages for users of TRL and verl: settings that exist, and every argument of TRL's configs."""

import pathlib
import re

import pytest
from shown_commands import ROOT

from dapo_jax.config.algorithms import PRESETS
from dapo_jax.config.experiment import Config
from dapo_jax.config.foreign_names import replacements, settings_by_argument
from dapo_jax.config.settings import allowed_values, fields, leaves
from dapo_jax.extras.sft.settings import DpoConfig, SftConfig
from dapo_jax.types.rules import Choices

TRL = (ROOT / "docs/from_trl.md").read_text(encoding="utf-8")
VERL = (ROOT / "docs/from_verl.md").read_text(encoding="utf-8")
ARGUMENTS = pathlib.Path(__file__).with_name("trl_arguments.txt").read_text(encoding="utf-8")
CONFIGS = re.findall(r"^(\w+) ([\d.]+): ([\w\s]+?)(?=\n\n|\Z)", ARGUMENTS, re.MULTILINE)
KINDS = {"SFTConfig": SftConfig, "DPOConfig": DpoConfig}


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def sections(page: str) -> dict[str, str]:
    return dict(text.partition("\n")[::2] for text in page.split("\n## "))


def cells(text: str) -> list[tuple[str, str]]:
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    return [(row[1], row[2]) for row in rows]


def wrong_settings(text: str, kind: type) -> list[str]:
    """Settings of second cells that the config lacks, or whose value it refuses."""
    known, allowed = {name for name, _, _ in leaves(kind())}, fields(kind)
    known |= {name.rpartition(".")[0] for name in known} | set(PRESETS)
    wrong = []
    for code in [code for _, cell in cells(text) for code in codes(cell)]:
        name, _, value = code.partition("=")
        choices = allowed_values(allowed[name]) if name in allowed else None
        refused = value and isinstance(choices, Choices) and not choices(value)
        if name not in known or refused:
            wrong.append(code)
    return wrong


@pytest.mark.parametrize("page", [TRL, VERL], ids=["trl", "verl"])
def test_every_setting_of_ours_exists(page):
    for title, text in sections(page).items():
        assert not wrong_settings(text, KINDS.get(title, Config)), title


@pytest.mark.parametrize(
    "config, version, names", CONFIGS, ids=[config for config, _, _ in CONFIGS]
)
def test_every_argument_of_trl_is_in_a_table_or_named_as_absent(config, version, names):
    text = sections(TRL)[config]
    first = {code.partition("=")[0] for cell, _ in cells(text) for code in codes(cell)}
    (without,) = re.findall(r"No counterpart: (.*?)(?:\n\n|\Z)", text, re.DOTALL)
    absent = set(codes(without))
    listed = names.split()
    assert version == re.search(r"TRL ([\d.]+\d)", TRL)[1]
    assert not [name for name in listed if name not in first | absent]
    assert not [name for name in listed if name in first & absent]


# --- hints about their arguments -----------------------------------------------------------------

SETTINGS = settings_by_argument()
KNOWN = {*fields(Config)} | {name.rpartition(".")[0] for name in fields(Config)} - {""}


@pytest.mark.parametrize("page", [TRL, VERL], ids=["trl", "verl"])
def test_every_argument_of_the_tables_leads_to_a_setting_of_its_row(page):
    rows: dict[str, set[str]] = {}
    tables = [text for title, text in sections(page).items() if title not in KINDS]
    for theirs, ours in [row for text in tables for row in cells(text)]:
        settings = {code.partition("=")[0] for code in codes(ours)} & KNOWN
        for name in re.findall("`([a-z_0-9.]+)[=`]", theirs) if settings else ():
            rows.setdefault(name, set()).update(settings)
    names = {name for name in rows if re.search("[._]", name)} - {"grpo_passk", "dppo_kl"}
    assert len(names) > 50 and names <= SETTINGS.keys()
    assert not {name for name in names if not {*SETTINGS[name].split(", ")} <= rows[name]}


def test_every_setting_of_the_table_exists():
    assert {name for settings in SETTINGS.values() for name in settings.split(", ")} <= KNOWN


def test_the_last_part_of_a_name_is_enough():
    assert replacements("clip_ratio_high") == ["algorithm.clip_high"]
    assert replacements("training_args.learning_rate") == ["optimizer.learning_rate"]
    assert replacements("nothing") == replacements("model.path") == []  # several end in path
