"""Reader of a run's folder for the report: it may be unfinished, damaged, or of an old version."""

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from dapo_jax.extras.report.curves import show_number
from dapo_jax.runtime.storage.files import Folder, folder_at, objects
from dapo_jax.types.errors import ConfigError, require

MAX_BYTES = 32_000_000  # of each rollouts file
SHOWN_GROUPS = SHOWN_TOKENS = 4  # groups of a step; responses of a group with their tokens
SHOWN_CHARACTERS = 6000  # the middle of a longer text is cut
ALLOWED = "the folder of a run, with config.json and metrics.jsonl"
CLIPS = ("", *(f", cut by the {name} clip" for name in ("lower", "upper", "dual")))


class RecordedRun(NamedTuple):
    """The records of a run: `settings` by dotted name, `rows` in the order of steps."""

    name: str
    folder: Folder
    settings: dict[str, Any]
    rows: list[dict[str, Any]]


def read_run(name: str) -> RecordedRun:
    """Read the run in a folder. Raises `ConfigError` if there is none or it has no row."""
    folder = folder_at(name)
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        lines = objects(folder / "metrics.jsonl")
        rows = {line["step"]: line for line in lines if type(line.get("step")) is int}
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.run = {name!r}: must be {ALLOWED}; {error}", "run") from None
    is_run = isinstance(settings, dict) and settings.keys() >= {"algorithm", "rollout", "sampler"}
    require(is_run, "run", name, f"{ALLOWED}; its config.json is not that of a run")
    require(bool(rows), "run", name, f"{ALLOWED}; there is no row in its metrics.jsonl")
    ordered = [rows[step] for step in sorted(rows)]
    return RecordedRun(folder.name or name, folder, flatten_dict(settings, sep="."), ordered)


def _shorten(text: Any) -> str:
    text, half = str(text), SHOWN_CHARACTERS // 2
    cut = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    return cut if len(text) > SHOWN_CHARACTERS else text


def _tokens(line: dict[str, Any]) -> Iterator[tuple[str, float, str, bool]]:
    """Yield text, darkness and facts of each sampled token, and whether it was clipped."""
    names = ("token_logprobs", "token_ratios", "token_clipped")
    values = [line.get(name) or itertools.repeat(None) for name in names]
    for text, logprob, ratio, clip in zip(line.get("token_texts", ()), *values, strict=False):
        facts = f"log-probability {show_number(logprob)}, ratio {show_number(ratio)}"
        yield text, min(0.75, -(logprob or 0.0) / 6), facts + CLIPS[clip or 0], bool(clip)


def _turns(line: dict[str, Any], with_tokens: bool) -> Iterator[tuple]:
    """Yield whether the policy speaks, length, its reward, its tokens, and the text of turns."""
    turns = line.get("turns") or [["policy", line.get("tokens"), line.get("response", "")]]
    is_short = sum(len(str(text)) for _, _, text in turns) <= SHOWN_CHARACTERS
    tokens = _tokens(line) if with_tokens and is_short else iter(())
    rewards = iter(line.get("environment_rewards") or ())
    for speaker, count, text in turns:
        reward, shaded = None, []
        if is_policy := speaker == "policy":
            reward, shaded = next(rewards, None), [*itertools.islice(tokens, count)]
        yield is_policy, count, reward, shaded, _shorten(text)


def _groups_of(path: Folder) -> Iterator[dict[str, Any]]:
    """Yield a few groups of a rollouts file, first those with tokens."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for line in objects(path, MAX_BYTES):
        groups.setdefault(line.get("index"), []).append(line)
    ordered = sorted(groups.values(), key=lambda lines: "token_texts" not in lines[0])
    for lines in ordered[:SHOWN_GROUPS]:
        rewards = [line["reward"] for line in lines if line.get("reward") is not None]
        texts = {n: _shorten(lines[0].get(n, "")) for n in ("prompt", "answer", "prompt_id")}
        shown = [
            line | {"shown": [*_turns(line, i < SHOWN_TOKENS)]} for i, line in enumerate(lines)
        ]
        reward = float(np.mean(rewards)) if rewards else None
        yield texts | {"step": int(path.stem[5:]), "reward": reward, "responses": shown}


def sample_groups(run: RecordedRun, most: int) -> list[dict[str, Any]]:
    """Return a few groups of each of at most `most` evenly spaced steps."""
    paths = sorted((run.folder / "rollouts").glob(f"step_{6 * '[0-9]'}.jsonl"))
    even = np.linspace(0, len(paths) - 1, min(len(paths), most)).round().astype(int)
    return [group for i in even for group in _groups_of(paths[i])]
