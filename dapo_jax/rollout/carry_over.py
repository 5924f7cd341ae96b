"""Carry-over of partial groups from one step to the next, and their checkpoint format.

With `rollout.carry_over` the batch is full as soon as any groups qualify, in whatever order. Other
groups continue in the next step, and a step waits for groups that are `carry_over_max_age` old.
"""

import base64
import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.contracts import Sampler
from dapo_jax.rollout.dynamic_sampling import Collection, Judge
from dapo_jax.structs import CollectedGroups, Completion, Group, PartialGroup, Prompt, Turn, Verdict


class CarryOverCollection(Collection):
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

    def end(self, sampler: Sampler, judge: Judge, position: int) -> CollectedGroups:
        """Return the collected groups, and the groups for the next step."""
        self.read_verdicts(judge)
        unfinished = sampler.suspend()
        groups = self.first_kept()
        surplus = self._kept - {group.prompt.index for group in groups}
        started = [group.prompt.index for group in unfinished if group.tokens]
        following = max([self.start, *(i + 1 for i in (*self._scored, *started))])
        carried = list(unfinished)
        for group in (group for i, group in self._scored.items() if i in surplus):
            # A checkpoint holds no failed responses, so the next step must not see them either.
            is_kept = self._rollout.carry_over == "all"
            scored = dataclasses.replace(group, failed=()) if is_kept else None
            first_step = self._first_steps.get(group.prompt.index, self._step)
            carried.append(PartialGroup(group.prompt, first_step, judged=scored))
        following_step, expired = self._step + 1, 0
        for i, group in enumerate(carried):
            if group.tokens and following_step - group.step > self._rollout.carry_over_max_age:
                carried[i] = PartialGroup(group.prompt, following_step)
                expired += 1
        carried.sort(key=lambda group: group.prompt.index)
        estimate = self._estimate(self._scored_now())
        return dataclasses.replace(
            self._collected(groups, surplus, following, estimate),
            carried=tuple(group for group in carried if group.prompt.index < following),
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


# --- format of checkpoints and journals: JSON without prompts, arrays in base64 -------------------


def _encode(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": array.shape, "data": data}


def _decode(fields: dict[str, Any]) -> Any:
    if fields.keys() != {"dtype", "shape", "data"}:
        return fields
    data = bytearray(base64.b64decode(fields["data"]))
    return np.frombuffer(data, fields["dtype"]).reshape(fields["shape"])


def pack_partial(groups: Sequence[PartialGroup]) -> np.ndarray:
    """Return groups as [n] uint8; instead of a prompt, only its position in the data."""

    def fields_of(group: PartialGroup | Group) -> dict[str, Any]:
        return {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}

    records = []
    for group in groups:
        record = fields_of(group) | {"prompt": group.prompt.index}
        if group.judged:
            record["judged"] = fields_of(group.judged) | {"prompt": None}
        records.append(record)

    def encode(value: Any) -> Any:
        return _encode(value) if isinstance(value, np.ndarray) else fields_of(value)

    return np.frombuffer(zlib.compress(json.dumps(records, default=encode).encode()), np.uint8)


def unpack_partial(
    content: np.ndarray, read_prompt: Callable[[int], Prompt]
) -> tuple[PartialGroup, ...]:
    """Invert `pack_partial`; `read_prompt` returns the prompt at a position in the data."""
    groups = []
    for fields in json.loads(zlib.decompress(content.tobytes()), object_hook=_decode):
        prompt, judged = read_prompt(fields["prompt"]), fields["judged"]
        if judged:
            judged["completions"] = tuple(map(_completion, judged["completions"]))
            judged["verdicts"] = tuple(Verdict(**verdict) for verdict in judged["verdicts"])
            judged = Group(**judged | {"prompt": prompt, "failed": ()})
        finished, begun = (tuple(map(_completion, fields[n])) for n in ("finished", "begun"))
        groups.append(PartialGroup(prompt, fields["step"], finished, begun, judged))
    return tuple(groups)


def _completion(fields: dict[str, Any]) -> Completion:
    fields["earlier"] = tuple(map(tuple, fields["earlier"]))
    fields["turns"] = tuple(Turn(*turn) for turn in fields["turns"])
    fields["rewards"] = tuple(fields["rewards"])
    fields["failures"] = tuple(fields["failures"])
    return Completion(**fields)
