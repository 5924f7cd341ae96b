"""Reader of a run's folder for the report: settings, rows, a sample of the rollouts.

The run may be unfinished, killed, or older than a setting or a metric. Lines that are no JSON
objects are skipped.
"""

import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.runtime.storage.jsonl import objects
from dapo_jax.runtime.storage.paths import Folder, folder_at

SECTIONS_OF_A_RUN = {"algorithm", "rollout", "sampler"}  # of its config.json
MAX_FILES = 24  # rollouts files of all runs
MAX_BYTES = 32_000_000  # of each file
GROUPS_PER_STEP = 4
SHOWN_CHARACTERS = 6000  # the middle of a longer text is cut
ALLOWED = "the folder of a run, with config.json and metrics.jsonl"
# Fields of a response that the page shows.
TEXT_FIELDS = ("response", "extracted", "failure")
TOKEN_FIELDS = ("token_texts", "token_logprobs", "token_ratios", "token_clipped")
OTHER_FIELDS = (
    "correct outcome truncated surplus tokens reward reward_parts advantage environment_rewards"
).split()


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """The records of a run: `settings` by dotted name, `rows` in the order of steps."""

    folder: Folder
    settings: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)


def sort_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest row of each step, in the order of steps."""
    by_step = {row["step"]: row for row in rows if type(row.get("step")) is int}
    return [by_step[step] for step in sorted(by_step)]


def read_run(name: str) -> RecordedRun:
    """Read the run in a folder. Raises `ConfigError` if there is none or it has no row."""
    folder = folder_at(name)
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rows = sort_rows(list(objects(folder / "metrics.jsonl")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.run = {name!r}: must be {ALLOWED}; {error}", "run") from None
    is_run = isinstance(settings, dict) and settings.keys() >= SECTIONS_OF_A_RUN
    require(is_run, "run", name, f"{ALLOWED}; its config.json is not that of a run")
    require(bool(rows), "run", name, f"{ALLOWED}; there is no row in its metrics.jsonl")
    return RecordedRun(folder, flatten_dict(settings, sep="."), rows)


def heldout_means(run: RecordedRun, field: str, which: int) -> np.ndarray | None:
    """Return the mean of a field over the responses to each held-out problem, [P].

    None if it is not recorded for every response.

    Args:
        field: "correct" or "reward".
        which: 0 for the first evaluation of the run, -1 for the last.
    """
    steps = [row["step"] for row in run.rows if "heldout_accuracy" in row]
    path = run.folder / "evaluations" / f"step_{steps[which] if steps else 0:06d}.jsonl"
    by_problem: dict[Any, list[float]] = {}
    if path.exists():
        for line in objects(path):
            if line.get("failure") is not None:
                continue
            if (value := line.get(field)) is None:
                return None
            by_problem.setdefault(line.get("index"), []).append(float(value))
    return np.array([np.mean(values) for values in by_problem.values()]) if by_problem else None


# --- rollouts -------------------------------------------------------------------------------


def spread_out(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers below `count`, with both ends."""
    if count == 0:
        return []
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def _shorten(text: Any) -> str:
    text = str(text)
    half = SHOWN_CHARACTERS // 2
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _response(line: dict[str, Any]) -> dict[str, Any]:
    fields = {name: line[name] for name in OTHER_FIELDS if name in line}
    fields |= {name: _shorten(line[name]) for name in TEXT_FIELDS if line.get(name) is not None}
    turns = [[speaker, tokens, str(text)] for speaker, tokens, text in line.get("turns") or ()]
    fields["turns"] = [[speaker, tokens, _shorten(text)] for speaker, tokens, text in turns]
    text = "".join(text for _, _, text in turns) or str(line.get("response", ""))
    if len(text) <= SHOWN_CHARACTERS:
        fields |= {name: line[name] for name in TOKEN_FIELDS if name in line}
    return fields


def _outcome(lines: list[dict[str, Any]]) -> str:
    lines = [line for line in lines if line.get("failure") is None]
    if not lines:
        return "no reward"
    correct = sum(bool(line.get("correct")) for line in lines)
    if 0 < correct < len(lines):
        return "mixed"
    return "all right" if correct else "all wrong"


def _groups_of(path: Folder, step: int) -> list[dict[str, Any]]:
    """Return a few groups of a rollouts file: first those with tokens, then of every outcome."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for line in objects(path, MAX_BYTES):
        groups.setdefault(line.get("index"), []).append(line)
    outcomes = collections.Counter[str]()

    def rank(group: list[dict[str, Any]]) -> tuple[bool, int]:
        outcomes[_outcome(group)] += 1
        return "token_texts" not in group[0], outcomes[_outcome(group)]

    return [
        {name: _shorten(lines[0].get(name, "")) for name in ("prompt", "answer", "prompt_id")}
        | {"step": step, "outcome": _outcome(lines), "responses": [*map(_response, lines)]}
        for lines in sorted(groups.values(), key=rank)[:GROUPS_PER_STEP]
    ]


def rollouts_files(run: RecordedRun, most: int = 0) -> dict[int, Folder]:
    """Return the rollouts file of each step, or of at most `most` evenly spaced steps."""
    numbers = {path: path.stem[5:] for path in (run.folder / "rollouts").glob("step_*.jsonl")}
    files = {int(number): path for path, number in numbers.items() if number.isdigit()}
    steps = sorted(files)
    return {steps[i]: files[steps[i]] for i in spread_out(len(steps), most or len(steps))}


def sample_groups(run: RecordedRun, most: int = MAX_FILES) -> list[list[dict[str, Any]]]:
    """Return a few groups of each of at most `most` evenly spaced steps."""
    return [_groups_of(path, step) for step, path in rollouts_files(run, most).items()]
