"""Metrics of a step by name. docs/metrics.md explains them."""

import collections
import math
from collections.abc import Mapping

import numpy as np

from dapo_jax.reporting.scores import REFLECTION
from dapo_jax.types.structs import (
    FAILURES,
    CollectedGroups,
    Group,
    Outcome,
    SamplerCounts,
    mean_or_zero,
    repetition,
)


def response_metrics(groups: list[Group]) -> dict[str, float]:
    """Return means over all responses of the groups."""
    completions = [completion for group in groups for completion in group.completions]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    correct = np.array([right for group in groups for right in group.correct], bool)
    lengths = np.array([len(completion) for completion in completions])
    reflects = np.array([bool(REFLECTION.search(c.text)) for c in completions], bool)
    return {
        "reward": mean_or_zero([reward for group in groups for reward in group.rewards]),
        "accuracy": mean_or_zero(correct),
        "response_tokens_mean": mean_or_zero(lengths),
        "response_tokens_max": float(lengths.max(initial=0)),
        "truncated_fraction": mean_or_zero([c.truncated for c in completions]),
        "response_tokens_right": mean_or_zero(lengths[correct]),
        "response_tokens_wrong": mean_or_zero(lengths[~correct]),
        "answer_not_found_rate": mean_or_zero([v.extracted is None for v in verdicts]),
        "repetition": mean_or_zero([repetition(c.drawn_tokens) for c in completions]),
        "reflection_fraction": mean_or_zero(reflects),
        "accuracy_with_reflection": mean_or_zero(correct[reflects]),
        "accuracy_without_reflection": mean_or_zero(correct[~reflects]),
    }


def verdict_counts(groups: list[Group]) -> dict[str, float]:
    """Return the numbers of verdicts by how they were decided."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    decided = collections.Counter(verdict.decided for verdict in verdicts)
    return {f"verdicts/{how}": float(n) for how, n in decided.items() if how}


def judge_counts(groups: list[Group]) -> dict[str, float]:
    """Return the requests to the judge, their tokens and their price."""
    parts = [verdict.parts for group in groups for verdict in group.verdicts]
    parts += [response.failure.counts for group in groups for response in group.failed]
    names = {name: None for own in parts for name in own if name.startswith("judge_")}
    return {f"judge/{name[6:]}": sum(own.get(name, 0.0) for own in parts) for name in names}


def outcome_metrics(outcomes: collections.Counter[Outcome]) -> dict[str, float]:
    """Return the number of rewards by outcome, and the fraction that failed."""
    failed = sum(outcomes[outcome] for outcome in FAILURES)
    return {
        **{f"outcomes/{outcome}": float(outcomes[outcome]) for outcome in Outcome},
        "failed_rewards": failed / max(1, outcomes.total()),
    }


def _age_metrics(groups: list[Group], step: int) -> dict[str, float]:
    """Return the ages, in steps, of the policies that sampled the groups' tokens."""
    completions = [completion for group in groups for completion in group.completions]
    drawn = np.array([part for c in completions for part in c.drawn_by], int).reshape(-1, 2)
    lags, tokens = step - drawn[:, 0], drawn[:, 1]
    return {
        "policy_lag": float(lags @ tokens) / max(1, tokens.sum()),
        "policy_lag_max": float(lags.max(initial=0)),
        "continued_fraction": mean_or_zero([len(c.drawn_by) > 1 for c in completions]),
    }


def _trained_tokens(collected: CollectedGroups) -> int:
    return sum(len(c) for group in collected.groups for c in group.completions)


def rollout_metrics(
    collected: CollectedGroups, counts: SamplerCounts, step: int = 0, min_spread: float = 0.0
) -> dict[str, float]:
    """Return the metrics of the groups of a step; means exclude surplus groups, costs do not.

    Args:
        step: number of steps that the policy was trained for.
        min_spread: rewards of a group that differ by no more have no spread.
    """
    judged = collected.judged
    is_flat = [not group.has_spread(min_spread) for group in judged]
    scored = [g for g in judged + collected.surplus if g.prompt.index not in collected.reused]
    return (
        response_metrics(judged)
        | verdict_counts(scored)
        | judge_counts(scored)
        | outcome_metrics(collected.outcomes)
        | {
            f"reward_parts/{name}": mean_or_zero(
                np.concatenate([group.reward_parts[name] for group in judged])
            )
            for name in (judged[0].reward_parts if judged else ())
        }
        | _age_metrics(collected.groups, step)
        | counts.metrics()
        | {
            "broken_groups": float(len(collected.broken)),
            "resampled_groups": float(len(collected.resampled)),
            "kept_fraction": collected.with_signal / max(1, len(judged)),
            "all_right_fraction": collected.all_right / max(1, len(judged)),
            "all_wrong_fraction": collected.all_wrong / max(1, len(judged)),
            "no_spread_fraction": mean_or_zero(is_flat),
            "surplus_groups": float(len(collected.surplus)),
            "trained_groups": float(len(collected.groups)),
            "sampled_to_kept_tokens": counts.drawn_tokens / max(1, _trained_tokens(collected)),
            "carried_groups": float(sum(group.tokens > 0 for group in collected.carried)),
            "carried_tokens": float(sum(group.tokens for group in collected.carried)),
            "expired_groups": float(collected.expired),
            "dropped_prompts": float(collected.dropped_prompts),
            "truncated_prompts": float(collected.truncated_prompts),
            "starved": float(collected.starved),
        }
    )


def speed_metrics(
    collected: CollectedGroups, counts: SamplerCounts, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the sampled and trained tokens per second.

    Args:
        seconds: of the parts of the step, by metric.
    """
    updating = sum(seconds.get(f"seconds_{part}", 0.0) for part in ("update", "ahead"))
    return {
        "sampled_tokens_per_second": counts.tokens / seconds["seconds_rollout"],
        "trained_tokens_per_second": _trained_tokens(collected) / (updating or math.inf),
    }
