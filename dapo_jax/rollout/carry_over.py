"""Carry-over of partial groups from one step to the next.

With `rollout.carry_over` the batch is full as soon as any groups qualify, in whatever order. Other
groups continue in the next step, and a step waits for groups that are `carry_over_max_age` old.
"""

import dataclasses

from dapo_jax.rollout.dynamic_sampling import Collection, Judge
from dapo_jax.types.contracts import Sampler
from dapo_jax.types.structs import CollectedGroups, Group, PartialGroup


class CarryOverCollection(Collection):
    """Collection that starts with partial groups and leaves some to the next step."""

    def _target(self, sampler: Sampler, in_flight: int) -> int:
        """Return also a target that keeps every slot busy, up to a batch ahead."""
        kept, fraction = len(self._kept), self._estimate(self._scored_now())
        continues = kept < self._wanted or self.config.rollout.carry_over == "all"
        if continues and sampler.room > 0 and kept + in_flight * fraction < 2 * self._wanted:
            return in_flight + 1
        return super()._target(sampler, in_flight)

    def first_kept(self) -> list[Group]:
        """Return the first kept groups in data order among those scored so far."""
        kept = [prompt.index for prompt in self._requested if prompt.index in self._kept]
        return [self._scored[index] for index in kept[: self._wanted]]

    def _head(self) -> list[Group]:
        return list(self._scored.values())

    def full(self) -> bool:
        """Return True if the step has its groups and needs to wait for no old group."""
        oldest = self._step - self.config.rollout.carry_over_max_age
        return super().full() and not any(
            group.tokens and group.step <= oldest and group.prompt.index not in self._scored
            for group in self._partial
        )

    def end(self, sampler: Sampler, judge: Judge) -> CollectedGroups:
        """Return the collected groups, and the groups for the next step."""
        self.submit_ended(judge)
        self._read(judge, self._burst)
        unfinished = [  # a group that is sampled again is left to the next step, which starts it
            PartialGroup(part.prompt, self._step + 1) if part.prompt.index in self._parts else part
            for part in sampler.stop(keep=True)
        ]
        first_steps = {group.prompt.index: group.step for group in self._partial if group.tokens}
        groups, settings = self.first_kept(), self.config.rollout
        surplus = self._kept - {group.prompt.index for group in groups}
        started = [group.prompt.index for group in unfinished if group.tokens]
        following = max([self.start, *(i + 1 for i in (*self._scored, *started))])
        carried = list(unfinished)
        for group in (group for i, group in self._scored.items() if i in surplus):
            # A checkpoint holds no failed responses, so the next step must not see them either.
            is_kept = settings.carry_over == "all"
            scored = dataclasses.replace(group, failed=()) if is_kept else None
            first_step = first_steps.get(group.prompt.index, self._step)
            carried.append(PartialGroup(group.prompt, first_step, judged=scored))
        following_step, expired = self._step + 1, 0
        for i, group in enumerate(carried):
            if group.tokens and following_step - group.step > settings.carry_over_max_age:
                carried[i] = PartialGroup(group.prompt, following_step)
                expired += 1
        carried.sort(key=lambda group: group.prompt.index)
        estimate = self._estimate(self._scored_now())
        return dataclasses.replace(
            self._collected(groups, surplus, following, estimate),
            carried=tuple(group for group in carried if group.prompt.index < following),
            expired=expired,
        )
