"""Rewards of tokens: from what a function returns to advantages at the tokens that were drawn."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from conftest import make_completion, make_prompt
from row_files import read_table
from scored import judge_groups
from served import TOKENIZER

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Reward, Rollout
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.minibatches import Minibatches
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.score_pass import make_feedback
from dapo_jax.rewards.functions import place_rewards
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.runtime.workers.pickled_functions import register_function
from dapo_jax.types.structs import Failure, Group, Outcome, Verdict

OWN = """
import json
import numpy as np

def steps(prompt, response, answer):
    "Half a point for each sentence that has the answer, minus one for any other."
    found, start = [], 0
    for sentence in response.split(". "):
        end = start + len(sentence)
        if sentence:
            found.append((start, end, 0.5 if answer in sentence else -1))
        start = end + 2
    return found

def digits(prompt, response, answer, tokens):
    assert "".join(tokens) == response
    return np.array([float(token.isdigit()) for token in tokens])

async def later(prompt, response, answer, tokens):
    return [1] * len(tokens)

def total(prompt, response, answer):
    return np.array([len(response)])

def odd(prompt, response, answer):
    return json.loads(response)
"""


def say(text: str):
    ids = [*TOKENIZER.encode(text), *TOKENIZER.end_ids]
    return dataclasses.replace(make_completion(ids), text=TOKENIZER.decode(ids))


def judge_group(parts: str, *texts: str, **reward) -> Group:
    config = Config(algorithm=algorithms.grpo(), reward=Reward(parts=parts, **reward))
    return judge_groups(config, map(say, texts), split=TOKENIZER.split)[0][0]


# --- what a function may return ---------------------------------------------------------------


def test_numbers_per_token_and_spans_are_weighed_and_summed(write_module):
    """A token is a byte here: é has two, and the end token none."""
    write_module("own", OWN)
    parts = "rule=1,own:steps=2,own:digits=0.5,own:later=-0.1,own:total=1"
    texts = ["né 7. no", "7", ""]
    group = judge_group(parts, *texts)
    np.testing.assert_allclose(group.reward_parts["own:steps"], [2 * (0.5 - 1), 1, 0])
    np.testing.assert_allclose(group.reward_parts["own:digits"], [0.5, 0.5, 0])
    np.testing.assert_allclose(group.reward_parts["own:later"], [-1.0, -0.2, -0.1])
    np.testing.assert_allclose(group.reward_parts["own:total"], [8, 1, 0])
    np.testing.assert_allclose(group.rewards, sum(group.reward_parts.values()))
    # n, the bytes of é, blank, 7, full stop, blank, n, o, end
    expected = [0, 0, 0, 0, 1 + 0.5, 0, 0, 0, -2, 0], [1 + 0.5, 0], [0]
    assert group.token_rewards is not None and not group.failed
    for found, values in zip(group.token_rewards, expected, strict=True):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, np.array(values) - 0.1)


def test_a_span_counts_on_the_last_token_that_has_a_character_of_it():
    pieces = ["ab", "", "cde", "", "", "é", "f", ""]  # the token before é begins its bytes
    text = "".join(pieces)
    done = dataclasses.replace(make_completion([5] * len(pieces)), text=text)
    owner = [place for place, piece in enumerate(pieces) for _ in piece]
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            expected = np.zeros(len(pieces))
            expected[max(owner[start:end])] = 3.0
            found = place_rewards([[start, end, 3.0]], done, lambda _: pieces)
            np.testing.assert_array_equal(found, expected)
    both = place_rewards([[0, 3, 1.0], [4, 5, 2.0], [0, 7, 4.0]], done, lambda _: pieces)
    np.testing.assert_array_equal(both, [0, 0, 3, 0, 0, 0, 4, 0])
    np.testing.assert_array_equal(place_rewards([], done, lambda _: pieces), np.zeros(8))
    with pytest.raises(ValueError, match="tokens that decode to 7 characters, not 0"):
        place_rewards([[0, 1, 1.0]], done, lambda _: ())


ODD = read_table(__file__, "odd")


def test_what_is_no_reward_is_left_out_and_says_what_is_allowed(write_module):
    write_module("own", OWN)
    group = judge_group("rule=1,own:odd=1", "3", *(text for text, _ in ODD))
    assert len(group.completions) == 1 and np.isfinite(group.rewards).all()
    for (completion, failure), (text, words) in zip(group.failed, ODD, strict=True):
        assert completion.text == text and failure.outcome == Outcome.USER_ERROR
        assert re.search(words, failure.text), failure.text


def test_a_function_in_this_process_may_reward_tokens():
    name = register_function(lambda prompt, response, answer: [(0, 1, 1.0)], True)
    group = judge_group(f"{name}=3", "ab")
    np.testing.assert_array_equal(group.token_rewards, [[3, 0, 0]])


def test_a_verdict_goes_through_json_to_the_last_bit():
    """As the journal of kept groups and other processes get it."""
    verdict = Verdict(True, "7", parts={"own:f": 0.3}, token_rewards=[0.1, 1 / 3, -1e-300])
    for failure in None, Failure(Outcome.MEMORY, "too large"):
        verdict = dataclasses.replace(verdict, failure=failure)
        read = Verdict.from_json(json.loads(json.dumps(dataclasses.asdict(verdict))))
        assert read == verdict and repr(read) == repr(verdict)


# --- placed on packed rows ----------------------------------------------------------------------


@pytest.mark.parametrize("kl", [False, True], ids=["bare", "with KL in the reward"])
def test_each_token_has_its_own_reward_and_the_last_one_the_rest(kl):
    """Of two groups of three ragged responses, one of them without rewards of tokens."""
    rng, lengths = np.random.default_rng(0), [3, 1, 0, 5, 2, 4]
    of_tokens, penalties = ([rng.normal(size=n) for n in lengths] for _ in range(2))
    of_tokens[4] *= 0
    of_responses = rng.normal(size=6)
    algorithm = dataclasses.replace(
        algorithms.grpo(), advantage="reward_to_go", kl="reward" if kl else "none"
    )
    algorithm = dataclasses.replace(algorithm, kl_estimator="k1", kl_coefficient=0.5)
    reward = Reward(parts="own:tokens=2,own:whole=1")
    config = Config(algorithm=algorithm, rollout=Rollout(2, 3), reward=reward)
    parts = [{"own:tokens": of_tokens[i].sum(), "own:whole": of_responses[i]} for i in range(6)]
    own = [None if i == 4 else (2 * values).tolist() for i, values in enumerate(of_tokens)]
    verdicts = [Verdict(True, "1", parts=parts[i], token_rewards=own[i]) for i in range(6)]
    done = [make_completion([5] * n) for n in lengths]
    pairs = [(tuple(done[i : i + 3]), tuple(verdicts[i : i + 3])) for i in (0, 3)]
    groups = [reward_group(config, make_prompt(g, [2] * (2 + g)), *pairs[g]) for g in range(2)]
    segments = [Segment(groups[i // 3].prompt, done[i], i) for i in range(6)]
    rollouts, used = pack(segments, 12, 2, 2)
    rollouts = jax.tree.map(lambda x: x[None], rollouts)

    def place(lists, fill):
        array = np.full(rollouts.response_index.shape, fill)
        for i, values in enumerate(lists):
            array[rollouts.response_index == i] = values
        return array

    old = place([2 * values for values in penalties], 99.0)
    others = {"critic": 0 * old} | ({"reference": 0 * old} if kl else {})
    scored = ScoredBatch(rollouts, old, others)
    feedback = make_feedback(config, Minibatches([segments], rollouts, [used]), scored, groups)
    expected = [2 * of_tokens[i] - kl * penalties[i] for i in range(6)]
    for i, values in enumerate(expected):
        values[-1:] += of_responses[i]
    exact = {"rtol": 1e-6, "atol": 1e-12}
    np.testing.assert_allclose(feedback.token_rewards, place(expected, 0.0), **exact)
    sums = [values.sum() if len(values) else of_responses[i] for i, values in enumerate(expected)]
    np.testing.assert_allclose(feedback.rewards, sums, **exact)
