"""Responses to held-out problems, and their scores."""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.rewards.group_rewards import Pending
from dapo_jax.rewards.verifying import open_verifier
from dapo_jax.rollout.dynamic_sampling import Starved
from dapo_jax.rollout.sampling import SAMPLE_FOR_EVALUATION
from dapo_jax.run.build import Components
from dapo_jax.run.scores import Report, Response, make_report
from dapo_jax.run.sinks import make_responses
from dapo_jax.runtime import processes
from dapo_jax.types.structs import (
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


def sample_missing(
    components: Components,
    params: Any,
    prompts: Sequence[Prompt],
    interrupted: Callable[[], bool],
    responses: dict[tuple[int, int], Response],
    keep: Callable[[Response], Any] = lambda response: None,
    every_seconds: float = 0.0,
) -> list[Response]:
    """Return the k responses of an evaluation to each prompt, in order. Raises `Interrupted`.

    Args:
        responses: those of an earlier start, by (index of the prompt, sample), on the first process
            only; new ones are added.
        keep: receives each new response.
        every_seconds: least time between two console lines.
    """
    progress, settings = components.progress, components.config.evaluation
    rule = SamplingRule(settings.temperature, settings.top_p)
    saved = processes.broadcast_from_host0(lambda: list(responses), "saved responses")
    known = {tuple(key) for key in saved}
    samples = range(settings.samples_per_problem)
    keys = [(prompt.index, sample) for prompt in prompts for sample in samples]
    missing = [(p, [j for j in samples if (p.index, j) not in known]) for p in prompts]
    wanted = [(prompt, numbers) for prompt, numbers in missing if numbers]
    if done := sum(key in known for key in keys):
        progress.say(f"{done} of {len(keys)} responses are there already")
    with progress.evaluating(done, len(keys), every_seconds) as show:
        for response in sample_responses(components, params, wanted, rule, interrupted):
            responses[response.index, response.sample] = response
            keep(response)
            show(response)
    return [responses[key] for key in keys if key in responses]


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


def score_responses(
    responses: Sequence[Response],
    config: Config,
    publish: Callable[[Report], dict[str, Any]] = lambda report: {},
) -> dict[str, Any]:
    """Return the held-out metrics after what `publish` returns, which the first process calls.

    Equality of answers is decided in a worker process, so one process decides for all. Raises
    `Starved` if no response has a reward.
    """
    check_scored(responses)

    def score() -> dict[str, Any]:
        report = report_on(responses, config)
        return publish(report) | heldout_metrics(report)

    return processes.broadcast_from_host0(score, "held-out metrics")


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
