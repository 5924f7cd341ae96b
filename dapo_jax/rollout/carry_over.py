"""What a step leaves to the next one: which groups, and how a checkpoint holds them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.config.experiment import Rollout
from dapo_jax.structs import Carried, Completion, Group, Prompt, Verdict


def carry_on(
    rollout: Rollout,
    step: int,
    surplus: Sequence[Group],
    unfinished: Sequence[Carried],
    steps: Mapping[int, int],
) -> tuple[list[Carried], int]:
    """What the step after `step` begins with, in data order, and how many groups were too old.

    Args:
        steps: which step began a group, by its place in the data, where that was an earlier one.
    """
    carried, expired = list(unfinished), 0
    for group in surplus:
        judged = group if rollout.carry_over == "all" else None
        born = steps.get(group.prompt.index, step)
        carried.append(Carried(group.prompt, born, judged=judged))
    for i, one in enumerate(carried):
        if one.tokens and step + 1 - one.step > rollout.carry_over_max_age:
            carried[i], expired = Carried(one.prompt, step + 1), expired + 1
    return sorted(carried, key=lambda one: one.prompt.index), expired


# --- in a checkpoint: tokens and log-probs as arrays, the rest as JSON ----------------------------

OF_ARRAYS = ("tokens", "sampler_logprobs")
NOT_KEPT = (*OF_ARRAYS, "text")  # which its tokens say again


def _responses(one: Carried) -> tuple[Completion, ...]:
    return one.judged.completions if one.judged else (*one.finished, *one.begun)


def pack_carried(carried: Sequence[Carried]) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """All tokens and log-probs one after the other (empty where there are none), and a record."""
    responses = [done for one in carried for done in _responses(one)]
    arrays = {}
    if any(map(len, responses)):
        arrays = {name: np.concatenate([getattr(r, name) for r in responses]) for name in OF_ARRAYS}
    return arrays, [_record(one) for one in carried]


def _record(one: Carried) -> dict[str, Any]:
    def told(done: Completion) -> dict[str, Any]:
        fields = dataclasses.fields(Completion)
        kept = {f.name: getattr(done, f.name) for f in fields if f.name not in NOT_KEPT}
        return kept | {"length": len(done)}

    judged, group = None, one.judged
    if group is not None:
        judged = {
            "verdicts": [dataclasses.asdict(verdict) for verdict in group.verdicts],
            "reward_parts": {name: part.tolist() for name, part in group.reward_parts.items()},
            "rewards": group.rewards.tolist(),
            "raw_rewards": group.raw_rewards.tolist(),
            "correct": group.correct.tolist(),
        }
    return {
        "index": one.prompt.index,
        "step": one.step,
        "finished": len(one.finished),
        "responses": [told(done) for done in _responses(one)],
        "judged": judged,
    }


def packed_tokens(record: list[dict[str, Any]]) -> int:
    """The length of the arrays that go with a record."""
    return sum(told["length"] for one in record for told in one["responses"])


def unpack_carried(
    arrays: dict[str, np.ndarray],
    record: list[dict[str, Any]],
    read_prompt: Callable[[int], Prompt],
    decode: Callable[[list[int]], str],
) -> tuple[Carried, ...]:
    """What was packed.

    Args:
        read_prompt: the prompt at a place in the data.
        decode: a response's tokens to text.
    """
    start, found = 0, []
    for one in record:
        responses = []
        for told in one["responses"]:
            fields, end = dict(told), start + told["length"]
            del fields["length"]
            fields["earlier"] = tuple(map(tuple, fields["earlier"]))
            fields |= {name: arrays[name][start:end] for name in OF_ARRAYS}
            done = len(responses) < one["finished"] or one["judged"]
            fields["text"] = decode(fields["tokens"].tolist()) if done else ""
            responses.append(Completion(**fields))
            start = end
        prompt = read_prompt(one["index"])
        group = _group(prompt, tuple(responses), one["judged"]) if one["judged"] else None
        parts = [] if group else responses
        finished, begun = tuple(parts[: one["finished"]]), tuple(parts[one["finished"] :])
        found.append(Carried(prompt, one["step"], finished, begun, group))
    return tuple(found)


def _group(prompt: Prompt, completions: tuple[Completion, ...], told: dict[str, Any]) -> Group:
    numbers = {name: np.array(told[name], np.float64) for name in ("rewards", "raw_rewards")}
    return Group(
        prompt,
        completions,
        verdicts=tuple(Verdict(**fields) for fields in told["verdicts"]),
        reward_parts={k: np.array(v, np.float64) for k, v in told["reward_parts"].items()},
        correct=np.array(told["correct"], bool),
        **numbers,
    )
