"""Carry-over of partial groups from one step to the next, and their checkpoint format.

With `rollout.carry_over` the batch is full as soon as enough groups qualify, whichever they are;
others go on in the next step, and a step waits for those that are `carry_over_max_age` steps old.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from dapo_jax.config.experiment import Config, Rollout
from dapo_jax.rollout.dynamic_sampling import Collection, Judge, Pending, Sampler
from dapo_jax.structs import CollectedGroups, Completion, Group, PartialGroup, Prompt, Turn, Verdict


class CarryOverCollection(Collection[Pending]):
    """Collection of a step that begins with partial groups and leaves some to the next step.

    Args:
        step: that collects; ages are counted from it.
        partial: groups that the step before left, asked first.
    """

    def __init__(
        self,
        config: Config,
        kept_fraction: float,
        step: int,
        partial: Sequence[PartialGroup],
        position: int,
    ):
        super().__init__(config, kept_fraction, position)
        self._rollout, self._step, self._partial = config.rollout, step, partial
        self._steps = {group.prompt.index: group.step for group in partial if group.tokens}
        self._asked = [group.prompt for group in partial]
        for group in partial:
            if group.judged:
                self._note(group.judged)
        self._reused = frozenset(self._judged)

    def resume(self, sampler: Sampler) -> None:
        for group in self._partial:
            if group.judged is None:
                sampler.submit(group.prompt, self._rollout.samples_per_prompt, group)

    def _target(self, sampler: Sampler, in_flight: int) -> int:
        """Also as many as keep every slot busy, up to a batch ahead."""
        kept, share = len(self._kept), self._estimate(self._fresh())
        goes_on = kept < self._wanted or self._rollout.carry_over == "all"
        if goes_on and sampler.room > 0 and kept + in_flight * share < 2 * self._wanted:
            return in_flight + 1
        return super()._target(sampler, in_flight)

    def _fresh(self) -> Set[int]:
        return self._judged.keys() - self._reused

    def first_kept(self) -> list[Group]:
        """The first kept groups in data order among those judged so far."""
        kept = [prompt.index for prompt in self._asked if prompt.index in self._kept]
        return [self._judged[index] for index in kept[: self._wanted]]

    def full(self) -> bool:
        """True if the step has its groups, and none is left that must end in it."""
        oldest = self._step - self._rollout.carry_over_max_age
        late = (i for i, step in self._steps.items() if step <= oldest and i not in self._judged)
        return super().full() and next(late, None) is None

    def end(self, sampler: Sampler, judge: Judge[Pending], position: int) -> CollectedGroups:
        """The rollout batch with the groups for the next step."""
        self.read_verdicts(judge)
        unfinished, groups = sampler.suspend(), self.first_kept()
        surplus = self._kept - {group.prompt.index for group in groups}
        drawn = [group.prompt.index for group in unfinished if group.tokens]
        following = max([self._start, *(i + 1 for i in (*self._judged, *drawn))])
        left = [group for i, group in self._judged.items() if i in surplus]
        partial, expired = carry_on(self._rollout, self._step, left, unfinished, self._steps)
        return dataclasses.replace(
            self._batch(groups, surplus, following, self._estimate(self._fresh())),
            carried=tuple(group for group in partial if group.prompt.index < following),
            expired=expired,
            reused=self._reused,
        )


def open_collection(
    config: Config, kept_fraction: float, step: int, partial: Sequence[PartialGroup], position: int
) -> Collection:
    """The collection that `config.rollout.carry_over` asks for."""
    if config.rollout.carry_over == "none":
        return Collection(config, kept_fraction, position)
    return CarryOverCollection(config, kept_fraction, step, partial, position)


def carry_on(
    rollout: Rollout,
    step: int,
    surplus: Sequence[Group],
    unfinished: Sequence[PartialGroup],
    steps: Mapping[int, int],
) -> tuple[list[PartialGroup], int]:
    """Partial groups for the step after `step`, in data order, and how many were too old.

    Args:
        steps: the step that began a group, by place in the data, where that was an earlier one.
    """
    carried, expired = list(unfinished), 0
    for group in surplus:
        judged = group if rollout.carry_over == "all" else None
        born = steps.get(group.prompt.index, step)
        carried.append(PartialGroup(group.prompt, born, judged=judged))
    for i, one in enumerate(carried):
        if one.tokens and step + 1 - one.step > rollout.carry_over_max_age:
            carried[i], expired = PartialGroup(one.prompt, step + 1), expired + 1
    return sorted(carried, key=lambda one: one.prompt.index), expired


# --- checkpoint format: tokens and log-probs as arrays, the rest as JSON --------------------------

IN_ARRAYS = {"tokens": np.int32, "sampler_logprobs": np.float32}
ROUTES = "routes"  # of all responses that have some, flat
NOT_SAVED = (*IN_ARRAYS, ROUTES, "text")  # which the tokens say again


def _responses(group: PartialGroup) -> tuple[Completion, ...]:
    return group.judged.completions if group.judged else (*group.finished, *group.begun)


def pack_partial(
    groups: Sequence[PartialGroup],
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Arrays of all tokens and log-probs, one response after the other, and a record of the rest.

    Without a token there are no arrays.
    """
    responses = [response for group in groups for response in _responses(group)]
    arrays = {}
    if any(map(len, responses)):
        arrays = {name: np.concatenate([getattr(r, name) for r in responses]) for name in IN_ARRAYS}
    routes = [response.routes.ravel() for response in responses if response.routes is not None]
    if routes:
        arrays[ROUTES] = np.concatenate(routes)
    return arrays, [_record(group) for group in groups]


def _record(partial: PartialGroup) -> dict[str, Any]:
    judged, group = None, partial.judged
    if group is not None:
        judged = {
            "verdicts": [dataclasses.asdict(verdict) for verdict in group.verdicts],
            "reward_parts": {name: part.tolist() for name, part in group.reward_parts.items()},
            "rewards": group.rewards.tolist(),
            "raw_rewards": group.raw_rewards.tolist(),
            "correct": group.correct.tolist(),
        }
    return {
        "index": partial.prompt.index,
        "step": partial.step,
        "finished": len(partial.finished),
        "responses": [_response_record(response) for response in _responses(partial)],
        "judged": judged,
    }


def _response_record(response: Completion) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(Completion) if field.name not in NOT_SAVED]
    record = {name: getattr(response, name) for name in names} | {"length": len(response.tokens)}
    if (routes := response.routes) is not None:
        record[ROUTES] = [routes.dtype.name, *routes.shape]
    return record


def empty_arrays(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Zeros of the shapes of the arrays that belong to a record."""
    responses = [response for group in records for response in group["responses"]]
    tokens = sum(response["length"] for response in responses)
    arrays = {name: np.zeros(tokens, dtype) for name, dtype in IN_ARRAYS.items()}
    routes = [response[ROUTES] for response in responses if ROUTES in response]
    if routes:
        size = sum(math.prod(shape) for _, *shape in routes)
        arrays[ROUTES] = np.zeros(size, routes[0][0])
    return arrays


def unpack_partial(
    arrays: dict[str, np.ndarray],
    records: list[dict[str, Any]],
    read_prompt: Callable[[int], Prompt],
    decode: Callable[[list[int]], str],
) -> tuple[PartialGroup, ...]:
    """Partial groups from their arrays and record: the inverse of `pack_partial`.

    Args:
        read_prompt: the prompt at a place in the data.
        decode: text of a response's tokens.
    """
    start, first_route, groups = 0, 0, []
    for record in records:
        responses, judged, ended = [], record["judged"], record["finished"]
        for saved in record["responses"]:
            fields, end = dict(saved), start + saved["length"]
            del fields["length"]
            fields["earlier"] = tuple(map(tuple, fields["earlier"]))
            fields["turns"] = tuple(Turn(*turn) for turn in fields["turns"])
            fields |= {name: tuple(fields[name]) for name in ("rewards", "failures")}
            fields |= {name: arrays[name][start:end] for name in IN_ARRAYS}
            if ROUTES in fields:
                shape = fields[ROUTES][1:]
                last_route = first_route + math.prod(shape)
                fields[ROUTES] = arrays[ROUTES][first_route:last_route].reshape(shape)
                first_route = last_route
            response = Completion(**fields, text="")
            text = decode(response.last_turn.tolist())
            responses.append(dataclasses.replace(response, text=text))
            start = end
        prompt = read_prompt(record["index"])
        if judged:
            group = _judged_group(prompt, tuple(responses), judged)
            groups.append(PartialGroup(prompt, record["step"], judged=group))
        else:
            parts = tuple(responses[:ended]), tuple(responses[ended:])
            groups.append(PartialGroup(prompt, record["step"], *parts))
    return tuple(groups)


def _judged_group(
    prompt: Prompt, completions: tuple[Completion, ...], record: dict[str, Any]
) -> Group:
    numbers = {name: np.array(record[name], np.float64) for name in ("rewards", "raw_rewards")}
    return Group(
        prompt,
        completions,
        verdicts=tuple(Verdict(**fields) for fields in record["verdicts"]),
        reward_parts={k: np.array(v, np.float64) for k, v in record["reward_parts"].items()},
        correct=np.array(record["correct"], bool),
        **numbers,
    )
