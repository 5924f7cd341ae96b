"""Sinks for what a run reports: console, metrics.jsonl, rollouts/.

Failed writes are warnings and are repeated with the next row.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.config.experiment import Config, Log
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.scores import ENVIRONMENT, POLICY
from dapo_jax.runtime import registry
from dapo_jax.runtime.storage.jsonl import AppendFile, objects, rewind
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import Storage, reason, replacing
from dapo_jax.runtime.user_code import resolve
from dapo_jax.types.contracts import RunSink
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import CollectedGroups, Completion, Failure, Group, Trace

Split = Callable[[Sequence[int]], list[str]]  # the text of each token of a response
TOKEN_DECIMALS = 3


def rollouts_name(step: int) -> str:
    """Return the name of a step's file in rollouts/."""
    return f"step_{step:06d}.jsonl"


def read_rows(path: Folder) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; none if there is no file."""
    return list(objects(path)) if path.exists() else []


def find_sinks(text: str) -> list[Callable[[Folder, Config], RunSink]]:
    """Return the makers of the sinks in `log.sinks`. Raises `ConfigError`."""
    known = registry.names("sinks")
    allowed = f"names of installed sinks ({', '.join(known) or 'there are none'}) or module:Class"
    makers = []
    for name in filter(None, map(str.strip, text.split(","))):
        require(name in known or ":" in name, "log.sinks", text, allowed)
        makers.append(registry.find("sinks", name) or resolve("log.sinks", name))
    return makers


class StepLines(RunSink):
    """The console lines of each step."""

    def __init__(self, progress: Progress, total_steps: int):
        self._progress = progress
        self._total_steps = total_steps

    def on_row(self, step: int, values: dict[str, float]) -> None:
        if step > 0:
            self._progress.step(step, self._total_steps, values)


class MetricRows(RunSink):
    """The rows of metrics.jsonl.

    Args:
        last_row: step of the last row to keep; later ones are removed.
        storage: warns about unreadable lines and failed writes.

    Raises:
        ConfigError: metrics.jsonl cannot be cut.
    """

    def __init__(self, run_dir: Folder, last_row: int, storage: Storage | None = None):
        self._storage = storage or Storage()
        self._file = AppendFile(run_dir / "metrics.jsonl")
        path = self._file.path
        try:
            broken = rewind(path, last_row)
        except OSError as error:
            raise ConfigError(
                f"config.run_dir = {str(run_dir)!r}: metrics.jsonl can't be cut back to step "
                f"{last_row}: {reason(error)}"
            ) from None
        if broken:
            self._storage.warn(
                f"{broken} lines of {path} are no rows: they were removed, and nothing else is lost"
            )

    def on_row(self, step: int, values: dict[str, float]) -> None:
        line = {"step": step, "time": round(time.time(), 3)}
        line |= {name: _number(value) for name, value in values.items()}
        self._file.add(json.dumps(line).encode() + b"\n")
        self._write()

    def read(self) -> list[dict[str, Any]]:
        """Return the rows so far, and write those that could not be written before."""
        self._write()
        return read_rows(self._file.path)

    def close(self, failed: bool) -> None:
        self._write()

    def _write(self) -> None:
        if self._file.waits:
            self._storage.attempt(self._file.path.name, self._file.write)


class RolloutFiles(RunSink):
    """The files of rollouts/, written in the background."""

    def __init__(self, run_dir: Folder, log: Log, split: Split, storage: Storage):
        self._run_dir = run_dir
        self._log = log
        self._split = split
        self._storage = storage

    def on_rollouts(self, step: int, collected: CollectedGroups) -> None:
        def write() -> None:
            log = self._log
            write_rollouts(self._run_dir, step, collected, log.token_groups, self._split)
            for path in (self._run_dir / "rollouts").glob("step_*.jsonl"):
                if log.rollouts_keep and path.name <= rollouts_name(step - log.rollouts_keep):
                    path.unlink(missing_ok=True)

        self._storage.attempt_later("rollouts/", write)


def _number(value: float) -> float | None:
    """Return a finite float; None for NaN and infinity: JSON lacks them."""
    return float(value) if math.isfinite(value) else None


def _rounded(values: np.ndarray) -> list[float]:
    """Round numbers for a file, as float64: a rounded float32 has many decimals."""
    return values.astype(float).round(TOKEN_DECIMALS).tolist()


def token_fields(completion: Completion, trace: Trace | None, split: Split) -> dict[str, list]:
    """Return texts, log-probs, ratios and clips of the sampled tokens of a response."""
    fields = {
        "token_texts": split(completion.drawn_tokens.tolist()),
        "token_logprobs": _rounded(completion.sampler_logprobs[completion.drawn]),
    }
    if trace and trace.ratios is not None and trace.clipped is not None:
        fields["token_ratios"] = _rounded(trace.ratios)
        fields["token_clipped"] = trace.clipped.astype(int).tolist()
    return fields


def trajectory_fields(completion: Completion) -> dict[str, list]:
    """Return turns as (speaker, tokens, text), and rewards and failures of the environment."""
    if not (completion.turns or completion.rewards):
        return {}
    turns = [[POLICY if t.drawn else ENVIRONMENT, t.tokens, t.text] for t in completion.turns]
    fields = {"environment_rewards": list(completion.rewards), "turns": turns}
    if failures := list(filter(None, completion.failures)):
        fields["environment_failures"] = failures
    return fields


def _scores(group: Group, sample: int, trace: Trace | None) -> dict[str, Any]:
    verdict = group.verdicts[sample]
    scores = {
        "extracted": verdict.extracted,
        "correct": bool(group.correct[sample]),
        "outcome": group.outcomes[sample],
        "reward": _number(group.rewards[sample]),
        "reward_parts": {k: _number(v[sample]) for k, v in group.reward_parts.items()},
        "failure": None,
        "advantage": trace and _number(trace.advantage),
    }
    if verdict.token_rewards is not None:
        scores["token_rewards"] = verdict.token_rewards
    return scores


def _no_scores(failure: Failure) -> dict[str, Any]:
    names = ("extracted", "correct", "reward", "advantage")
    fields = {"outcome": failure.outcome, "reward_parts": {}, "failure": failure.text}
    return dict.fromkeys(names) | fields


def _rollout_line(
    group: Group, completion: Completion, scores: dict[str, Any], surplus: bool
) -> dict[str, Any]:
    """Return the fields of a response; those of its tokens are added by `write_rollouts`."""
    line = {
        "source": group.prompt.source,
        "prompt_id": group.prompt.id,
        "digest": group.prompt.digest,
        "index": group.prompt.index,
        "sample": completion.sample,
        "surplus": surplus,
        "prompt": group.prompt.text,
        "prompt_tokens": len(group.prompt.tokens),
        "response": completion.text,
        "answer": group.prompt.answer,
        "truncated": completion.truncated,
        "tokens": len(completion),
        "policy_step": completion.policy_step,
    }
    line |= scores | trajectory_fields(completion)
    if len(completion.drawn_by) > 1:
        line["drawn_by"] = completion.drawn_by
    return line


def write_rollouts(
    run_dir: Folder,
    step: int,
    collected: CollectedGroups,
    token_groups: int = 0,
    split: Split | None = None,
) -> None:
    """Write rollouts/step_NNNNNN.jsonl atomically, a line per scored response.

    Args:
        token_groups: number of trained groups, the last ones, whose tokens are written as well.
        split: returns the text of each of those tokens; None: write no tokens.
    """
    first = max(0, len(collected.groups) - token_groups)
    with_tokens = {group.prompt.index for group in collected.groups[first:]}
    surplus = {group.prompt.index for group in collected.surplus}
    path = run_dir / "rollouts" / rollouts_name(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for group in collected.judged + collected.surplus + collected.broken:
            index = group.prompt.index
            is_surplus = index in surplus or index >= collected.next_position
            traces = collected.traces.get(index) or [None] * len(group.completions)
            for sample, completion in enumerate(group.completions):
                scores = _scores(group, sample, traces[sample])
                line = _rollout_line(group, completion, scores, is_surplus)
                if split and index in with_tokens:
                    line |= token_fields(completion, traces[sample], split)
                file.write(json.dumps(line).encode() + b"\n")
            for completion, failure in group.failed:
                line = _rollout_line(group, completion, _no_scores(failure), is_surplus)
                file.write(json.dumps(line).encode() + b"\n")
