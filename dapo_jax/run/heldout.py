"""Responses to held-out problems, their scores and their files."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.reporting.scores import REFLECTION, Report, Response, make_report
from dapo_jax.reporting.sinks import trajectory_fields
from dapo_jax.rewards.group_rewards import repetition
from dapo_jax.rewards.judge import Pending
from dapo_jax.rewards.verifying import open_verifier
from dapo_jax.rollout.dynamic_sampling import Starved
from dapo_jax.rollout.sampling import SAMPLE_FOR_EVALUATION
from dapo_jax.run.build import Components
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import replacing
from dapo_jax.types.structs import (
    Completion,
    Group,
    Interrupted,
    Prompt,
    RolloutKey,
    SamplingRule,
)

# Means over responses in a report.
MEANS = (
    "answer_not_found_rate truncated_fraction response_tokens turns repetition "
    "reflection_fraction entropy"
).split()
MAX_WAIT_SECONDS = 2.0  # for open verdicts when an evaluation is stopped


def sample_responses(
    components: Components,
    params: Any,
    wanted: Sequence[tuple[Prompt, Sequence[int]]],
    rule: SamplingRule,
    interrupted: Callable[[], bool],
) -> Iterator[Response]:
    """Yield scored responses to prompts, by sample number, as they finish. Raises `Interrupted`.

    Prompt and sample number alone determine the random key: two policies are compared on the same
    random numbers, and a response sampled later equals the one that would have come at once.
    """
    sampler, judge = components.sampler, components.judge
    sampler.begin(params, RolloutKey(SAMPLE_FOR_EVALUATION), rule)
    for prompt, samples in wanted:
        sampler.submit(prompt, samples)
    pending: list[Pending] = []
    while not sampler.idle and not interrupted():
        pending += [judge.submit(request.prompt, done) for request, done in sampler.step()]
        groups, pending = judge.read(pending, 0)
        for group in groups:
            yield from make_responses(group)
    stopped = not sampler.idle
    sampler.close()
    if stopped:
        futures.wait([group.verdicts for group in pending if group.verdicts], MAX_WAIT_SECONDS)
    groups, unread = judge.read(pending, 0 if stopped else len(pending))
    judge.cancel(unread)
    for group in groups:
        yield from make_responses(group)
    if stopped:
        raise Interrupted


def check_scored(responses: Sequence[Response]) -> None:
    """Raise `Starved` if no response has a reward. A collective call."""

    def first_failure() -> str:
        failures = [response.failure for response in responses if response.failure is not None]
        return failures[0] if len(failures) == len(responses) else ""

    if failure := processes.broadcast_from_host0(first_failure, "failed rewards"):
        raise Starved(f"the reward failed for every held-out response, first: {failure}")


def report_on(responses: Sequence[Response], config: Config) -> Report:
    """Return the report on responses; the config's seed is that of the bootstrap."""
    verifier = open_verifier(config.reward, config.extras)
    return make_report(responses, verifier.same_answer, config.seed)


def heldout_metrics(report: Report) -> dict[str, float]:
    """Return the metrics of a report, without missing values."""
    reward = report.reward
    ends = {"": reward.value, "_low": reward.low, "_high": reward.high} if reward else {}
    values = {
        "heldout_accuracy": report.accuracy.value,
        "heldout_accuracy_low": report.accuracy.low,
        "heldout_accuracy_high": report.accuracy.high,
        **{f"heldout_reward{end}": value for end, value in ends.items()},
        "heldout_pass_at_k": report.pass_at_k[max(report.pass_at_k)].value,
        "heldout_majority": report.majority.value,
    } | {f"heldout_{name}": getattr(report, name) for name in MEANS}
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

    def make_response(completion: Completion, **scores: Any) -> Response:
        return Response(
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
            repetition=repetition(completion.drawn_tokens),
            subject=prompt.subject,
            level=prompt.level,
            digest=prompt.digest,
            turns=trajectory_fields(completion).get("turns", ()),
            **scores,
        )

    for i, completion in enumerate(group.completions):
        yield make_response(
            completion,
            extracted=group.verdicts[i].extracted,
            correct=bool(group.correct[i]),
            reward=float(group.rewards[i]),
            outcome=group.outcomes[i],
        )
    for completion, failure in group.failed:
        how = {"failure": failure.text, "outcome": failure.outcome}
        yield make_response(completion, extracted=None, correct=False, **how)


def write_responses(path: Folder, responses: Iterable[Response], stamp: dict[str, Any]) -> None:
    """Write a whole file or nothing, sorted by problem and sample; `stamp` is in every line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for response in sorted(responses, key=lambda response: (response.index, response.sample)):
            file.write(response_line(response, stamp))


def response_line(response: Response, stamp: dict[str, Any]) -> bytes:
    """Return a line of a file of responses."""
    fields = dataclasses.asdict(response)
    if not response.turns:
        del fields["turns"]
    return json.dumps(fields | stamp).encode() + b"\n"
