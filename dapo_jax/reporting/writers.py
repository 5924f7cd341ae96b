"""Where what was measured is written: metrics.jsonl, event files, rollouts/."""

import json
import math
import time

import numpy as np

# The classes of a .proto are made when its module is imported.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dapo_jax.filtering import Collected
from dapo_jax.marks import Folder
from dapo_jax.prompts.tokenizer import TextStream, Tokenizer
from dapo_jax.reporting.metrics import MEANINGS
from dapo_jax.reporting.tracking import Tracker
from dapo_jax.structs import Completion, Trace

TOKEN_DECIMALS = 3


def rewind_jsonl(path: Folder, step: int) -> None:
    """Drops the lines after `step`, and a line that a kill cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


class MetricWriter:
    """Appends to metrics.jsonl, to TensorBoard's event files and to a tracker.

    Args:
        last_row: lines of later steps are dropped.
        tensorboard: whether there are events, too.
        tracker: gets the same; whoever made it closes it.
    """

    def __init__(
        self, run_dir: Folder, last_row: int, tensorboard: bool, tracker: Tracker | None = None
    ):
        self.path, self._tracker = run_dir / "metrics.jsonl", tracker
        rewind_jsonl(self.path, last_row)
        self._events = EventFileWriter(str(run_dir / "tensorboard")) if tensorboard else None
        if self._events:  # TensorBoard drops earlier events of the steps that come again
            restart = SessionLog(status=SessionLog.START)
            self._events.add_event(
                Event(wall_time=time.time(), step=last_row + 1, session_log=restart)
            )

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line, with its time, and one event. Raises KeyError for a name without a meaning."""
        for name in values:
            MEANINGS[name.split("/")[0]]
        line = {"step": step, "time": round(time.time(), 3)}
        line |= {name: _number(value) for name, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._tracker:
            self._tracker.write(step, values)
        if self._events:
            entries = [
                Summary.Value(tag=name, simple_value=value) for name, value in values.items()
            ]
            summary = Summary(value=entries)
            event = Event(wall_time=time.time(), step=step, summary=summary)
            self._events.add_event(event)
            self._events.flush()

    def read(self) -> list[dict[str, float]]:
        """All lines so far."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def close(self) -> None:
        if self._events:
            self._events.close()


def _number(value: float) -> float | None:
    """What JSON can hold of a float."""
    return float(value) if math.isfinite(value) else None


def _short(values: np.ndarray) -> list[float]:
    """As float64, whose decimals are short in a file; those of float32 are not."""
    return values.astype(float).round(TOKEN_DECIMALS).tolist()


def token_fields(
    completion: Completion, trace: Trace | None, tokenizer: Tokenizer
) -> dict[str, list]:
    """The text of each token and what is known of it. A character of several stands at its last."""
    stream = TextStream(tokenizer)
    texts = [stream.add([token]) for token in completion.tokens.tolist()]
    texts[-1:] = [one + stream.rest() for one in texts[-1:]]
    found = {"token_texts": texts, "token_logprobs": _short(completion.sampler_logprobs)}
    if trace and trace.ratios is not None and trace.clipped is not None:
        found |= {"token_ratios": _short(trace.ratios)}
        found |= {"token_clipped": trace.clipped.astype(int).tolist()}
    return found


def write_rollouts(
    run_dir: Folder,
    step: int,
    collected: Collected,
    token_groups: int = 0,
    tokenizer: Tokenizer | None = None,
) -> None:
    """rollouts/step_NNNNNN.jsonl: a line per judged response, complete or absent.

    Args:
        token_groups: of the last so many trained groups every token is written, too.
        tokenizer: needed for that.
    """
    first = max(0, len(collected.groups) - token_groups)
    told = {group.prompt.index for group in collected.groups[first:]}
    groups = collected.judged + collected.surplus + collected.broken
    folder = run_dir / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.jsonl"
    with path.with_suffix(".tmp").open("w") as file:
        for group in groups:
            for i, (completion, verdict) in enumerate(
                zip(group.completions, group.verdicts, strict=True)
            ):
                traces = collected.traces.get(group.prompt.index)
                trace = traces[i] if traces else None
                line = {
                    "source": group.prompt.source,
                    "prompt_id": group.prompt.id,
                    "index": group.prompt.index,
                    "sample": i,
                    "surplus": group.prompt.index >= collected.next_position,
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
                if tokenizer and group.prompt.index in told:
                    line |= token_fields(completion, trace, tokenizer)
                file.write(json.dumps(line) + "\n")
    path.with_suffix(".tmp").replace(path)
