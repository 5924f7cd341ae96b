"""Arguments of TRL and verl in error messages are those of docs/from_trl.md, docs/from_verl.md."""

import re

import pytest
from command_lines import ROOT

from dapo_jax.config.experiment import Config
from dapo_jax.config.foreign_names import advice, settings_by_argument
from dapo_jax.config.settings import leaves

KNOWN = {name for name, _, _ in leaves(Config())}
KNOWN |= {name.rpartition(".")[0] for name in KNOWN} - {""}
SETTINGS = settings_by_argument()
SUPERVISED = ("## SFTConfig", "## DPOConfig")


def replaced(page: str) -> list[tuple[str, set[str]]]:
    """Return the arguments of a page's tables, each with the settings of its row."""
    pairs = []
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        for line in section.splitlines() if not section.startswith(SUPERVISED) else ():
            cells = line.split("|") if line.startswith("| ") else ["", "", ""]
            ours = {code.partition("=")[0] for code in re.findall("`([^`]+)`", cells[2])} & KNOWN
            names = re.findall("`([a-z_0-9.]+)[=`]", cells[1])
            pairs += [(name, ours) for name in names if ours and re.search("[._]", name)]
    return pairs


@pytest.mark.parametrize("page", ["from_trl", "from_verl"])
def test_every_argument_of_the_tables_leads_to_a_setting_of_its_row(page):
    pairs = replaced(page)
    assert len(pairs) > 50
    rows: dict[str, set[str]] = {}
    for name, ours in pairs:
        rows.setdefault(name, set()).update(ours)
    missing = {n for n in rows if n not in SETTINGS} - {"grpo_passk", "dppo_kl"}  # values
    wrong = {
        n: (SETTINGS[n], ours)
        for n, ours in rows.items()
        if n in SETTINGS and not set(SETTINGS[n].split(", ")) <= ours
    }
    assert not missing and not wrong


def test_every_setting_of_the_table_exists():
    assert {name for settings in SETTINGS.values() for name in settings.split(", ")} <= KNOWN


def test_the_last_part_of_a_name_is_enough():
    assert advice("clip_ratio_high") == "--config.algorithm.clip_high"
    assert advice("training_args.learning_rate") == "--config.optimizer.learning_rate"
    assert advice("nothing") == advice("model.path") == ""  # several end in path
