"""Writers of a run's files: metrics.jsonl, TensorBoard's events, rollouts/."""

import io
import json
import math
import os
import socket
import time

import numpy as np

# The classes of a .proto are made when its module is imported.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.reporting.scores import ENVIRONMENT, POLICY
from dapo_jax.reporting.wandb_tracker import Tracker
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.jsonl import BROKEN, AppendFile, objects, rewind, spell
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import Storage, reason, replacing
from dapo_jax.structs import CollectedGroups, Completion, Trace

TOKEN_DECIMALS = 3


def _rows(path: Folder) -> list[dict[str, float]]:
    return list(objects(path)) if path.exists() else []


def rollouts_name(step: int) -> str:
    """Name of a step's file in rollouts/."""
    return f"step_{step:06d}.jsonl"


class MetricWriter:
    """Rows of metrics, appended to metrics.jsonl, TensorBoard's event file and a tracker.

    Args:
        last_row: step of the last row that stays; later ones are dropped.
        tensorboard: whether an event file is written.
        tracker: stays open; its maker closes it.
        storage: warns of lines that can't be read and of writes that fail.

    Raises `ConfigError` where metrics.jsonl can't be cut back.
    """

    def __init__(
        self,
        run_dir: Folder,
        last_row: int,
        tensorboard: bool,
        tracker: Tracker | None = None,
        storage: Storage | None = None,
    ):
        self._storage, self._tracker = storage or Storage(), tracker
        self._lines = AppendFile(run_dir / "metrics.jsonl")
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._events = AppendFile(run_dir / "tensorboard" / name) if tensorboard else None
        try:
            broken = rewind(self._lines.path, last_row)
        except OSError as error:
            raise ConfigError(
                f"config.run_dir = {str(run_dir)!r}: metrics.jsonl can't be cut back to step "
                f"{last_row}: {reason(error)}"
            ) from None
        if broken:
            self._storage.warn(
                f"lines {spell(broken)} of {self._lines.path} are no rows: they are now in "
                f"{self._lines.path.name}{BROKEN}, and nothing else is lost"
            )
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # TensorBoard drops earlier events of the steps that come again.
        restart = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=last_row + 1, session_log=restart))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends a row, with its time, and an event."""
        line = {"step": step, "time": round(time.time(), 3)}
        line |= {name: _number(value) for name, value in values.items()}
        self._lines.add(json.dumps(line).encode() + b"\n")
        self._storage.attempt(self._lines.path.name, self._lines.write)
        if self._tracker:
            self._tracker.write(step, values)
        entries = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=entries)))

    def _add(self, event: Event) -> None:
        if self._events:
            packed = io.BytesIO()
            RecordWriter(packed).write(event.SerializeToString())
            self._events.add(packed.getvalue())
            self._storage.attempt("TensorBoard's file", self._events.write)

    def read(self) -> list[dict[str, float]]:
        """Rows so far."""
        return _rows(self._lines.path)


def _number(value: float) -> float | None:
    """A finite float; None, which JSON has, in place of any other."""
    return float(value) if math.isfinite(value) else None


def _short(values: np.ndarray) -> list[float]:
    """Rounded numbers for a file, as float64: decimals of a float32 would be long again."""
    return values.astype(float).round(TOKEN_DECIMALS).tolist()


def token_fields(
    completion: Completion, trace: Trace | None, tokenizer: Tokenizer
) -> dict[str, list]:
    """Texts, log-probs, ratios and clips of a response's drawn tokens."""
    texts = tokenizer.split(completion.drawn_tokens.tolist())
    logprobs = completion.sampler_logprobs[completion.drawn]
    fields = {"token_texts": texts, "token_logprobs": _short(logprobs)}
    if trace and trace.ratios is not None and trace.clipped is not None:
        fields |= {"token_ratios": _short(trace.ratios)}
        fields |= {"token_clipped": trace.clipped.astype(int).tolist()}
    return fields


def trajectory_fields(completion: Completion) -> dict[str, list]:
    """Turns of a trajectory as (speaker, tokens, text), and rewards and failures of its steps."""
    if not (completion.turns or completion.rewards):
        return {}
    turns = [[POLICY if t.drawn else ENVIRONMENT, t.tokens, t.text] for t in completion.turns]
    own = {"environment_rewards": list(completion.rewards), "turns": turns}
    failures = list(filter(None, completion.failures))
    return own | ({"environment_failures": failures} if failures else {})


def write_rollouts(
    run_dir: Folder,
    step: int,
    collected: CollectedGroups,
    token_groups: int = 0,
    tokenizer: Tokenizer | None = None,
    keep: int = 0,
) -> None:
    """Writes rollouts/step_NNNNNN.jsonl, a line per judged response, whole or not at all.

    Args:
        token_groups: number of trained groups, the last ones, whose tokens are written as well.
        tokenizer: decodes those tokens; without it none are written.
        keep: how many of the newest files stay, up to this step's; 0: all.
    """
    first = max(0, len(collected.groups) - token_groups)
    with_tokens = {group.prompt.index for group in collected.groups[first:]}
    groups = collected.judged + collected.surplus + collected.broken
    surplus = {group.prompt.index for group in collected.surplus}
    folder = run_dir / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / rollouts_name(step)
    with replacing(path) as file:
        for group in groups:
            for i, (completion, verdict) in enumerate(
                zip(group.completions, group.verdicts, strict=True)
            ):
                trace = (collected.traces.get(group.prompt.index) or {i: None})[i]
                line = {
                    "source": group.prompt.source,
                    "prompt_id": group.prompt.id,
                    "index": group.prompt.index,
                    "sample": i,
                    "surplus": group.prompt.index in surplus
                    or group.prompt.index >= collected.next_position,
                    "prompt": group.prompt.text,
                    "prompt_tokens": len(group.prompt.tokens),
                    "response": completion.text,
                    "answer": group.prompt.answer,
                    "extracted": verdict.extracted,
                    "correct": bool(group.correct[i]),
                    "truncated": completion.truncated,
                    "tokens": len(completion),
                    "policy_step": completion.policy_step,
                    "reward": _number(group.rewards[i]),
                    "reward_parts": {k: _number(v[i]) for k, v in group.reward_parts.items()},
                    "failure": verdict.broken or verdict.failure,
                    "advantage": trace and _number(trace.advantage),
                }
                if verdict.token_rewards is not None:
                    line["token_rewards"] = verdict.token_rewards
                line |= trajectory_fields(completion)
                if len(completion.drawn_by) > 1:
                    line["drawn_by"] = completion.drawn_by
                if tokenizer and group.prompt.index in with_tokens:
                    line |= token_fields(completion, trace, tokenizer)
                file.write(json.dumps(line).encode() + b"\n")
    for older in folder.glob("step_*.jsonl") if keep else ():
        if older.name <= rollouts_name(step - keep):
            older.unlink(missing_ok=True)
