"""Leases of groups: order, expiry, second answers, and answers that can't be right."""

import dataclasses

import numpy as np
import pytest
from conftest import make_completion, make_prompt

from dapo_jax.extras.samplers.leases import Leases, Session, Task, WrongAnswer
from dapo_jax.rollout import group_format
from dapo_jax.types.structs import RolloutKey, SamplerCounts, SamplingRule

SESSION = Session(RolloutKey(0, 3, 1), SamplingRule(), "digest")
LIMITS = 20, 6  # vocabulary, tokens of a response


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tasks():
    return [Task(SESSION, make_prompt(i, [3, 4 + i]), (0, 1)) for i in range(5)]


@pytest.fixture
def leases(clock, tasks):
    made = Leases(LIMITS, seconds=10.0, clock=clock)
    made.open(SESSION)
    for task in tasks:
        made.add(task)
    return made


def respond(*tokens, sample=0, **changes):
    response = make_completion(list(tokens))
    fields = {"sample": sample, "policy_step": 1, "text": ""} | changes
    return dataclasses.replace(response, **fields)


def sent(responses):
    """What arrives of an answer."""
    return group_format.load(group_format.dump(responses))


def answer_of(task):
    return sent([respond(5, 1, sample=sample) for sample in task.samples])


def ask(leases, name, held=(), room=4):
    """A message without answers; the new leases and the ended ones."""
    ended = leases.hear(name, held, SamplerCounts())
    return leases.lease(name, room), ended


def test_groups_are_leased_in_data_order_to_one_sampler_each(leases, tasks):
    first, _ = ask(leases, "a")
    second, _ = ask(leases, "b", room=1)
    third, _ = ask(leases, "c", room=100)
    assert (first, second, third) == (tasks[:2], tasks[2:3], tasks[3:])
    assert ask(leases, "d") == ([], [])
    assert Task.from_fields(sent(tasks[0])).key == tasks[0].key


def test_a_silent_sampler_loses_its_leases_and_its_answer_still_counts_once(leases, tasks, clock):
    taken, _ = ask(leases, "slow")
    keys = [task.key for task in taken]
    clock.now = 8.0
    assert ask(leases, "slow", keys, room=0) == ([], [])  # heard in time
    clock.now = 17.0
    assert ask(leases, "other") == (tasks[2:4], [])
    clock.now = 19.0
    again, _ = ask(leases, "other", [task.key for task in tasks[2:4]])
    assert again == taken and leases.expired_leases == 2
    leases.answer("slow", keys[0], answer_of(taken[0]))  # the first answer, whoever sends it
    leases.answer("other", keys[0], answer_of(taken[0]))
    assert leases.late_answers == 1 and leases.groups == 1
    ((task, responses),) = leases.take(0.0)
    assert task == tasks[0] and [done.sample for done in responses] == [0, 1]
    assert leases.take(0.0) == []
    assert ask(leases, "slow", keys, room=0)[1] == keys  # nobody wants its work


def test_the_room_of_samplers_is_what_they_said_last_less_new_leases_and_waiting_tasks(
    leases, clock
):
    assert leases.room() == -10  # five tasks of two responses wait for a sampler
    leases.hear("a", [], SamplerCounts(), room=5)
    assert leases.room() == 5 - 10
    leases.lease("a", 5)
    leases.hear("b", [], SamplerCounts(), room=9)
    assert leases.room() == 0 + 9 - 4  # one has taken more than its room: that is no debt of others
    clock.now = 11.0
    leases.hear("b", [], SamplerCounts(), room=9)
    assert leases.room() == 9 - 4


def test_a_sampler_that_starts_again_gives_back_what_it_forgot(leases, tasks):
    ask(leases, "a")
    assert ask(leases, "a", held=[tasks[0].key], room=2)[0] == tasks[1:2]


def test_another_session_or_a_restarted_trainer_knows_groups_by_their_content(leases, tasks, clock):
    other = Leases(LIMITS, seconds=10.0, clock=clock)
    other.open(SESSION)
    other.add(tasks[1])
    assert ask(other, "a", held=[task.key for task in tasks[:2]]) == ([], [tasks[0].key])
    other.answer("a", tasks[1].key, answer_of(tasks[1]))
    assert [task for task, _ in other.take(0.0)] == [tasks[1]]
    leases.open(dataclasses.replace(SESSION, weights="other"))
    leases.answer("a", tasks[0].key, answer_of(tasks[0]))  # of weights that nobody asks for
    assert leases.late_answers == 1 and leases.take(0.0) == []


NAN = np.array([-0.1, np.nan], np.float32)
LIES = {
    "no list": 7,
    "no responses": ["x", "y"],
    "another shape": [respond(5, 1), respond(5, 1, sample=1, sampler_logprobs=np.zeros(3, "f4"))],
    "a missing sample": [respond(5, 1)],
    "other samples": [respond(5, 1), respond(5, 1, sample=2)],
    "another type": [respond(5, 1), respond(5, 1, sample=1, tokens=np.array([5.0, 1.0]))],
    "no tokens": [respond(5, 1), respond(sample=1)],
    "too many tokens": [respond(5, 1), respond(*range(7), sample=1)],
    "a token that is none": [respond(5, 1), respond(20, 1, sample=1)],
    "a negative token": [respond(5, 1), respond(-1, 1, sample=1)],
    "no number": [respond(5, 1), respond(5, 1, sample=1, sampler_logprobs=NAN)],
    "a probability of 2": [
        respond(5, 1),
        respond(5, 1, sample=1, sampler_logprobs=np.full(2, np.log(2), "f4")),
    ],
    "a support of no number": [
        respond(5, 1),
        respond(5, 1, sample=1, supports=np.full((2, 2), np.nan, "f4")),
    ],
    "a support per response": [respond(5, 1), respond(5, 1, sample=1, supports=np.zeros(2, "f4"))],
    "another policy": [respond(5, 1), respond(5, 1, sample=1, policy_step=2)],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_answer_is_refused_and_another_sampler_gets_the_group(lie, leases, tasks):
    (taken, *_), _ = ask(leases, "liar")
    with pytest.raises(WrongAnswer):
        leases.answer("liar", taken.key, sent(LIES[lie]))
    assert leases.refused_answers == 1 and leases.take(0.0) == []
    assert ask(leases, "honest", room=2)[0] == [taken]
