"""What is measured in a step, and under which name. `writers.py` says where it is written."""

import collections
import math
import time
from typing import Any

import numpy as np

from dapo_jax.algorithms import Algorithm
from dapo_jax.learner.advantages import Feedback, preference_margins
from dapo_jax.reporting.scores import REFLECTION
from dapo_jax.rewards.group_rewards import repetition
from dapo_jax.rollout.scheduler import SamplerCounts
from dapo_jax.runtime.nonfinite import is_reason
from dapo_jax.structs import Collected, Completion, Group, Mean

# Every name that a step logs, with the sentence that docs/metrics.md shows.
MEANINGS = {
    "time": "When the row was written, in unix seconds.",
    "reward": "Mean shaped reward over judged responses, before filtering; without the surplus.",
    "accuracy": "Share of right answers over the same responses.",
    "surplus_groups": "Groups judged beyond the last one that the step used: fast finishers, a "
    "biased sample, asked again in the next step. Costs count them (sampled tokens, verdicts, "
    "failures, broken groups); means and shares of a step leave them out.",
    "kept_fraction": "Share of judged groups that carry signal: right and wrong answers, or a "
    "spread of rewards where the config asks for that; without the surplus.",
    "all_right_fraction": "Share of judged groups where every answer is right; it grows as the "
    "task is learned (DAPO, figure 3b).",
    "all_wrong_fraction": "Share of judged groups where every answer is wrong.",
    "trained_groups": "Groups that the updates of this step saw.",
    "policy_lag": "Steps that the policy had learned since it drew the trained tokens, on average.",
    "policy_lag_max": "The same of the oldest trained token.",
    "continued_fraction": "Share of trained responses that several policies drew, one after the "
    "other (rollout.carry_over).",
    "carried_groups": "Groups that the step leaves to the next one, begun or judged "
    "(rollout.carry_over).",
    "carried_tokens": "Tokens of those groups: drawn, and not trained yet.",
    "expired_groups": "Groups that would have been carried too long (rollout.carry_over_max_age) "
    "and are drawn anew.",
    "starved": "1 where too few groups carried signal after max_sample_rounds.",
    "sampled_to_kept_tokens": "Sampled tokens, those of the surplus and of stopped responses too, "
    "per trained token: the price of dynamic sampling; what is carried over counts where it is "
    "drawn.",
    "response_tokens_mean": "Mean response length, end token included.",
    "response_tokens_max": "Longest response.",
    "truncated_fraction": "Share of responses cut off by the budget before their end token.",
    "response_tokens_right": "Mean length of right responses.",
    "response_tokens_wrong": "Mean length of wrong responses.",
    "answer_not_found_rate": "Share of responses in which the verifier found no answer; high at "
    "the start means that template and verifier disagree.",
    "verifier_failures": "Responses whose verdict was a time-out or an error, counted as wrong; "
    "with the surplus.",
    "verdicts": "Responses, with the surplus, by how their verdict came about, as "
    "`verdicts/direct` (strings, exact numbers), `/algebra`, `/remembered`, `/undecided` (no proof "
    "either way: wrong), `/unfinished` (right, but not worked out: wrong), `/scorer` (of a gym "
    "task), `/no_marker`, `/truncated_box`, `/too_long`, `/failed`.",
    "reward_parts": "Mean of every weighted part of the reward, as `reward_parts/rule`.",
    "broken_groups": "Groups dropped because a reward part raised or gave no finite number; with "
    "the surplus.",
    "repetition": "Share of 8-token windows that occur earlier in the same response.",
    "reflection_fraction": "Share of responses with a reflection word (wait, recheck, again, ...).",
    "accuracy_with_reflection": "Accuracy of the responses with a reflection word.",
    "accuracy_without_reflection": "Accuracy of the others.",
    "advantage_std": "Standard deviation of the advantages over trained tokens.",
    "loss": "Policy loss, mean over the step's updates: a surrogate, whose gradient matters. With "
    "coefficient 1 it stays at -1: read policy_nll; of DPO read preference_loss.",
    "entropy": "Mean entropy of the policy on trained tokens, in nats; collapse shows here first.",
    "kl_reference": "Mean KL of the policy to the reference (k3), in nats per token.",
    "importance_weight": "Mean weight that corrects the sampler's arithmetic (importance_cap).",
    "explained_variance": "1 - variance of (return - value) / variance of the returns, on trained "
    "tokens before the update; near 0 the critic knows nothing.",
    "value_loss": "Loss of the critic, mean over the step's updates.",
    "value_gradient_norm": "The critic's global gradient norm before clipping.",
    "value_skipped_updates": "`skipped_updates` of the critic.",
    "value_learning_rate": "The critic's learning rate of the step.",
    "value_clip_fraction": "Share of trained tokens where the value clip decided.",
    "preference_accuracy": "Share of pairs in which the right response gained more on the "
    "reference than the wrong one.",
    "preference_loss": "DPO's loss, mean over pairs, before the update.",
    "heldout_nll": "sft: `policy_nll` of held-out examples after the step.",
    "heldout_preference_accuracy": "dpo: that of held-out pairs after the step; a tie is a half.",
    "heldout_preference_loss": "dpo: that of held-out pairs after the step.",
    "mean_probability": "Mean probability of trained tokens under the policy before the update.",
    "clip_fraction_low": "Share of trained tokens whose gradient the lower clip cut.",
    "clip_fraction_high": "Share of trained tokens whose gradient the upper clip cut.",
    "clip_fraction_dual": "Share of trained tokens whose gradient the dual clip cut: negative "
    "advantage, ratio above dual_clip.",
    "up_clipped_probability": "Mean old probability of up-clipped tokens (DAPO, figure 3a).",
    "kl_sampler_trainer": "Mean log-prob difference, sampler minus trainer; near 0 where both "
    "compute the same policy.",
    "policy_nll": "Mean negative log-prob of trained tokens.",
    "gradient_norm": "Global gradient norm before clipping.",
    "skipped_updates": "Share of updates not taken because numbers were not finite; which, say "
    "`skipped_for_gradient`, `skipped_for_moments` and `skipped_for_parameters`.",
    "skipped_for_gradient": "Of them, for NaN or infinity in the gradient.",
    "skipped_for_moments": "The gradient was finite, the optimizer's moments would not have been.",
    "skipped_for_parameters": "Only the parameters would not have been; a critic's are called "
    "`value_skipped_for_...`.",
    "empty_updates": "Minibatches without a trained token; no optimizer step was taken.",
    "packing_fill": "Share of the places that the updates computed which held a token, not padding "
    "(packing.row_tokens).",
    "learning_rate": "Learning rate of the step.",
    "dropped_prompts": "Prompts skipped because they are over the limit, or held out.",
    "truncated_prompts": "Prompts cut to the limit, from the left.",
    "abandoned_tokens": "Tokens of responses that were stopped because the batch was full.",
    "put_back_tokens": "Tokens drawn in vain: pages ran out, and the youngest responses are drawn "
    "again later.",
    "decode_steps": "Decode steps of the rollout; every slot takes each, busy or not.",
    "decode_bursts": "Calls that made them (sampler.burst_tokens).",
    "prefills": "Prompts prefilled; one per prompt, not per response, and one per response that "
    "goes on from an earlier step.",
    "slot_occupancy": "Share of decode-slot steps that drew a token while prompts were waiting.",
    "sampled_tokens_per_second": "Finished response tokens over the rollout's seconds.",
    "trained_tokens_per_second": "Response tokens trained on over the update's seconds, "
    "hidden ones included.",
    "seconds_rollout": "Seconds of sampling, judging and filtering.",
    "seconds_decode": "Seconds of them in which the host waited for bursts of decoding.",
    "seconds_score": "Seconds of packing and the score pass.",
    "seconds_update": "Seconds of the optimizer updates, the critic's included, that nothing hid.",
    "seconds_ahead": "With a lag: seconds of making the next step's rollouts beside this update.",
    "seconds_step": "Seconds from prompts to updated policy; evaluating and saving come on top.",
    "seconds_evaluation": "Seconds of the evaluation, where there was one.",
    "heldout_accuracy": "Sampled accuracy on held-out problems (avg@k), where evaluated.",
    "heldout_accuracy_low": "Lower end of its 95 % bootstrap interval over problems.",
    "heldout_accuracy_high": "Upper end of that interval.",
    "heldout_pass_at_k": "Chance that k responses hold a right one (unbiased); k is the largest "
    "power of two up to the samples per problem.",
    "heldout_majority": "Accuracy of the most frequent answer (maj@k); of t tied, 1/t each.",
    "heldout_answer_not_found_rate": "Share of held-out responses without an answer.",
    "heldout_repetition": "`repetition` on held-out problems.",
    "heldout_reflection_fraction": "`reflection_fraction` on held-out problems.",
    "heldout_truncated_fraction": "Share of held-out responses cut off by the budget.",
    "heldout_response_tokens": "Mean response length on held-out problems.",
    "heldout_entropy": "Mean negative log-prob of the tokens sampled there: an estimate of the "
    "entropy, in nats, at temperature 1 and top_p 1.",
}
# Names that begin so differ between two runs of the same settings.
CLOCKED = ("time", "seconds_", "sampled_tokens_per_second", "trained_tokens_per_second")

VARIANCE_FLOOR = 1e-12


def mean_or_zero(values: Any) -> float:
    """The mean, and 0 of nothing."""
    values = np.asarray(values, float)
    return float(values.mean()) if values.size else 0.0


def response_metrics(groups: list[Group]) -> dict[str, float]:
    """Means and shares over the responses of those groups."""
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
    """How the verdicts on those groups came about, and how many did not."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    decided = collections.Counter(verdict.decided for verdict in verdicts)
    return {
        "verifier_failures": float(sum(v.failure is not None for v in verdicts)),
        **{f"verdicts/{how}": float(n) for how, n in decided.items() if how},
    }


def age_metrics(groups: list[Group], step: int) -> dict[str, float]:
    """How old the policies are that drew the trained tokens, where it has learned for `step`."""
    completions = [c for group in groups for c in group.completions]
    drawn = np.array([part for c in completions for part in c.drawn_by], int).reshape(-1, 2)
    lags, tokens = step - drawn[:, 0], drawn[:, 1]
    return {
        "policy_lag": float(lags @ tokens) / max(1, tokens.sum()),
        "policy_lag_max": float(lags.max(initial=0)),
        "continued_fraction": mean_or_zero([len(c.drawn_by) > 1 for c in completions]),
    }


def rollout_metrics(
    collected: Collected, counts: SamplerCounts, clock: "Clock", step: int = 0
) -> dict[str, float]:
    """Means over the groups that are no surplus; counts of cost over all that was judged now.

    Args:
        step: steps that the policy has learned.
    """
    judged, everything = max(1, len(collected.judged)), collected.judged + collected.surplus
    trained_tokens = sum(len(c) for group in collected.groups for c in group.completions)
    updating = sum(clock.seconds.get(f"seconds_{part}", 0.0) for part in ("update", "ahead"))
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
            "sampled_to_kept_tokens": counts.drawn_tokens / max(1, trained_tokens),
            "carried_groups": float(sum(one.tokens > 0 for one in collected.carried)),
            "carried_tokens": float(sum(one.tokens for one in collected.carried)),
            "expired_groups": float(collected.expired),
            "dropped_prompts": float(collected.dropped_prompts),
            "truncated_prompts": float(collected.truncated_prompts),
            "starved": float(collected.starved),
            "sampled_tokens_per_second": counts.tokens / clock.seconds["seconds_rollout"],
            "trained_tokens_per_second": trained_tokens / (updating or math.inf),
            "seconds_step": clock.total(),
        }
    )


def feedback_metrics(
    algorithm: Algorithm, feedback: Feedback, advantages: np.ndarray, returns: np.ndarray | None
) -> dict[str, float]:
    """What the advantages, and where there are any the values and the pairs, tell."""
    on = feedback.trained
    values = {"advantage_std": float(advantages[on].std()) if on.any() else 0.0}
    if returns is not None and on.any():
        assert feedback.values is not None  # returns come with a critic
        variance = float(returns[on].var())
        unexplained = float((returns[on] - feedback.values[on]).var())
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
    """The means of a step from those of its updates; why some were skipped, where some were."""
    names = updates[0] if updates else ()
    means = {
        name: sum((update[name] for update in updates[1:]), updates[0][name]).value()
        for name in names
    }
    return {name: mean for name, mean in means.items() if mean or not is_reason(name)}


class Clock:
    """Seconds spent in each named part of a step."""

    def __init__(self):
        self._start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to `seconds_<name>`."""
        now = time.perf_counter()
        name = f"seconds_{name}"
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        return time.perf_counter() - self._start
