"""Carry-over of partial groups from one step to the next, and their checkpoint format.

With `rollout.carry_over` the batch is full as soon as any groups qualify, in whatever order. Other
groups continue in the next step, and a step waits for groups that are `carry_over_max_age` old.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from dapo_jax.config.experiment import Config, Rollout
from dapo_jax.contracts import Sampler
from dapo_jax.rollout.dynamic_sampling import Collection, Judge, Pending
from dapo_jax.structs import CollectedGroups, Completion, Group, PartialGroup, Prompt, Turn, Verdict


class CarryOverCollection(Collection[Pending]):
    """Collection that starts with partial groups and leaves some to the next step."""

    def __init__(
        self,
        config: Config,
        kept_fraction: float,
        step: int,  # the current step, from which ages are counted
        partial: Sequence[PartialGroup],
        position: int,
    ):
        super().__init__(config, kept_fraction, position)
        self._rollout = config.rollout
        self._step = step
        self._partial = partial
        self._first_steps = {group.prompt.index: group.step for group in partial if group.tokens}
        self._requested = [group.prompt for group in partial]
        for group in partial:
            if group.judged:
                self._add(group.judged)
        self._reused = frozenset(self._scored)

    def resume(self, sampler: Sampler) -> None:
        for group in self._partial:
            if group.judged is None:
                sampler.submit(group.prompt, self._rollout.samples_per_prompt, group)

    def _target(self, sampler: Sampler, in_flight: int) -> int:
        """Return also a target that keeps every slot busy, up to a batch ahead."""
        kept, fraction = len(self._kept), self._estimate(self._scored_now())
        continues = kept < self._wanted or self._rollout.carry_over == "all"
        if continues and sampler.room > 0 and kept + in_flight * fraction < 2 * self._wanted:
            return in_flight + 1
        return super()._target(sampler, in_flight)

    def _scored_now(self) -> Set[int]:
        return self._scored.keys() - self._reused

    def first_kept(self) -> list[Group]:
        """Return the first kept groups in data order among those scored so far."""
        kept = [prompt.index for prompt in self._requested if prompt.index in self._kept]
        return [self._scored[index] for index in kept[: self._wanted]]

    def full(self) -> bool:
        """Return True if the step has its groups and needs to wait for no old group."""
        oldest = self._step - self._rollout.carry_over_max_age
        late = any(
            step <= oldest and index not in self._scored
            for index, step in self._first_steps.items()
        )
        return super().full() and not late

    def end(self, sampler: Sampler, judge: Judge[Pending], position: int) -> CollectedGroups:
        """Return the collected groups, and the groups for the next step."""
        self.read_verdicts(judge)
        unfinished = sampler.suspend()
        groups = self.first_kept()
        surplus = self._kept - {group.prompt.index for group in groups}
        started = [group.prompt.index for group in unfinished if group.tokens]
        following = max([self.start, *(i + 1 for i in (*self._scored, *started))])
        left = [group for i, group in self._scored.items() if i in surplus]
        partial, expired = carry(self._rollout, self._step, left, unfinished, self._first_steps)
        estimate = self._estimate(self._scored_now())
        return dataclasses.replace(
            self._collected(groups, surplus, following, estimate),
            carried=tuple(group for group in partial if group.prompt.index < following),
            expired=expired,
            reused=self._reused,
        )


def open_collection(
    config: Config, kept_fraction: float, step: int, partial: Sequence[PartialGroup], position: int
) -> Collection:
    """Return the collection for `config.rollout.carry_over`."""
    if config.rollout.carry_over == "none":
        return Collection(config, kept_fraction, position)
    return CarryOverCollection(config, kept_fraction, step, partial, position)


def carry(
    rollout: Rollout,
    step: int,
    surplus: Sequence[Group],
    unfinished: Sequence[PartialGroup],
    first_steps: Mapping[int, int],
) -> tuple[list[PartialGroup], int]:
    """Return the partial groups for step + 1 in data order, and how many were too old."""
    carried = list(unfinished)
    for group in surplus:
        # A checkpoint holds no failed responses, so the next step must not see them either.
        scored = dataclasses.replace(group, failed=()) if rollout.carry_over == "all" else None
        first_step = first_steps.get(group.prompt.index, step)
        carried.append(PartialGroup(group.prompt, first_step, judged=scored))
    expired = 0
    for i, group in enumerate(carried):
        if group.tokens and step + 1 - group.step > rollout.carry_over_max_age:
            carried[i] = PartialGroup(group.prompt, step + 1)
            expired += 1
    return sorted(carried, key=lambda group: group.prompt.index), expired


# --- checkpoint format: tokens and log-probs as arrays, the rest as JSON --------------------------

IN_ARRAYS = {"tokens": np.int32, "sampler_logprobs": np.float32}
GROUP_ARRAYS = {"rewards": np.float64, "raw_rewards": np.float64, "correct": bool}
ROUTES = "routes"  # of all responses that have routes, flat
NOT_IN_RECORD = (*IN_ARRAYS, ROUTES, "text")  # the text is decoded from the tokens


def _responses(group: PartialGroup) -> tuple[Completion, ...]:
    return group.judged.completions if group.judged else (*group.finished, *group.begun)


def pack_partial(
    groups: Sequence[PartialGroup],
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Return arrays of all tokens and log-probs, concatenated, and a record of everything else.

    Without any token there are no arrays.
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
    return {
        "index": partial.prompt.index,
        "step": partial.step,
        "finished": len(partial.finished),
        "responses": [_response_record(response) for response in _responses(partial)],
        "judged": _scored_record(partial.judged) if partial.judged else None,
    }


def _scored_record(group: Group) -> dict[str, Any]:
    return {
        "verdicts": [dataclasses.asdict(verdict) for verdict in group.verdicts],
        "reward_parts": {name: part.tolist() for name, part in group.reward_parts.items()},
    } | {name: getattr(group, name).tolist() for name in GROUP_ARRAYS}


def _response_record(response: Completion) -> dict[str, Any]:
    names = [
        field.name for field in dataclasses.fields(Completion) if field.name not in NOT_IN_RECORD
    ]
    record = {name: getattr(response, name) for name in names} | {"length": len(response.tokens)}
    if (routes := response.routes) is not None:
        record[ROUTES] = [routes.dtype.name, *routes.shape]
    return record


def empty_arrays(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return zeros with the shapes of the arrays that belong to a record."""
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
    read_prompt: Callable[[int], Prompt],  # returns the prompt at a position in the data
    decode: Callable[[list[int]], str],  # returns the text of a response's tokens
) -> tuple[PartialGroup, ...]:
    """Return partial groups from their arrays and record: the inverse of `pack_partial`."""
    saved = [response for group in records for response in group["responses"]]
    responses = _unpack_responses(arrays, saved, decode)
    groups = []
    for record in records:
        prompt, step, ended = read_prompt(record["index"]), record["step"], record["finished"]
        own = tuple(itertools.islice(responses, len(record["responses"])))
        if record["judged"]:
            group = _scored_group(prompt, own, record["judged"])
            groups.append(PartialGroup(prompt, step, judged=group))
        else:
            groups.append(PartialGroup(prompt, step, own[:ended], own[ended:]))
    return tuple(groups)


def _unpack_responses(
    arrays: dict[str, np.ndarray], records: list[dict[str, Any]], decode: Callable[[list[int]], str]
) -> Iterator[Completion]:
    start = first_route = 0
    for record in records:
        fields = dict(record)
        end = start + fields.pop("length")
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
        yield dataclasses.replace(response, text=decode(response.last_turn.tolist()))
        start = end


def _scored_group(
    prompt: Prompt, completions: tuple[Completion, ...], record: dict[str, Any]
) -> Group:
    dropped = {"failure", "broken"}  # no failure is stored; older versions had the second field
    fields = [{k: v for k, v in own.items() if k not in dropped} for own in record["verdicts"]]
    verdicts = tuple(Verdict(**own) for own in fields)
    parts = {name: np.array(part, np.float64) for name, part in record["reward_parts"].items()}
    arrays: dict[str, Any] = {
        name: np.array(record[name], dtype) for name, dtype in GROUP_ARRAYS.items()
    }
    return Group(prompt, completions, verdicts, parts, **arrays)
