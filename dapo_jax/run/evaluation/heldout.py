"""Responses to held-out problems, and metrics of their report."""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.contracts import Sampler
from dapo_jax.reporting.scores import Report, Response, make_report
from dapo_jax.rewards.judge import Judge, Pending
from dapo_jax.rollout.sampling import SAMPLE_FOR_EVALUATION
from dapo_jax.run.evaluation.response_file import responses_of
from dapo_jax.runtime import processes
from dapo_jax.structs import Interrupted, Prompt, SamplingRule
from dapo_jax.verifier.algebra_process import same_answer

LAST_SECONDS = 2.0  # wait for open verdicts when an evaluation is stopped


def evaluation_rule(config: Config) -> SamplingRule:
    """Sampling rule of held-out responses."""
    return SamplingRule(config.evaluation.temperature, config.evaluation.top_p)


def split_judged(pending: list[Pending]) -> tuple[list[Pending], list[Pending]]:
    """Groups whose verdicts can be read without waiting, and the others."""
    judged = processes.map_over_hosts(
        [group.prompt.index for group in pending],
        lambda i: all(verdict.done() for verdict in pending[i].verdicts),
        "which are judged",
    )
    ready = [group for group, done in zip(pending, judged, strict=True) if done]
    return ready, [group for group, done in zip(pending, judged, strict=True) if not done]


def sample_responses(
    params: Any,
    wanted: Sequence[tuple[Prompt, Sequence[int]]],
    sampler: Sampler,
    judge: Judge,
    rule: SamplingRule,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Response]:
    """Yields judged responses as they finish.

    A draw is keyed by prompt and sample number alone: two policies are compared on the same random
    numbers, and a response drawn later is the one that would have come at once.

    Args:
        wanted: each prompt with the numbers of its samples.
        interrupted: asked between two bursts; `Interrupted` is raised after the responses that are
            judged by then.
    """
    sampler.begin(params, purpose=SAMPLE_FOR_EVALUATION, step=0, rule=rule)
    for prompt, samples in wanted:
        sampler.submit_each(prompt, samples)
    pending: list[Pending] = []
    while not sampler.idle and not interrupted():
        pending += [judge.submit(*finished) for finished in sampler.decode_burst()]
        judged, pending = split_judged(pending)
        for group in judge.groups(judged):
            yield from responses_of(group)
    stopped = not sampler.idle
    sampler.release()
    if stopped:
        futures.wait([verdict for group in pending for verdict in group.verdicts], LAST_SECONDS)
        pending, _ = split_judged(pending)
    for group in judge.groups(pending):
        yield from responses_of(group)
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
    """Draws k judged responses to each prompt. Raises `Interrupted`."""
    numbers = range(config.evaluation.samples_per_problem)
    wanted = [(prompt, numbers) for prompt in prompts]
    rule = evaluation_rule(config)
    return list(sample_responses(params, wanted, sampler, judge, rule, interrupted))


def report_on(responses: Sequence[Response], config: Config) -> Report:
    """Report on the responses, with the config's seed for the bootstrap."""
    return make_report(responses, same_answer, config.seed)


def heldout_metrics(report: Report) -> dict[str, float]:
    """Metrics of a report; a value that it lacks is left out."""
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
    """Origin of a response, by name: policy and sampling settings."""
    evaluation = config.evaluation
    return {
        "policy": policy,
        "seed": config.seed,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "template": config.data.template,
    }
