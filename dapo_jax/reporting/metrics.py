"""Metrics of a step by name. docs/metrics.md has their meanings, `writers.py` their files."""

import collections
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dapo_jax.algorithms import Algorithm
from dapo_jax.learner.advantages import Feedback, preference_margins
from dapo_jax.learner.batches import Mean
from dapo_jax.reporting.scores import REFLECTION
from dapo_jax.rewards.group_rewards import repetition
from dapo_jax.runtime.nonfinite import is_reason
from dapo_jax.structs import CollectedGroups, Completion, Group, SamplerCounts, present

# Beginnings of names whose values differ between two runs of the same settings.
CLOCKED = ("time", "seconds_", "sampled_tokens_per_second", "trained_tokens_per_second")

VARIANCE_FLOOR = 1e-12


def mean_or_zero(values: Any) -> float:
    """Mean of the values, 0 where there are none."""
    values = np.asarray(values, float)
    return float(values.mean()) if values.size else 0.0


def response_metrics(groups: list[Group]) -> dict[str, float]:
    """Means and shares over all responses of the groups."""
    completions: list[Completion] = [c for group in groups for c in group.completions]
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
        "repetition": mean_or_zero([repetition(c.tokens) for c in completions]),
        "reflection_fraction": mean_or_zero(reflects),
        "accuracy_with_reflection": mean_or_zero(correct[reflects]),
        "accuracy_without_reflection": mean_or_zero(correct[~reflects]),
    }


def verdict_counts(groups: list[Group]) -> dict[str, float]:
    """Verdicts of the groups by how they came about, and those that failed."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    decided = collections.Counter(verdict.decided for verdict in verdicts)
    return {
        "verifier_failures": float(sum(v.failure is not None for v in verdicts)),
        **{f"verdicts/{how}": float(n) for how, n in decided.items() if how},
    }


def age_metrics(groups: list[Group], step: int) -> dict[str, float]:
    """Ages, in steps, of the policies that drew the groups' tokens.

    Args:
        step: steps that the newest policy has learned.
    """
    completions = [c for group in groups for c in group.completions]
    drawn = np.array([part for c in completions for part in c.drawn_by], int).reshape(-1, 2)
    lags, tokens = step - drawn[:, 0], drawn[:, 1]
    return {
        "policy_lag": float(lags @ tokens) / max(1, tokens.sum()),
        "policy_lag_max": float(lags.max(initial=0)),
        "continued_fraction": mean_or_zero([len(c.drawn_by) > 1 for c in completions]),
    }


def rollout_metrics(
    collected: CollectedGroups, counts: SamplerCounts, step: int = 0
) -> dict[str, float]:
    """Metrics of a rollout batch: means leave its surplus groups out, counts of cost do not.

    Args:
        step: steps that the policy has learned.
    """
    judged, everything = max(1, len(collected.judged)), collected.judged + collected.surplus
    parts = {
        f"reward_parts/{name}": mean_or_zero([g.reward_parts[name] for g in collected.judged])
        for name in (collected.judged[0].reward_parts if collected.judged else ())
    }
    return (
        response_metrics(collected.judged)
        | verdict_counts([g for g in everything if g.prompt.index not in collected.reused])
        | parts
        | age_metrics(collected.groups, step)
        | counts.metrics()
        | {
            "broken_groups": float(len(collected.broken)),
            "kept_fraction": collected.with_signal / judged,
            "all_right_fraction": collected.all_right / judged,
            "all_wrong_fraction": collected.all_wrong / judged,
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


def _trained_tokens(collected: CollectedGroups) -> int:
    return sum(len(c) for group in collected.groups for c in group.completions)


def speed_metrics(
    collected: CollectedGroups, counts: SamplerCounts, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Tokens a second.

    Args:
        seconds: of the parts of the step, by metric.
    """
    updating = sum(seconds.get(f"seconds_{part}", 0.0) for part in ("update", "ahead"))
    return {
        "sampled_tokens_per_second": counts.tokens / seconds["seconds_rollout"],
        "trained_tokens_per_second": _trained_tokens(collected) / (updating or math.inf),
    }


def feedback_metrics(
    algorithm: Algorithm, feedback: Feedback, advantages: np.ndarray, returns: np.ndarray | None
) -> dict[str, float]:
    """Spread of the advantages; explained variance with a critic, accuracy and loss with pairs.

    Args:
        advantages, returns: of each token, [*M, R, T]; no returns without a critic.
    """
    on = feedback.trained
    values = {"advantage_std": float(advantages[on].std()) if on.any() else 0.0}
    if returns is not None and on.any():
        values_before = present(feedback.values, "values")[on]
        variance = float(returns[on].var())
        unexplained = float((returns[on] - values_before).var())
        # Equal returns leave nothing to explain.
        explained = 1 - unexplained / variance if variance > VARIANCE_FLOOR else 0.0
        values["explained_variance"] = explained
    if feedback.reference_log_ratios is not None and algorithm.trained_responses == "pairs":
        pairs, margins = preference_margins(feedback)
        losses = np.logaddexp(0.0, -algorithm.preference_beta * margins)
        values["preference_accuracy"] = mean_or_zero(margins > 0)
        values["preference_loss"] = mean_or_zero(losses)
    return values


def add_up(updates: list[dict[str, Mean]]) -> dict[str, float]:
    """Means of a step over its updates. A reason to skip an update is left out where it is 0."""
    names = updates[0] if updates else ()
    means = {
        name: sum((update[name] for update in updates[1:]), updates[0][name]).value()
        for name in names
    }
    return {name: mean for name, mean in means.items() if mean or not is_reason(name)}
