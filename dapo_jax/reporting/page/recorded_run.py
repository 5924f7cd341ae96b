"""Reader of a run's folder for the report: settings, rows, a sample of the rollouts.

The run may still go on, may have been killed, or may be older than a setting or a metric. A line
that is no JSON object is passed over.
"""

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

FILES_READ = 24  # rollouts files of a run
BYTES_READ = 32_000_000  # of each file
GROUPS_OF_A_STEP = 4
SHOWN_CHARACTERS = 6000  # of a text; a longer one loses its middle
A_RUN = "the folder of a run, with config.json and metrics.jsonl"
# Fields of a response: name in the page by name in the file.
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
    """A run as its folder tells it: `settings` by dotted name, `rows` in the order of steps."""

    folder: Folder
    settings: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)


def read_run(name: str) -> RecordedRun:
    """Reads the run in a folder. Raises `ConfigError` where there is none, or none of its steps."""
    folder = folder_at(name)
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rows = list(objects(folder / "metrics.jsonl"))
    except (OSError, ValueError) as error:
        require(False, "run", name, f"{A_RUN}; {error}")
        raise AssertionError from None
    known = isinstance(settings, dict) and settings.keys() >= SECTIONS_OF_A_RUN
    require(known, "run", name, f"{A_RUN}; its config.json is not that of a run")
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    require(bool(by_step), "run", name, f"{A_RUN}; there is no row in its metrics.jsonl")
    return RecordedRun(
        folder, flatten_dict(settings, sep="."), [by_step[step] for step in sorted(by_step)]
    )


def heldout_shares(run: RecordedRun, which: int) -> np.ndarray | None:
    """Shares of right responses to each held-out problem, [P]; None where none were kept.

    Args:
        which: 0 for the first evaluation of the run, -1 for the last.
    """
    steps = [row["step"] for row in run.rows if "heldout_accuracy" in row]
    path = run.folder / "evaluations" / f"step_{steps[which] if steps else 0:06d}.jsonl"
    right: dict[Any, list[bool]] = {}
    if path.exists():
        for line in objects(path):
            right.setdefault(line.get("index"), []).append(bool(line.get("correct")))
    return np.array([np.mean(right[index]) for index in right]) if right else None


def spread_out(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spaced, both ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def coarse_to_fine(numbers: Sequence[int]) -> list[int]:
    """All numbers, reordered: the last, the first, then halves, quarters and so on."""
    count = len(numbers)
    parts = [2**power + 1 for power in range(count.bit_length() + 1)]
    return [numbers[i] for i in dict.fromkeys(i for n in parts for i in spread_out(count, n)[::-1])]


def shorten(text: Any) -> str:
    """A text without its middle where it is too long for a page."""
    text, half = str(text), SHOWN_CHARACTERS // 2
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _response(line: dict[str, Any]) -> dict[str, Any]:
    fields = {new: line[name] for name, new in FIELDS.items() if line.get(name) is not None}
    if "advantage" in line:  # null where no update saw the response; older runs don't say
        fields["advantage"] = line["advantage"]
    turns = [[speaker, tokens, str(text)] for speaker, tokens, text in fields.pop("turns", ())]
    text = "".join(text for _, _, text in turns) or str(fields.get("text", ""))
    if turns:
        fields["turns"] = [[speaker, tokens, shorten(text)] for speaker, tokens, text in turns]
    if len(text) > SHOWN_CHARACTERS:
        for name in ("pieces", "logprobs", "ratios", "clipped"):
            fields.pop(name, None)
    return fields | {
        name: shorten(fields[name]) for name in ("text", "extracted", "failure") if name in fields
    }


def _outcome(lines: list[dict[str, Any]]) -> str:
    right = sum(bool(line.get("correct")) for line in lines)
    return "mixed" if 0 < right < len(lines) else "all right" if right else "all wrong"


def groups_of(path: Folder, step: int) -> list[dict[str, Any]]:
    """A few groups of a rollouts file: those with tokens first, then of every outcome."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for line in objects(path, BYTES_READ):
        groups.setdefault(line.get("index"), []).append(line)

    def rank(group: list[dict[str, Any]]) -> tuple[bool, int]:
        seen[_outcome(group)] = seen.get(_outcome(group), 0) + 1
        return "token_texts" not in group[0], seen[_outcome(group)]

    seen: dict[str, int] = {}
    chosen = sorted(groups.values(), key=rank)[:GROUPS_OF_A_STEP]
    return [
        {
            "step": step,
            "prompt": shorten(lines[0].get("prompt", "")),
            "answer": shorten(lines[0].get("answer", "")),
            "id": shorten(lines[0].get("prompt_id", "")),
            "outcome": _outcome(lines),
            "responses": [_response(line) for line in lines],
        }
        for lines in chosen
    ]


def sample_groups(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """Groups of evenly spaced steps, ordered so that any beginning is a fair sample."""
    folder = run.folder / "rollouts"
    paths = folder.glob("step_*.jsonl") if folder.exists() else ()
    numbers = ((path.stem.removeprefix("step_"), path) for path in paths)
    files = {int(number): path for number, path in numbers if number.isdigit()}
    steps = sorted(files)
    chosen = coarse_to_fine([steps[i] for i in spread_out(len(steps), FILES_READ)])
    groups = [groups_of(files[step], step) for step in chosen]
    for place in range(GROUPS_OF_A_STEP):
        yield from (of_step[place] for of_step in groups if place < len(of_step))
