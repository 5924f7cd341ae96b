"""What README and the pages for users of TRL and verl deny does not exist in the library."""

import importlib.util
import re

import pytest
from shown_commands import ROOT
from test_from_peers import TRL, VERL, codes

from dapo_jax.algorithms import PRESETS
from dapo_jax.config.experiment import Config, DpoConfig, ServeConfig, SftConfig
from dapo_jax.config.rules import Choices
from dapo_jax.config.settings import rules
from dapo_jax.environments.registry import BUILTIN_ENVIRONMENTS
from dapo_jax.model.families import family_names

README = (ROOT / "README.md").read_text(encoding="utf-8")
KINDS = Config, SftConfig, DpoConfig, ServeConfig
# A feature in prose, and the setting, module, preset or family that exists if the library has it.
FEATURES = {
    "adapter|LoRA": "lora.rank",
    "asynchron|off-policy|staleness": "rollout.staleness",
    "critic|value model": "critic.folder",
    "experts?|mixture|MoE": "mesh.expert",
    "image|video|multimodal|vision": "model.vision",
    "own reward|custom reward": "reward.parts",
    "pairs|preference": "dapo_jax.learner.losses",
    "pipeline parallel": "mesh.pipeline",
    "reward model": "reward.model_folder",
    "router replay": "algorithm.router_replay",
    "(sequence|context) parallel|ring attention": "mesh.context",
    "teacher|distillation": "teacher.folder",
    "tools?|tool call": "environment.tools",
    "turns?|multi_turn|environments?": "environment.max_turns",
    "W&B|Weights & Biases|wandb": "log.wandb",
}
ABSENT = {"model.vision", "mesh.pipeline"}
NEGATION = re.compile(r"\b(?:no|not|without|neither|lacks|has none)\b[^.;,:|()]*")


def names_in_library() -> set[str]:
    """Return settings with and without their section, their choices, presets and families."""
    names = {*PRESETS, *family_names(), *BUILTIN_ENVIRONMENTS}
    for kind in KINDS:
        for name, rule in rules(kind).items():
            names |= {name, name.rpartition(".")[2]}
            names |= set(rule.allowed) if isinstance(rule.allowed, Choices) else set()
    return names


def denials_in_readme(text: str) -> list[str]:
    """Return what our column of the comparison table denies, such as the label of a `no`."""
    (table,) = re.findall(r"^\| \| dapo_jax \| TRL .*\n((?:\|.*\n)+)", text, re.MULTILINE)
    denied = []
    for row in table.splitlines()[1:]:
        label, cell = row.split("|")[1:3]
        labels, values = label.split(";"), cell.split(";")
        for i, value in enumerate(values):
            if re.match(r" *(no|not supported|none)\b *$", value):
                denied.append(labels[i] if len(labels) == len(values) else label)
            else:
                denied += NEGATION.findall(value)
    return denied


def denials_in_page(text: str) -> list[str]:
    """Return the paragraphs of absent arguments, and the negations in the last cells of tables."""
    denied = re.findall(r"^No counterpart: (.*?)\n\n", f"{text}\n\n", re.DOTALL | re.MULTILINE)
    for row in re.findall(r"^\|.*\|.*\|(.*)\|$", text, re.MULTILINE):
        denied += NEGATION.findall(row)
    return denied


def stale(denied: list[str]) -> list[str]:
    """Return the denied features and arguments that the library has."""
    names = names_in_library()
    problems = []
    for text in denied:
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
        exists = [feature for feature in FEATURES if FEATURES[feature] not in ABSENT]
        problems += [f for f in exists if re.search(rf"\b({f})", prose, re.IGNORECASE)]
        problems += [code for code in codes(text) if code.rpartition(".")[2] in names]
    return problems


def test_features_are_settings_or_modules_unless_absent():
    names = names_in_library()
    for name in FEATURES.values():
        is_module = name.startswith("dapo_jax.")
        exists = bool(importlib.util.find_spec(name)) if is_module else name in names
        assert exists == (name not in ABSENT), name


def test_readme_denies_nothing_that_exists():
    denied = denials_in_readme(README)
    assert denied and not stale(denied)
    unknown = [d for d in denied if not any(re.search(f, d, re.IGNORECASE) for f in FEATURES)]
    assert not unknown, "add what is denied to FEATURES and ABSENT"


@pytest.mark.parametrize("page", [TRL, VERL], ids=["trl", "verl"])
def test_the_pages_for_other_libraries_deny_nothing_that_exists(page):
    denied = denials_in_page(page)
    assert denied and not stale(denied)


@pytest.mark.parametrize(
    "text, feature",
    [
        ("No counterpart: experts, images, `rollout.multi_turn`.", "experts?"),
        ("No counterpart: images, tools and several turns, Megatron.", "turns?"),
        ("No counterpart: `router_aux_loss_coef` (no experts), `a`.", "experts?"),
        ("No counterpart: `min_p`, `sampler.top_k`.", "sampler.top_k"),
        ("| `x` | `mesh.fsdp` | faster; no sequence parallelism |", "parallel"),
        ("| `x` | | Comet is not supported; W&B is |", None),
        ("| `x` | | no W&B, but TensorBoard |", "W&B"),
        ("No counterpart: images, `min_p`.", None),
    ],
)
def test_a_stale_denial_of_a_page_is_found(text, feature):
    problems = stale(denials_in_page(text))
    assert any(feature in problem for problem in problems) if feature else not problems


def test_a_stale_denial_of_readme_is_found():
    table = "| | dapo_jax | TRL | verl |\n|---|---|---|---|\n"
    row = "| images; several turns with tools | no; no | yes; yes | |\n"
    assert any("turns" in problem for problem in stale(denials_in_readme(table + row)))
    row = "| images; several turns with tools | no; yes | yes; yes | |\n"
    assert not stale(denials_in_readme(table + row))
    assert "experts?|mixture|MoE" in stale(
        denials_in_readme(table + "| models | Qwen, no experts | |\n")
    )
