"""Model card of an exported policy: README.md with the front matter of hubs, and run_config.json.

Names of folders on the machine stay there: of an absolute path, only the last name is shown.
"""

import json
import math
import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from flax.traverse_util import unflatten_dict

from dapo_jax.config.experiment import Config, ExportConfig
from dapo_jax.reporting.page.comparison import from_defaults, from_preset
from dapo_jax.reporting.page.curves import value_at
from dapo_jax.reporting.page.recorded_run import RecordedRun, spread_out
from dapo_jax.runtime.settings import leaves
from dapo_jax.runtime.storage.jsonl import objects, read_object
from dapo_jax.runtime.storage.paths import folder_at

CARD, SETTINGS = "README.md", "run_config.json"
TAG = "dapo_jax"  # by which a repository is known as an export's
# An absolute path, one that leaves the working folder, or a bucket's; the last name is a group.
PLACE = re.compile(
    r"(^|[,=])\s*(?:~|/|\.\./|[A-Za-z]:[\\/]|\w+://)[^,=]*?([^\\/,=]+)[\\/]*(?=[,=]|$)"
)
OF_THE_MACHINE = ("run_dir", "log.", "watch.", "checkpoint.")  # settings that a reader is not told
CURVES = ("reward", "accuracy", "heldout_accuracy", "entropy", "response_tokens_mean")
CURVE_ROWS, SHOWN_CHARACTERS = 9, 200


def without_places(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted name with paths shortened to names. Prompts and templates are no paths."""
    return {
        name: PLACE.sub(r"\1\2", value)
        if isinstance(value, str) and name != "data.system_prompt" and "{" not in value
        else value
        for name, value in settings.items()
    }


def recorded(run: str, settings: dict[str, Any], step: int) -> RecordedRun:
    """A run as far as a checkpoint's step, of whose folder only the checkpoint must be there."""
    path, rows = folder_at(run) / "metrics.jsonl", {}
    for row in objects(path) if path.exists() else ():
        if type(row.get("step")) is int and row["step"] <= step:
            rows[row["step"]] = row
    known = {name: settings[name] for name, _, _ in leaves(Config())}
    return RecordedRun(folder_at(run), known, [rows[number] for number in sorted(rows)])


def write_card(folder: pathlib.Path, config: ExportConfig, run: RecordedRun, step: int, base: str):
    """Writes the card and the run's settings.

    Args:
        base: name of the model that the run began with.
    """
    settings = without_places(run.settings)
    tables = json.dumps(unflatten_dict(settings, sep="."), indent=2)
    (folder / SETTINGS).write_text(tables, encoding="utf-8")
    text = "\n".join(_lines(config, run, settings, step, base))
    (folder / CARD).write_text(text + "\n", encoding="utf-8")


def _front_matter(config: ExportConfig, preset: str) -> str:
    from huggingface_hub import ModelCardData

    alone = config.weights == "adapter"
    relation = ("adapter" if alone else "finetune") if config.base_model else None
    return ModelCardData(
        base_model=config.base_model or None,
        base_model_relation=relation,
        datasets=config.datasets.split(",") if config.datasets else None,
        license=config.license or None,
        library_name="peft" if alone else "transformers",
        pipeline_tag="text-generation",
        tags=[TAG, "reinforcement-learning", preset],
    ).to_yaml()


def _lines(
    config: ExportConfig, run: RecordedRun, settings: dict[str, Any], step: int, base: str
) -> Iterator[str]:
    preset, differences = from_preset(settings)
    name = pathlib.Path(config.push_to_hub or config.out).name
    yield f"---\n{_front_matter(config, preset)}\n---\n\n# {name}\n"
    kind = "Low-rank adapters of" if config.weights == "adapter" else "A policy that began as"
    yield f"{kind} {config.base_model or base}, trained by reinforcement learning with dapo_jax:"
    yield f"{step} of {settings['total_steps']} steps.\n\n## Data\n"
    yield f"- trained on {_value(settings['data.source'])}"
    held = "problems of the same source, never trained on"
    if settings["data.heldout_source"] or settings["data.heldout_problems"] == 0:
        held = _value(settings["data.heldout_source"]) or "nothing"
    yield f"- held out: {held}"
    yield f"- prompt template {_value(settings['data.template'])}"
    yield f"\n## Algorithm\n\nPreset `{preset}`" + (", but:\n" if differences else ".")
    yield _table(("setting", "here", f"in {preset}"), differences)
    changed = from_defaults({n: v for n, v in settings.items() if not n.startswith("algorithm.")})
    shown = [line for line in changed if not line[0].startswith(OF_THE_MACHINE)]
    yield f"\n## Settings\n\nThose that are not the default; `{SETTINGS}` has all.\n"
    yield _table(("setting", "here", "default"), shown)
    if scores := [*_scores(run, settings), *_reports(run, step)]:
        yield "\n## Held-out scores\n\nLow and high end 95 % intervals over problems.\n"
        head = ("policy", "data", "k", "avg@k", "low", "high", "pass@k", "maj@k")
        yield _table(head, scores)
    if run.rows:
        rows = [run.rows[i] for i in spread_out(len(run.rows), CURVE_ROWS)]
        values = [[row["step"], *(value_at(row, metric) for metric in CURVES)] for row in rows]
        yield "\n## Curves\n"
        yield _table(("step", *CURVES), values)
    places = [n for n in settings if settings[n] != run.settings[n] and n != "run_dir"]
    own = "".join(f" \\\n    --config.{n}={shlex.quote(settings[n])}" for n in places)
    yield "\n## To make it again\n"
    if places:
        yield "Folders and files of the machine are shortened to their names; yours go here.\n"
    yield f"```bash\ndapo-jax train --config={SETTINGS}{own}\n```"


def _scores(run: RecordedRun, settings: dict[str, Any]) -> Iterator[list[Any]]:
    """Lines of the first and the last evaluation of the run itself."""
    measured = [row for row in run.rows if "heldout_accuracy" in row]
    data = settings["data.heldout_source"] or settings["data.source"]
    names = ("accuracy", "accuracy_low", "accuracy_high", "pass_at_k", "majority")
    for row in measured[:1] + measured[1:][-1:]:
        values = (value_at(row, f"heldout_{name}") for name in names)
        k = settings["evaluation.samples_per_problem"]
        yield [f"step {row['step']}", data, k, *values]


def _reports(run: RecordedRun, step: int) -> Iterator[list[Any]]:
    """Lines of what `dapo-jax evaluate` measured of this step."""
    folder = run.folder / "evaluations"
    for path in sorted(folder.glob("*/report.json")) if folder.exists() else ():
        found = read_object(path.read_bytes()) or {}
        if str(found.get("policy")).endswith(f" step {step}"):
            data, k = without_places({"data": found["data"]})["data"], found["samples_per_problem"]
            score, best = found["accuracy"], found["pass_at_k"][max(found["pass_at_k"], key=int)]
            values = score["value"], score["low"], score["high"]
            yield [f"step {step}", data, k, *values, best["value"], found["majority"]["value"]]


def _value(value: Any) -> str:
    if value is None or isinstance(value, float):
        return "" if value is None or math.isnan(value) else f"{value:.4g}"
    text = " ".join(str(value).split())
    text = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    return "`{}`".format(text.replace("`", "'")) if isinstance(value, str) and text else text


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown table; empty without rows. The first column holds no text of a user's."""
    lines: list[Sequence[str]] = [head, ["---"] * len(head)]
    for first, *rest in rows:
        lines.append([str(first), *(_value(value).replace("|", "\\|") for value in rest)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""
