"""Sinks for what a run reports (console, metrics.jsonl, rollouts/, callbacks), and its files.

Failed writes are warnings and are repeated with the next row.
"""

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.run.console import Progress
from dapo_jax.run.scores import ENVIRONMENT, POLICY, REFLECTION, Response
from dapo_jax.runtime import processes, registry
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.files import (
    AppendFile,
    Folder,
    Storage,
    json_line,
    objects,
    read_object,
    reason,
    rewind,
    suppress_storage_errors,
    write_lines,
    write_text,
)
from dapo_jax.runtime.user_code import resolve
from dapo_jax.types.contracts import RunSink
from dapo_jax.types.errors import ConfigError, nearest, require
from dapo_jax.types.structs import CollectedGroups, Completion, Group, Trace, repetition

CONFIG = "config.json"
SUMMARY = "summary.json"
EVENTS = ("on_step", "on_evaluation", "on_checkpoint", "on_row", "on_rollouts", "on_summary")
Split = Callable[[Sequence[int]], list[str]]  # the text of each token of a response
TOKEN_DECIMALS = 3


def name_of_step(step: int) -> str:
    """Return the name of a step's file in rollouts/ and evaluations/."""
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
        storage, path = storage or Storage(), run_dir / "metrics.jsonl"
        try:
            broken = rewind(path, last_row)
        except OSError as error:
            raise ConfigError(
                f"config.run_dir = {str(run_dir)!r}: metrics.jsonl can't be cut back to step "
                f"{last_row}: {reason(error)}"
            ) from None
        if broken:
            storage.warn(
                f"{broken} lines of {path} are no rows: they were removed, and nothing else is lost"
            )
        self._file = AppendFile(path, storage)

    def on_row(self, step: int, values: dict[str, float]) -> None:
        line = {"step": step, "time": round(time.time(), 3)}
        self._file.append(json_line(line | {name: _number(x) for name, x in values.items()}))

    def read(self) -> list[dict[str, Any]]:
        """Return the rows so far, and write those that could not be written before."""
        self._file.flush()
        return read_rows(self._file.path)

    def close(self, failed: bool) -> None:
        self._file.flush()


class ResponseFiles(RunSink):
    """The files of rollouts/ and evaluations/, a line per scored response.

    Those of rollouts/ are written in the background; lines of the last `log.token_groups` trained
    groups have their tokens too.
    """

    def __init__(self, run_dir: Folder, config: Config, split: Split, storage: Storage):
        self._run_dir, self._folder = run_dir, run_dir / "rollouts"
        self._config, self._log = config, config.log
        self._split, self._storage = split, storage

    def on_evaluation(self, step: int, responses: Sequence[Any]) -> None:
        path = self._run_dir / "evaluations" / name_of_step(step)
        lines = stamp(self._config, f"step {step}")
        self._storage.attempt("evaluations/", lambda: write_responses(path, responses, lines))

    def on_rollouts(self, step: int, collected: CollectedGroups) -> None:
        self._storage.attempt_later("rollouts/", lambda: self._write(step, collected))

    def _write(self, step: int, collected: CollectedGroups) -> None:
        """Write the file of a step, completely or not at all, and remove those that are too old."""
        write_lines(self._folder / name_of_step(step), map(json_line, self._lines(collected)))
        for path in self._folder.glob("step_*.jsonl"):
            kept = self._log.rollouts_keep
            if kept and path.name <= name_of_step(step - kept):
                path.unlink(missing_ok=True)

    def _lines(self, collected: CollectedGroups) -> Iterator[dict[str, Any]]:
        first = max(0, len(collected.groups) - self._log.token_groups)
        with_tokens = {group.prompt.index for group in collected.groups[first:]}
        surplus = {group.prompt.index for group in collected.surplus}
        for group in collected.judged + collected.surplus + collected.broken:
            index = group.prompt.index
            is_surplus = index in surplus or index >= collected.next_position
            traces = collected.traces.get(index) or [None] * len(group.completions)
            for i, (completion, scores) in enumerate(scored_responses(group)):
                line = _rollout_line(group, completion) | scores | {"surplus": is_surplus}
                line |= {"reward_parts": {}, "advantage": None} | trajectory_fields(completion)
                if scores["failure"] is None:
                    trace = traces[i]
                    parts = {name: _number(part[i]) for name, part in group.reward_parts.items()}
                    line |= {"reward_parts": parts, "advantage": trace and _number(trace.advantage)}
                    if (rewards := group.verdicts[i].token_rewards) is not None:
                        line["token_rewards"] = rewards
                    if index in with_tokens:
                        line |= token_fields(completion, trace, self._split)
                yield line


def _number(value: float) -> float | None:
    """Return a finite float; None for NaN and infinity: JSON lacks them."""
    return float(value) if math.isfinite(value) else None


def _rounded(values: np.ndarray) -> list[float]:
    """Round numbers for a file, as float64: a rounded float32 has many decimals."""
    return values.astype(float).round(TOKEN_DECIMALS).tolist()


def token_fields(completion: Completion, trace: Trace | None, split: Split) -> dict[str, list]:
    """Return texts, log-probs, ratios and clips of the sampled tokens of a response."""
    fields = {
        "token_texts": split(completion.sampled_tokens.tolist()),
        "token_logprobs": _rounded(completion.sampler_logprobs[completion.is_sampled]),
    }
    if trace and trace.ratios is not None and trace.clipped is not None:
        fields["token_ratios"] = _rounded(trace.ratios)
        fields["token_clipped"] = trace.clipped.astype(int).tolist()
    return fields


def trajectory_fields(completion: Completion) -> dict[str, list]:
    """Return turns as (speaker, tokens, text), and rewards and failures of the environment."""
    if not (completion.turns or completion.rewards):
        return {}
    turns = [[POLICY if t.is_sampled else ENVIRONMENT, t.tokens, t.text] for t in completion.turns]
    fields = {"environment_rewards": list(completion.rewards), "turns": turns}
    if failures := list(filter(None, completion.failures)):
        fields["environment_failures"] = failures
    return fields


def scored_responses(group: Group) -> Iterator[tuple[Completion, dict[str, Any]]]:
    """Yield the responses of a scored group with their scores, then those without a reward."""
    for i, completion in enumerate(group.completions):
        scores = {
            "extracted": group.verdicts[i].extracted,
            "correct": bool(group.correct[i]),
            "outcome": group.outcomes[i],
            "reward": _number(group.rewards[i]),
            "failure": None,
        }
        yield completion, scores
    for completion, failure in group.failed:
        scores = dict.fromkeys(("extracted", "correct", "reward"))
        yield completion, scores | {"outcome": failure.outcome, "failure": failure.text}


def _rollout_line(group: Group, completion: Completion) -> dict[str, Any]:
    """Return the fields of a response that do not depend on its scores."""
    return {
        "source": group.prompt.source,
        "prompt_id": group.prompt.id,
        "digest": group.prompt.digest,
        "index": group.prompt.index,
        "sample": completion.sample,
        "prompt": group.prompt.text,
        "prompt_tokens": len(group.prompt.tokens),
        "response": completion.text,
        "answer": group.prompt.answer,
        "truncated": completion.truncated,
        "tokens": len(completion),
        "policy_step": completion.policy_step,
    } | ({"sampled_by": completion.sampled_by} if len(completion.sampled_by) > 1 else {})


def stamp(config: Config, policy: str) -> dict[str, Any]:
    """Return the fields that every line of a response file shares: policy and sampling."""
    return {
        "policy": policy,
        "seed": config.seed,
        "temperature": config.evaluation.temperature,
        "top_p": config.evaluation.top_p,
        "template": config.data.template,
    }


def make_responses(group: Group) -> Iterator[Response]:
    """Yield the responses of a scored group."""
    prompt = group.prompt
    for completion, scores in scored_responses(group):
        scores |= {"correct": bool(scores["correct"])}
        yield Response(
            problem=prompt.id,
            index=prompt.index,
            sample=completion.sample,
            question=prompt.text,
            answer=prompt.answer,
            response=completion.text,
            truncated=completion.truncated,
            tokens=len(completion),
            logprob=round(float(completion.sampler_logprobs.sum(dtype=float)), 4),
            reflection=bool(REFLECTION.search(completion.text)),
            repetition=repetition(completion.sampled_tokens),
            subject=prompt.subject,
            level=prompt.level,
            digest=prompt.digest,
            turns=trajectory_fields(completion).get("turns", ()),
            **scores,
        )


def write_responses(path: Folder, responses: Iterable[Response], stamp: dict[str, Any]) -> None:
    """Write a whole file or nothing, sorted by problem and sample; `stamp` is in every line."""
    responses = sorted(responses, key=lambda response: (response.index, response.sample))
    write_lines(path, (response_line(response, stamp) for response in responses))


def response_line(response: Response, stamp: dict[str, Any]) -> bytes:
    """Return a line of a file of responses."""
    fields = dataclasses.asdict(response)
    if not response.turns:
        del fields["turns"]
    return json_line(fields | stamp)


def read_summary(folder: Folder) -> dict[str, Any]:
    """Return the summary of a finished run; empty without one that can be read."""
    with suppress_storage_errors():
        return read_object((folder / SUMMARY).read_bytes()) or {}
    return {}


class RunFiles:
    """Sinks of a run, and the files that only the run itself writes.

    The first process writes; on the others every method does nothing. A file that can't be written
    is a warning, and is tried again with the next one. Rows after `last_row` are cut off.
    """

    def __init__(
        self,
        config: Config,
        folder: Folder,
        storage: Storage,
        split: Split,
        last_row: int,
        console: Progress,
    ):
        self.folder = folder
        self._config = config
        self._storage = storage
        self._rows: MetricRows | None = None
        self.sinks: list[RunSink] = []
        if not processes.is_first():
            return
        log = config.log
        self._rows = MetricRows(folder, last_row, storage)
        rows = self._rows.read()
        self.sinks.append(self._rows)
        if log.wandb or log.tensorboard:
            trackers = registry.feature("trackers")
            self.sinks += trackers.open_trackers(folder, config, rows, last_row, storage)
        self.sinks += [ResponseFiles(folder, config, split, storage)] if log.rollouts else []
        self.sinks += [make(folder, config) for make in find_sinks(log.sinks)]
        self.sinks.append(StepLines(console, config.total_steps))
        settings = folder / CONFIG
        if settings.exists() and read_object(settings.read_bytes()) is None:
            self.write_settings()  # the file is damaged

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with contextlib.ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close, kind is not None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        return self._rows.read() if self._rows else []

    def write_settings(self) -> None:
        """Write config.json; a run can be repeated from it."""
        self._write_json(CONFIG, dataclasses.asdict(self._config))

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        if processes.is_first():
            text = json.dumps(content, indent=2)
            self._storage.attempt(name, lambda: write_text(self.folder / name, text))

    def send(self, event: str, *arguments: Any) -> None:
        """Call a method of `RunSink` of all sinks."""
        for sink in self.sinks:
            getattr(sink, event)(*arguments)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, and send the summary to all sinks."""
        self._write_json(SUMMARY, summary)
        self.send("on_summary", summary)


def _check_callback(field: str, callback: Any) -> None:
    names = [name for name in dir(callback) if name.startswith("on_")]
    is_object = bool(names) and not isinstance(callback, type)
    allowed = f"an object with one or more of the methods {', '.join(EVENTS)}"
    require(is_object, field, callback, allowed)
    for name in names:
        hint = nearest(name, EVENTS) or f"; the events are {', '.join(EVENTS)}"
        if name not in EVENTS:
            raise ConfigError(f"{field}.{name}: there is no such event{hint}", field)


class Callbacks(RunSink):
    """The sink that calls a user's callbacks, on the first process only.

    If a callback returns True or raises, the run stops at the next safe point and saves;
    `raise_error` then raises the first exception.

    Raises `ConfigError` for an object without a method of `EVENTS`, or with an unknown one.
    """

    def __init__(
        self,
        signals: Signals,  # of the run; a callback stops the run through it
        callbacks: Sequence[Any] = (),  # objects with methods of `EVENTS`, or `close`: a `RunSink`
        on_step: Any = None,  # function that every process calls after the callbacks
    ):
        for i, callback in enumerate(callbacks):
            _check_callback(f"callbacks[{i}]", callback)
        self.signals = signals
        self._callbacks = list(callbacks) if processes.is_first() else []
        self._on_step = on_step
        self._error: Exception | None = None

    def on_row(self, step: int, values: dict[str, float]) -> None:
        self._send("on_row", step, values)
        if step > 0:
            self._send("on_step", step, values)
            self._call("on_step", self._on_step, step, values)

    def close(self, failed: bool) -> None:
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                if hasattr(callback, "close"):
                    stack.callback(callback.close, failed)
        self._callbacks = []

    def _send(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            self._call(event, getattr(callback, event, None), *arguments)

    on_rollouts: Any = functools.partialmethod(_send, "on_rollouts")
    on_evaluation: Any = functools.partialmethod(_send, "on_evaluation")
    on_checkpoint: Any = functools.partialmethod(_send, "on_checkpoint")  # once it is complete
    on_summary: Any = functools.partialmethod(_send, "on_summary")

    def _call(self, event: str, function: Any, *arguments: Any) -> None:
        if function is None:
            return
        try:
            stops = function(*arguments)
        except Exception as error:  # of the user: raised again after the save
            self._error = self._error or error
            stops = True
        if isinstance(stops, bool | np.bool_) and stops:
            self.signals.received = self.signals.received or event

    def raise_error(self) -> None:
        """Raise the first exception of a callback, if there was one."""
        if self._error is not None:
            raise self._error
