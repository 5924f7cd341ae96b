"""Responses to held-out problems: sampling, scores, and the file that keeps them."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.contracts import Sampler
from dapo_jax.reporting.scores import REFLECTION, Report, Response, make_report
from dapo_jax.reporting.sinks import trajectory_fields
from dapo_jax.rewards.group_rewards import repetition
from dapo_jax.rewards.judge import Judge, Pending
from dapo_jax.rollout.sampling import SAMPLE_FOR_EVALUATION
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.jsonl import AppendFile, read_object, spell
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import Storage, reason, replacing, write_text
from dapo_jax.structs import Group, Interrupted, Prompt, SamplingRule
from dapo_jax.verifier.algebra_process import same_answer

MAX_WAIT_SECONDS = 2.0  # for open verdicts when an evaluation is stopped
FIELDS = {field.name for field in dataclasses.fields(Response)}
REQUIRED_FIELDS = {
    field.name for field in dataclasses.fields(Response) if field.default is dataclasses.MISSING
}


def evaluation_rule(config: Config) -> SamplingRule:
    """Return the sampling rule of held-out responses."""
    return SamplingRule(config.evaluation.temperature, config.evaluation.top_p)


def split_scored(pending: list[Pending]) -> tuple[list[Pending], list[Pending]]:
    """Return the groups with complete verdicts, and the others; every host agrees."""
    is_scored = processes.map_over_hosts(
        [group.prompt.index for group in pending],
        lambda i: all(verdict.done() for verdict in pending[i].verdicts),
        "which are judged",
    )
    ready = [group for group, scored in zip(pending, is_scored, strict=True) if scored]
    return ready, [group for group, scored in zip(pending, is_scored, strict=True) if not scored]


def sample_responses(
    params: Any,
    wanted: Sequence[tuple[Prompt, Sequence[int]]],
    sampler: Sampler,
    judge: Judge,
    rule: SamplingRule,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Response]:
    """Yield scored responses as they finish.

    Prompt and sample number alone determine the random key: two policies are compared on the same
    random numbers, and a response sampled later equals the one that would have come at once.
    """
    sampler.begin(params, purpose=SAMPLE_FOR_EVALUATION, step=0, rule=rule)
    for prompt, samples in wanted:
        sampler.submit_each(prompt, samples)
    pending: list[Pending] = []
    while not sampler.idle and not interrupted():
        pending += [judge.submit(*finished) for finished in sampler.decode_burst()]
        scored, pending = split_scored(pending)
        for group in judge.groups(scored):
            yield from make_responses(group)
    stopped = not sampler.idle
    sampler.release()
    if stopped:
        futures.wait([v for group in pending for v in group.verdicts], MAX_WAIT_SECONDS)
        pending, _ = split_scored(pending)
    for group in judge.groups(pending):
        yield from make_responses(group)
    if stopped:
        raise Interrupted


def sample_heldout(
    config: Config,
    params: Any,
    prompts: list[Prompt],
    sampler: Sampler,
    judge: Judge,
    interrupted: Callable[[], bool],
) -> list[Response]:
    """Return k scored responses to each prompt. Raises `Interrupted`."""
    numbers = range(config.evaluation.samples_per_problem)
    wanted = [(prompt, numbers) for prompt in prompts]
    rule = evaluation_rule(config)
    return list(sample_responses(params, wanted, sampler, judge, rule, interrupted))


def report_on(responses: Sequence[Response], config: Config) -> Report:
    """Return the report on responses; the config's seed is that of the bootstrap."""
    return make_report(responses, same_answer, config.seed)


def heldout_metrics(report: Report) -> dict[str, float]:
    """Return the metrics of a report, without missing values."""
    values = {
        "heldout_accuracy": report.accuracy.value,
        "heldout_accuracy_low": report.accuracy.low,
        "heldout_accuracy_high": report.accuracy.high,
        "heldout_pass_at_k": report.pass_at_k[max(report.pass_at_k)].value,
        "heldout_majority": report.majority.value,
        "heldout_answer_not_found_rate": report.answer_not_found_rate,
        "heldout_truncated_fraction": report.truncated_fraction,
        "heldout_response_tokens": report.response_tokens,
        "heldout_turns": report.turns,
        "heldout_repetition": report.repetition,
        "heldout_reflection_fraction": report.reflection_fraction,
        "heldout_entropy": report.entropy,
    }
    return {name: value for name, value in values.items() if value is not None}


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
    scored = zip(group.completions, group.verdicts, group.correct, strict=True)
    for completion, verdict, correct in scored:
        yield Response(
            problem=prompt.id,
            index=prompt.index,
            sample=completion.sample,
            question=prompt.text,
            answer=prompt.answer,
            response=completion.text,
            extracted=verdict.extracted,
            correct=bool(correct),
            truncated=completion.truncated,
            tokens=len(completion),
            logprob=round(float(completion.sampler_logprobs.sum(dtype=float)), 4),
            reflection=bool(REFLECTION.search(completion.text)),
            repetition=repetition(completion.drawn_tokens),
            failure=verdict.broken or verdict.failure,
            subject=prompt.subject,
            level=prompt.level,
            turns=trajectory_fields(completion).get("turns", ()),
        )


def write_responses(path: Folder, responses: Iterable[Response], stamp: dict[str, Any]) -> None:
    """Write a whole file or nothing, sorted by problem and sample; `stamp` is in every line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for response in sorted(responses, key=lambda response: (response.index, response.sample)):
            file.write(_line(response, stamp))


def _line(response: Response, stamp: dict[str, Any]) -> bytes:
    fields = dataclasses.asdict(response)
    if not response.turns:
        del fields["turns"]
    return json.dumps(fields | stamp).encode() + b"\n"


def _read(path: Folder) -> tuple[list[Response], list[int]]:
    """Return the responses of a file and the numbers of broken lines; a cut last line is none."""
    responses, broken = [], []
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, 1):
        values = read_object(line)
        if values is not None and values.keys() >= REQUIRED_FIELDS:
            responses.append(Response(**{name: values[name] for name in FIELDS & set(values)}))
        else:
            broken.append(number)
    return responses, broken


class ResponseFile:
    """Response file of an evaluation: JSON lines, so that no response is sampled twice.

    Args:
        folder: None on all processes but the first, which keep responses in memory only.
        settings: values, by name, that determine the responses.
        stamp: fields of every line.
        storage: reports unreadable lines and failed writes.

    Attributes:
        responses: old and new ones by (position in the problem file, sample).

    Raises `ConfigError` that names every setting that differs from those of the folder.
    """

    def __init__(
        self,
        folder: Folder | None,
        settings: dict[str, Any],
        stamp: dict[str, Any],
        storage: Storage | None = None,
    ):
        self._stamp = stamp
        self._storage = storage or Storage()
        self.responses: dict[tuple[int, int], Response] = {}
        self.path = None if folder is None else folder / "responses.jsonl"
        if folder is not None:
            self._open(folder, folder / "responses.jsonl", settings)

    def _open(self, folder: Folder, path: Folder, settings: dict[str, Any]) -> None:
        settings_path = folder / "settings.json"
        try:
            if settings_path.exists():
                check_same_evaluation(folder, settings, json.loads(settings_path.read_text()))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                write_text(settings_path, json.dumps(settings, indent=2))
            responses, broken = _read(path)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the evaluation in {str(folder)!r} can't resume: {reason(error)}; choose another "
                "folder by --out, or remove that one"
            ) from None
        if broken:
            self._storage.warn(
                f"lines {spell(broken)} of {path} are not responses: they are sampled again"
            )
        # Sample and score a response again if its verdict failed.
        self.responses = {(r.index, r.sample): r for r in responses if r.failure is None}
        self._lines = AppendFile(path)
        self.tidy()

    def append(self, response: Response) -> None:
        """Add a line: on disk when this returns, on an object store soon."""
        self.responses[response.index, response.sample] = response
        if self.path is not None:
            self._lines.add(_line(response, self._stamp))
            write = functools.partial(self._lines.write, rarely=True)
            self._storage.attempt(self.path.name, write)

    def tidy(self) -> None:
        """Sort the lines, which were written in the order in which responses finished."""
        path = self.path
        if path is not None:
            responses = self.responses.values()
            self._storage.attempt(path.name, lambda: write_responses(path, responses, self._stamp))


def check_same_evaluation(folder: Folder, settings: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise `ConfigError` that names every setting that differs from those in `folder`."""
    changed = [
        f"{name}: {settings.get(name)!r}, but it was begun with {saved.get(name)!r}"
        for name in sorted(settings | saved)
        if settings.get(name) != saved.get(name)
    ]
    if changed:
        raise ConfigError(
            f"the evaluation in {str(folder)!r} can't resume with other settings; choose another "
            "folder by --out:\n  " + "\n  ".join(changed)
        )
