"""Model card of an exported policy: README.md with metadata of the hub, and run_config.json.

Folders of the machine are not published: of an absolute path, only the last name is shown.
"""

import importlib.resources
import json
import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from flax.traverse_util import unflatten_dict

from dapo_jax.config.experiment import Config, ExportConfig
from dapo_jax.extras.report.comparison import from_defaults, from_preset
from dapo_jax.extras.report.curves import value_at
from dapo_jax.extras.report.recorded_run import RecordedRun, sort_rows, spread_out
from dapo_jax.reporting.correctness import reward_leads
from dapo_jax.reporting.sinks import read_rows
from dapo_jax.runtime.settings import leaves
from dapo_jax.runtime.storage.jsonl import read_object
from dapo_jax.runtime.storage.paths import folder_at

CARD = "README.md"
SETTINGS = "run_config.json"
TAG = "dapo_jax"  # marks the repositories of exports
# An absolute path, one that leaves the working folder, or a bucket's; the last name is a group.
PATH = re.compile(
    r"(^|[,=])\s*(?:~|/|\.\./|[A-Za-z]:[\\/]|\w+://)[^,=]*?([^\\/,=]+)[\\/]*(?=[,=]|$)"
)
MACHINE_SETTINGS = ("run_dir", "log.", "watch.", "checkpoint.")  # irrelevant for a reader
CURVES = ("reward", "accuracy", "heldout_accuracy", "heldout_reward", "entropy")
CURVE_ROWS = 9
# Columns of scores by metric of a row without `heldout_`, in that order.
CORRECTNESS_SCORES = {
    "accuracy": "avg@k",
    "accuracy_low": "low",
    "accuracy_high": "high",
    "pass_at_k": "pass@k",
    "majority": "maj@k",
}
REWARD_SCORES = {"reward": "reward", "reward_low": "low", "reward_high": "high"}
SHOWN_CHARACTERS = 200


def without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """Shorten paths in settings to their last names; defaults and prompts are no paths."""
    defaults = {name: value for name, _, value in leaves(Config())}
    return {
        name: PATH.sub(r"\1\2", value)
        if isinstance(value, str)
        and name != "data.system_prompt"
        and "{" not in value
        and value != defaults.get(name)
        else value
        for name, value in settings.items()
    }


def recorded(run: str, settings: dict[str, Any], step: int) -> RecordedRun:
    """Return a run up to the step of a checkpoint; its folder may lack all other files."""
    rows = sort_rows(read_rows(folder_at(run) / "metrics.jsonl"))
    known = {name: settings[name] for name, _, _ in leaves(Config())}
    return RecordedRun(folder_at(run), known, [row for row in rows if row["step"] <= step])


def write_card(folder: pathlib.Path, config: ExportConfig, run: RecordedRun, step: int, base: str):
    """Write the card and the settings of the run.

    Args:
        base: name of the initial model.
    """
    from huggingface_hub import ModelCard, ModelCardData

    settings = without_paths(run.settings)
    tables = json.dumps(unflatten_dict(settings, sep="."), indent=2)
    (folder / SETTINGS).write_text(tables, encoding="utf-8")
    preset, differences = from_preset(settings)
    is_adapter = config.weights == "adapter"
    relation = "adapter" if is_adapter else "finetune"
    data = ModelCardData(
        base_model=config.base_model or None,
        base_model_relation=relation if config.base_model else None,
        datasets=config.datasets.split(",") if config.datasets else None,
        license=config.license or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[TAG, "reinforcement-learning", preset],
    )
    heldout = _value(settings["data.heldout_source"]) or "nothing"
    if not settings["data.heldout_source"] and settings["data.heldout_problems"] != 0:
        heldout = "problems of the same source, never trained on"
    changed = from_defaults({n: v for n, v in settings.items() if not n.startswith("algorithm.")})
    replaced = [n for n in settings if settings[n] != run.settings[n] and n != "run_dir"]
    rows = [run.rows[i] for i in spread_out(len(run.rows), CURVE_ROWS)]
    leads = reward_leads(settings)
    curves = [*sorted(CURVES, key=lambda m: leads and "accuracy" in m), "response_tokens_mean"]
    template = importlib.resources.files("dapo_jax.reporting") / "model_card.md"
    card = ModelCard.from_template(
        data,
        template_str=template.read_text(encoding="utf-8"),
        name=pathlib.Path(config.out).name,
        kind="Low-rank adapters of" if is_adapter else "A policy that began as",
        base=config.base_model or base,
        step=step,
        total_steps=settings["total_steps"],
        source=_value(settings["data.source"]),
        held_out=heldout,
        prompt_template=_value(settings["data.template"]),
        preset=preset,
        differences=_table(("setting", "here", f"in {preset}"), differences),
        settings_file=SETTINGS,
        changed=_table(
            ("setting", "here", "default"),
            [line for line in changed if not line[0].startswith(MACHINE_SETTINGS)],
        ),
        scores=_score_table(run, settings, step),
        curves=_table(
            ("step", *curves), [[row["step"], *(value_at(row, m) for m in curves)] for row in rows]
        ),
        replaced=[f"{name}={shlex.quote(settings[name])}" for name in replaced],
    )
    card.save(folder / CARD)


def _score_table(run: RecordedRun, settings: dict[str, Any], step: int) -> str:
    """Return the table of held-out scores; those that lead come first."""
    columns = CORRECTNESS_SCORES | REWARD_SCORES
    if reward_leads(settings):
        columns = REWARD_SCORES | CORRECTNESS_SCORES
    lines = [
        [*line, *(scores.get(name) for name in columns)]
        for *line, scores in [*_run_scores(run, settings), *_evaluation_scores(run, step)]
    ]
    return _table(("policy", "data", "k", *columns.values()), lines)


def _run_scores(run: RecordedRun, settings: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield policy, data, k and scores of the first and the last evaluation during the run."""
    measured = [row for row in run.rows if "heldout_accuracy" in row]
    data = settings["data.heldout_source"] or settings["data.source"]
    for row in measured[:1] + measured[1:][-1:]:
        scores = {n: value_at(row, f"heldout_{n}") for n in (*CORRECTNESS_SCORES, *REWARD_SCORES)}
        yield [f"step {row['step']}", data, settings["evaluation.samples_per_problem"], scores]


def _evaluation_scores(run: RecordedRun, step: int) -> Iterator[list[Any]]:
    """Yield policy, data, k and scores of evaluations of this step by `dapo-jax evaluate`."""
    for path in sorted((run.folder / "evaluations").glob("*/report.json")):
        report = read_object(path.read_bytes()) or {}
        if str(report.get("policy")).endswith(f" step {step}"):
            data = without_paths({"data": report["data"]})["data"]
            best = report["pass_at_k"][max(report["pass_at_k"], key=int)]["value"]
            scores = {"pass_at_k": best, "majority": report["majority"]["value"]}
            for name in ("accuracy", "reward"):
                score = report.get(name) or {}  # no reward in a report of an earlier version
                scores[name] = score.get("value")
                scores |= {f"{name}_{end}": score.get(end) for end in ("low", "high")}
            yield [f"step {step}", data, report["samples_per_problem"], scores]


def _value(value: Any) -> str:
    if value is None or isinstance(value, float):
        return "" if value is None or value != value else f"{value:.4g}"
    text = " ".join(str(value).split())
    text = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    return "`{}`".format(text.replace("`", "'")) if isinstance(value, str) and text else text


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; empty without rows. The first column needs no escapes."""
    lines: list[Sequence[str]] = [head, ["---"] * len(head)]
    for first, *rest in rows:
        lines.append([str(first), *(_value(value).replace("|", "\\|") for value in rest)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""
