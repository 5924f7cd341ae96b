"""Failures injected at rates of 1 to 50 %: each is typed, and the others learn as if alone.

python tests/rewards/test_injected_failures.py   # prints a table of all kinds and rates
"""

import collections
import dataclasses
import itertools
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # to run it as a program

from conftest import make_completion, make_prompt

from dapo_jax.algorithms import grpo
from dapo_jax.config.experiment import Config, Environment, Packing, Reward, Rollout, Sampler
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.environments.sessions import Environments
from dapo_jax.extras.math import algebra_process
from dapo_jax.learner.advantages import estimate
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.losses import policy_loss
from dapo_jax.learner.minibatches import Minibatches, make_train_batches, split_groups
from dapo_jax.learner.packing import pack_updates, take_tokens
from dapo_jax.learner.score_pass import make_feedback
from dapo_jax.rewards import scorers
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rewards.judge import Judge
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.workers import parent as process_module
from dapo_jax.types.structs import FAILURES, SLOW, Completion, Group, Outcome

FRAGILE = """
import os, signal, time, urllib.request

def fragile(prompt, response, answer):
    word = response.split()[0]
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if word == "hang":
        time.sleep(3600)
    if word == "memory":
        bytearray(1 << 60)
    if word == "disk":
        with open("/dev/full", "w") as file:
            file.write("no space is left there")
    if word == "judge":
        urllib.request.urlopen("http://127.0.0.1:1/")
    if word == "raise":
        raise KeyError(word)
    return len(response) / 10

class Fragile:
    def step(self, text):
        word = text.split()[0]
        if word == "environment":
            raise RuntimeError("the game is broken")
        if word == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
"""
OUTCOMES = {
    "kill": Outcome.CRASH,
    "stop": Outcome.TIMEOUT,
    "hang": Outcome.TIMEOUT,
    "memory": Outcome.MEMORY,
    "disk": Outcome.USER_ERROR,
    "judge": Outcome.JUDGE_UNAVAILABLE,
    "raise": Outcome.USER_ERROR,
    "environment": Outcome.ENVIRONMENT_ERROR,
    "dies": Outcome.ENVIRONMENT_ERROR,
    "verifier_kill": Outcome.CRASH,
    "verifier_stop": Outcome.TIMEOUT,
}
RESPONSES = {0.01: 100, 0.1: 40, 0.5: 24}  # by rate of failures
SAMPLES = 4
PACKING = Packing(row_tokens=64, rows_per_microbatch=4)


def make_config(responses: int) -> Config:
    prompts = responses // SAMPLES
    return Config(
        algorithm=grpo(),
        sampler=Sampler(max_response_tokens=40),
        rollout=Rollout(prompts, SAMPLES, updates_per_rollout=1),
        reward=Reward(parts="rule=1,fragile_parts:fragile=0.5", workers=4, timeout_seconds=1.0),
    )


def make_texts(kinds: Sequence[str], rate: float) -> list[list[str]]:
    """Texts of groups, right and wrong in turn; the first word of some breaks their reward."""
    responses = RESPONSES[rate]
    order = np.random.default_rng(0).permutation(responses)
    bad = order[: max(1, round(rate * responses))].tolist()
    words = dict(zip(bad, itertools.cycle(kinds), strict=False))
    texts = [f"{words.get(i, 'sound')} {'s' * (i % 7)} #### {7 + i % 2}" for i in range(responses)]
    return [texts[i : i + SAMPLES] for i in range(0, responses, SAMPLES)]


def break_verifiers(patch) -> None:
    """Kill or stop the verifier's process as soon as it gets such a response."""
    ask = process_module.WorkerProcess.ask

    def break_and_ask(self, job, deadline, computing=0.0):
        words = {question[0].split()[0] for question in job.get("questions", ())}
        if "verifier_kill" in words:
            os.kill(self.pid, signal.SIGKILL)
        if "verifier_stop" in words:
            os.kill(self.pid, signal.SIGSTOP)
        return ask(self, job, deadline, computing)

    patch.setattr(process_module.WorkerProcess, "ask", break_and_ask)


def play(groups: list[list[str]]) -> list[tuple[Completion, ...]]:
    """The responses as trajectories, after the reply of an environment to their first turn."""
    settings = Environment(name="fragile_parts:Fragile", workers=2, step_seconds=5.0)
    environments = Environments(settings, arithmetic_tokenizer(), chat=False)
    prompts = [make_prompt(i, [2, 3], "7") for i in range(len(groups))]
    pending = [
        environments.submit(prompt, sample, [text], [])
        for prompt, texts in zip(prompts, groups, strict=True)
        for sample, text in enumerate(texts)
    ]
    replies = iter(environments.steps(pending))
    environments.close()

    def finish(text: str, sample: int) -> Completion:
        reply = next(replies)
        done = make_completion([5] * (1 + len(text) % 9))
        ends = {"failures": (reply.failure,), "lost_environment": reply.lost}
        return dataclasses.replace(done, text=text, sample=sample, **ends)

    return [tuple(finish(text, i) for i, text in enumerate(texts)) for texts in groups]


def score(config: Config, groups: list[list[str]]) -> list[Group]:
    completions = play(groups)
    judge = Judge(config, RewardPool(config.reward))
    try:
        pending = [
            judge.submit(make_prompt(i, [2, 3], "7"), own) for i, own in enumerate(completions)
        ]
        return judge.groups(pending)
    finally:
        judge.close()


def learn(config: Config, groups: list[Group]) -> tuple[list[np.ndarray], list[np.ndarray], list]:
    """Advantages, loss weights and gradients of log-probs, of each response's tokens."""
    segments = split_groups(config, groups)
    rollouts, used = pack_updates(segments, PACKING)
    minibatches = Minibatches(segments, rollouts, used)
    scored = ScoredBatch(rollouts, rollouts.sampler_logprobs)
    estimates = estimate(config.algorithm, make_feedback(config, minibatches, scored, groups))
    (batch,) = make_train_batches(config, minibatches, scored, estimates)
    shape = (-1, batch.advantages.shape[-1])
    advantages, weights = (x.reshape(shape) for x in (batch.advantages, batch.loss_weights))
    ids, old = (x[0].reshape(shape) for x in (rollouts.segment_ids, rollouts.sampler_logprobs))

    def loss(logprobs):
        losses, _ = policy_loss(config.algorithm, logprobs, old, advantages, weights, ids)
        return (weights * losses).sum()

    gradients = np.asarray(jax.grad(loss)(old))
    index = rollouts.response_index.reshape(shape)
    return tuple(take_tokens(values, index) for values in (advantages, weights, gradients))


def check_learning(config: Config, groups: list[Group]) -> None:
    """Compare with the same groups without failed responses, and with the formulas of GRPO."""
    alone = [reward_group(config, g.prompt, g.completions, g.verdicts) for g in groups]
    results = learn(config, groups)
    for found, expected in zip(results, learn(config, alone), strict=True):
        for own, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(own, other)
    responses = sum(len(group.completions) for group in groups)
    fraction = len(groups) / config.rollout.prompts_per_step
    each = zip(*results, strict=True)
    for group in groups:
        rewards = group.rewards
        spread = rewards.std(ddof=1) + 1e-6
        for reward, completion in zip(rewards, group.completions, strict=True):
            advantages, weights, gradients = next(each)
            advantage = (reward - rewards.mean()) / spread
            weight = fraction / len(completion) / responses
            np.testing.assert_allclose(advantages, [advantage] * len(completion), rtol=1e-5)
            np.testing.assert_allclose(weights, [weight] * len(completion), rtol=1e-6)
            np.testing.assert_allclose(gradients, -advantages * weights, rtol=1e-5)
    assert next(each, None) is None


def inject(kinds: Sequence[str], rate: float) -> collections.Counter:
    """Check kinds of failures at a rate; return the numbers of outcomes and of broken groups."""
    config, texts = make_config(RESPONSES[rate]), make_texts(kinds, rate)
    groups = score(config, texts)
    counts = collections.Counter()
    for own, group in zip(texts, groups, strict=True):
        bad = [text for text in own if not text.startswith("sound")]
        assert [done.text for done, _ in group.failed] == bad
        for done, failure in group.failed:
            assert failure.outcome == OUTCOMES[done.text.split()[0]], (done.text, failure)
        sound = [text for text in own if text.startswith("sound")]
        assert [done.text for done in group.completions] == sound
        expected = [(1 if text[-1] == "7" else -1) + 0.05 * len(text) for text in sound]
        np.testing.assert_allclose(group.rewards, expected, rtol=1e-12)
        assert group.is_broken == (len(sound) < 2)
        counts.update(map(str, group.outcomes))
        counts["broken groups"] += group.is_broken
    check_learning(config, [group for group in groups if not group.is_broken])
    return counts


@pytest.mark.parametrize(
    "rate", [pytest.param(rate, marks=[pytest.mark.slow] * (rate != 0.1)) for rate in RESPONSES]
)
def test_failures_are_typed_and_the_others_learn_as_if_alone(rate, write_module, monkeypatch):
    write_module("fragile_parts", FRAGILE)
    break_verifiers(monkeypatch)
    monkeypatch.setattr(scorers, "LATE_FACTOR", 1)
    monkeypatch.setattr(algebra_process, "BUSY_FACTOR", 2)
    counts = inject(list(OUTCOMES), rate)
    failed = sum(counts[outcome] for outcome in FAILURES)
    assert failed == max(1, round(rate * RESPONSES[rate]))


# --- slow machines and slow texts ----------------------------------------------------------------


def test_a_worker_that_was_stopped_for_a_while_decides_in_its_second_try(monkeypatch):
    ask = process_module.WorkerProcess.ask
    stopped = []

    def stop_and_ask(self, job, deadline, computing=0.0):
        if len(stopped) < 2:  # the second is woken in time
            stopped.append(self.pid)
            os.kill(self.pid, signal.SIGSTOP)
            if len(stopped) == 2:
                threading.Timer(1.0, os.kill, (self.pid, signal.SIGCONT)).start()
        return ask(self, job, deadline, computing)

    monkeypatch.setattr(process_module.WorkerProcess, "ask", stop_and_ask)
    pool = RewardPool(Reward(timeout_seconds=0.5))
    verdict = pool.submit("", "#### 7", "7").result(timeout=60)
    pool.close()
    assert verdict.correct and verdict.failure is None
    assert pool.kills == 1 and len(set(stopped)) == 2


SLOW_VERIFIER = """
import time
from dapo_jax.runtime.workers.child import serve

def answer(job):
    words = [question[0] for question in job["questions"]]
    while "compute" in words:
        pass
    if "sleep" in words:
        time.sleep(60)
    return {"replies": [[True, "1", "box"]] * len(words)}

serve(lambda: answer)
"""


def test_a_text_that_computes_too_long_is_wrong_and_one_that_waits_has_no_verdict(monkeypatch):
    start = process_module.subprocess.Popen

    def popen(command, **options):
        return start([sys.executable, "-c", SLOW_VERIFIER], **options)

    monkeypatch.setattr(process_module.subprocess, "Popen", popen)
    pool = RewardPool(Reward(workers=1, timeout_seconds=0.5, verifier="math"))
    texts = ["fine", "compute", "fine", "sleep", "fine"]
    verdicts = []
    # The first limit holds also if other programs leave the text a hundredth of a core.
    for factor, part in (100, texts[:3]), (4, texts[3:]):
        monkeypatch.setattr(algebra_process, "BUSY_FACTOR", factor)
        verdicts += [future.result() for future in [pool.submit("", text, "1") for text in part]]
    pool.close()
    fine, compute, _, sleep, _ = verdicts
    assert [verdict.correct for verdict in verdicts] == [text == "fine" for text in texts]
    assert (compute.failure, compute.decided, fine.failure) == (None, SLOW, None)
    assert sleep.failure.outcome == Outcome.TIMEOUT
    prompt, tokens = make_prompt(0, [2]), make_completion([5, 6])
    group = reward_group(Config(), prompt, (tokens,) * 5, tuple(verdicts))
    names = [Outcome.RIGHT, Outcome.WRONG, Outcome.RIGHT, Outcome.RIGHT, Outcome.TIMEOUT]
    assert group.outcomes == names


def test_a_verdict_that_nothing_reads_fails_without_harm(write_module, monkeypatch):
    write_module("fragile_parts", FRAGILE)
    reward = Reward(parts="fragile_parts:fragile=1", correct="spread", timeout_seconds=1.0)
    break_verifiers(monkeypatch)
    pool = RewardPool(reward)
    verdict = pool.submit("", "verifier_kill #### 7", "7").result(timeout=60)
    pool.close()
    assert verdict.failure is None and verdict.parts["fragile_parts:fragile"] == 2.0


def main() -> None:
    print("kind            rate  responses  outcomes, broken groups                  seconds")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        pathlib.Path(folder, "fragile_parts.py").write_text(FRAGILE)
        patch.syspath_prepend(folder)
        break_verifiers(patch)
        for kind in OUTCOMES:
            for rate, responses in RESPONSES.items():
                began = time.monotonic()
                counts = inject([kind], rate)
                shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
                seconds = time.monotonic() - began
                print(
                    f"{kind:14} {rate:6.0%} {responses:10}  {shown:60} {seconds:5.1f}", flush=True
                )


if __name__ == "__main__":
    main()
