"""What a run left in its folder, read for its report: settings, rows, a sample of its rollouts.

Files are read as they may be found: of a run that goes on, that was killed, or that is older than
a setting or a metric. A line that is no object is passed over.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dapo_jax.runtime.settings import require
from dapo_jax.runtime.storage.jsonl import objects
from dapo_jax.runtime.storage.ownership import SECTIONS_OF_A_RUN, Folder, folder_at

FILES_READ = 24  # rollouts files of a run
BYTES_READ = 32_000_000  # of each
GROUPS_OF_A_STEP = 4
SHOWN_CHARACTERS = 6000  # of a text; of a longer one, beginning and end
A_RUN = "the folder of a run, with config.json and metrics.jsonl"
# Of a response: what it is called in the page, by its name in the file.
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
    "token_texts": "pieces",
    "token_logprobs": "logprobs",
    "token_ratios": "ratios",
    "token_clipped": "clipped",
}


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One run. `settings` are by dotted name, `rows` by step."""

    folder: Folder
    settings: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)


def dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else None
        found |= {f"{prefix}{name}": value} if inner is None else inner
    return found


def read_run(name: str) -> Recorded:
    """The run in that folder. Raises `ConfigError` where there is none, or no step of one."""
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
    return Recorded(folder, dotted(settings), [by_step[step] for step in sorted(by_step)])


def heldout_shares(run: Recorded, which: int) -> np.ndarray | None:
    """[P], share of right responses to each held-out problem in the first (0) or last (-1)
    evaluation of the run; None where its responses were not kept."""
    steps = [row["step"] for row in run.rows if "heldout_accuracy" in row]
    path = run.folder / "evaluations" / f"step_{steps[which] if steps else 0:06d}.jsonl"
    right: dict[Any, list[bool]] = {}
    if path.exists():
        for line in objects(path):
            right.setdefault(line.get("index"), []).append(bool(line.get("correct")))
    return np.array([np.mean(right[index]) for index in right]) if right else None


def spread_out(count: int, most: int) -> list[int]:
    """At most so many of the first `count` numbers, evenly, the ends among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(1, most - 1)) for i in range(most)})


def coarse_to_fine(numbers: Iterable[int]) -> list[int]:
    """The last, the first, and then ever those that halve what lies between."""
    rest = sorted(numbers)
    ordered = [rest.pop(), *rest[:1]] if rest else []
    spans = [rest[1:]]
    while spans:
        span = spans.pop(0)
        if span:
            middle = len(span) // 2
            ordered.append(span[middle])
            spans += [span[:middle], span[middle + 1 :]]
    return ordered


def shorten(text: Any) -> str:
    """A text that fits a page."""
    text, half = str(text), SHOWN_CHARACTERS // 2
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _response(line: dict[str, Any]) -> dict[str, Any]:
    found = {new: line[name] for name, new in FIELDS.items() if line.get(name) is not None}
    if "advantage" in line:  # null where no update saw the response; older runs don't say
        found["advantage"] = line["advantage"]
    whole = len(str(found.get("text", ""))) <= SHOWN_CHARACTERS
    if not whole:
        for name in ("pieces", "logprobs", "ratios", "clipped"):
            found.pop(name, None)
    for name in ("text", "extracted", "failure"):
        if name in found:
            found[name] = shorten(found[name])
    return found


def _outcome(lines: list[dict[str, Any]]) -> str:
    right = sum(bool(line.get("correct")) for line in lines)
    return "mixed" if 0 < right < len(lines) else "all right" if right else "all wrong"


def groups_of(path: Folder, step: int) -> list[dict[str, Any]]:
    """A few groups of a rollouts file: with tokens, and of each outcome, as far as there are."""
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


def sample_groups(run: Recorded) -> Iterator[dict[str, Any]]:
    """Groups of some steps, the most telling first, so that any beginning is a fair sample."""
    folder = run.folder / "rollouts"
    files = {}
    for path in folder.glob("step_*.jsonl") if folder.exists() else ():
        number = path.stem.removeprefix("step_")
        if number.isdigit():
            files[int(number)] = path
    steps = sorted(files)
    chosen = coarse_to_fine(steps[i] for i in spread_out(len(steps), FILES_READ))
    read = [groups_of(files[step], step) for step in chosen]
    for place in range(GROUPS_OF_A_STEP):
        yield from (groups[place] for groups in read if place < len(groups))
