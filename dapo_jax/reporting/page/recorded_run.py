"""Reader of a run's folder for the report: settings, rows, a sample of the rollouts.

The run may be unfinished, killed, or older than a setting or a metric. Lines that are no JSON
objects are skipped.
"""

import collections
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from dapo_jax.runtime.settings import require
from dapo_jax.runtime.storage.jsonl import objects
from dapo_jax.runtime.storage.paths import Folder, folder_at

SECTIONS_OF_A_RUN = {"algorithm", "rollout", "sampler"}  # of its config.json

MAX_FILES = 24  # rollouts files of a run
MAX_BYTES = 32_000_000  # of each file
GROUPS_PER_STEP = 4
SHOWN_CHARACTERS = 6000  # the middle of a longer text is cut
ALLOWED = "the folder of a run, with config.json and metrics.jsonl"
TOKEN_FIELDS = ("pieces", "logprobs", "ratios", "clipped")
# Names of a response's fields in the page, by their names in the file.
FIELDS = {
    "response": "text",
    "extracted": "extracted",
    "correct": "correct",
    "truncated": "truncated",
    "surplus": "surplus",
    "tokens": "tokens",
    "reward": "reward",
    "reward_parts": "parts",
    "advantage": "advantage",
    "failure": "failure",
    "turns": "turns",
    "environment_rewards": "rewards",
    "token_texts": "pieces",
    "token_logprobs": "logprobs",
    "token_ratios": "ratios",
    "token_clipped": "clipped",
}


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
        require(False, "run", name, f"{ALLOWED}; {error}")
        raise AssertionError from None
    is_run = isinstance(settings, dict) and settings.keys() >= SECTIONS_OF_A_RUN
    require(is_run, "run", name, f"{ALLOWED}; its config.json is not that of a run")
    require(bool(rows), "run", name, f"{ALLOWED}; there is no row in its metrics.jsonl")
    return RecordedRun(folder, flatten_dict(settings, sep="."), rows)


def heldout_shares(run: RecordedRun, which: int) -> np.ndarray | None:
    """Return the share of correct responses to each held-out problem, [P]; None if not recorded.

    Args:
        which: 0 for the first evaluation of the run, -1 for the last.
    """
    steps = [row["step"] for row in run.rows if "heldout_accuracy" in row]
    path = run.folder / "evaluations" / f"step_{steps[which] if steps else 0:06d}.jsonl"
    correct: dict[Any, list[bool]] = {}
    if path.exists():
        for line in objects(path):
            correct.setdefault(line.get("index"), []).append(bool(line.get("correct")))
    return np.array([np.mean(values) for values in correct.values()]) if correct else None


def spread_out(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers below `count`, with both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def coarse_to_fine(numbers: Sequence[int]) -> list[int]:
    """Reorder numbers: the last, the first, then halves, quarters and so on."""
    count = len(numbers)
    parts = [2**power + 1 for power in range(count.bit_length() + 1)]
    return [numbers[i] for i in dict.fromkeys(i for n in parts for i in spread_out(count, n)[::-1])]


def shorten(text: Any) -> str:
    """Return a text without its middle if it is too long for a page."""
    text = str(text)
    half = SHOWN_CHARACTERS // 2
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _response(line: dict[str, Any]) -> dict[str, Any]:
    fields = {new: line[name] for name, new in FIELDS.items() if line.get(name) is not None}
    if "advantage" in line:  # null if no update used the response; older runs lack the field
        fields["advantage"] = line["advantage"]
    turns = [[speaker, tokens, str(text)] for speaker, tokens, text in fields.pop("turns", ())]
    text = "".join(text for _, _, text in turns) or str(fields.get("text", ""))
    if turns:
        fields["turns"] = [[speaker, tokens, shorten(text)] for speaker, tokens, text in turns]
    if len(text) > SHOWN_CHARACTERS:
        for name in TOKEN_FIELDS:
            fields.pop(name, None)
    for name in ("text", "extracted", "failure"):
        if name in fields:
            fields[name] = shorten(fields[name])
    return fields


def _outcome(lines: list[dict[str, Any]]) -> str:
    correct = sum(bool(line.get("correct")) for line in lines)
    if 0 < correct < len(lines):
        return "mixed"
    return "all right" if correct else "all wrong"


def groups_of(path: Folder, step: int) -> list[dict[str, Any]]:
    """Return a few groups of a rollouts file: first those with tokens, then of every outcome."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for line in objects(path, MAX_BYTES):
        groups.setdefault(line.get("index"), []).append(line)
    outcomes = collections.Counter[str]()

    def rank(group: list[dict[str, Any]]) -> tuple[bool, int]:
        outcomes[_outcome(group)] += 1
        return "token_texts" not in group[0], outcomes[_outcome(group)]

    return [
        {
            "step": step,
            "prompt": shorten(lines[0].get("prompt", "")),
            "answer": shorten(lines[0].get("answer", "")),
            "id": shorten(lines[0].get("prompt_id", "")),
            "outcome": _outcome(lines),
            "responses": [_response(line) for line in lines],
        }
        for lines in sorted(groups.values(), key=rank)[:GROUPS_PER_STEP]
    ]


def sample_groups(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """Yield groups of evenly spaced steps, ordered so that any prefix is a fair sample."""
    folder = run.folder / "rollouts"
    files: dict[int, Folder] = {}
    for path in folder.glob("step_*.jsonl") if folder.exists() else ():
        number = path.stem.removeprefix("step_")
        if number.isdigit():
            files[int(number)] = path
    steps = sorted(files)
    chosen = coarse_to_fine([steps[i] for i in spread_out(len(steps), MAX_FILES)])
    groups = [groups_of(files[step], step) for step in chosen]
    for place in range(GROUPS_PER_STEP):
        yield from (of_step[place] for of_step in groups if place < len(of_step))
