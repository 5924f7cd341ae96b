"""Groups of a step that was killed are read back, and make the step that they would have made."""

import random
import subprocess
import sys
import time

import numpy as np
import pytest
from small_runs import (
    ROOT,
    make_config,
    make_groups,
    make_quick_config,
    read_rollouts,
    read_rows,
)

from dapo_jax import algorithms
from dapo_jax.config.experiment import Checkpoint, Rollout
from dapo_jax.rollout.dynamic_sampling import recall
from dapo_jax.run.checkpointing.rollout_journal import FOLDER, RolloutJournal
from dapo_jax.run.run import train
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.retries import Storage

# What a step cost is counted from where it went on.
COSTS = (
    "decode_ prefills slot_occupancy abandoned_tokens put_back_tokens surplus_groups verdicts/ "
    "sampled_to_kept_tokens verifier_failures"
).split()
KEEP = Checkpoint(every_steps=1, keep=9, keep_groups=True)
PROGRAM = """
import conftest
from small_runs import make_config
from test_rollout_journal import KEEP
from dapo_jax.run.run import train
print("begins", flush=True)
train(make_config({base!r}, {run_dir!r}, checkpoint=KEEP))
"""


def opened(config, folder, identity="of this run") -> RolloutJournal:
    def decode(ids):
        return " ".join(map(str, ids))

    return RolloutJournal(folder, identity, Storage(), decode)


@pytest.fixture
def groups(tiny_folder, tmp_path):
    return make_groups(make_quick_config(tiny_folder, tmp_path / "run"))


def test_what_was_kept_is_read_back_whole(groups, tmp_path):
    kept = opened(None, tmp_path)
    assert not kept.begin(3)
    kept.add(groups[:1])
    kept.add(groups[1:])
    known = opened(None, tmp_path).begin(3)
    assert sorted(known) == [group.prompt.index for group in groups]
    for group in groups:
        found = recall(known, group.prompt)
        assert found is not None and found.prompt is group.prompt
        assert found.verdicts == group.verdicts and not found.broken
        for name in "rewards", "raw_rewards", "correct":
            np.testing.assert_array_equal(getattr(found, name), getattr(group, name))
        for one, other in zip(found.completions, group.completions, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.sampler_logprobs, other.sampler_logprobs)
            assert one.drawn_by == other.drawn_by and one.truncated == other.truncated
    assert not kept.begin(4)


def test_a_damaged_file_another_run_and_another_prompt_are_left_alone(groups, tmp_path):
    kept = opened(None, tmp_path)
    kept.begin(0)
    kept.add(groups[:1])
    kept.add(groups[1:])
    assert not opened(None, tmp_path, "of another run").begin(0)
    first, second = sorted((tmp_path / FOLDER).rglob("*.npz"))
    content = bytearray(first.read_bytes())
    for place in range(40, len(content), len(content) // 25):
        changed = bytearray(content)
        changed[place] ^= 4
        first.write_bytes(changed)
        known = opened(None, tmp_path).begin(0)
        found = known.get(groups[0].prompt.index)
        # A flipped bit in a name or a date of the archive changes nothing that is read.
        assert found is None or found[1].verdicts == groups[0].verdicts
        assert len(known) >= len(groups) - 1
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:200])
    known = opened(None, tmp_path).begin(0)
    assert not known
    first.write_bytes(content)
    known = opened(None, tmp_path).begin(0)
    assert recall(known, groups[0].prompt) and not recall(known, groups[1].prompt)
    assert recall(known, groups[1].prompt) is None


def test_groups_go_when_a_checkpoint_has_their_step(groups, tmp_path):
    kept = opened(None, tmp_path)
    for step in range(3):
        kept.begin(step)
        kept.add(groups)
    kept.forget(2)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step_000002"]


def test_carry_over_takes_groups_as_they_come_and_so_keeps_none(tiny_folder, tmp_path):
    algorithm, rollout = algorithms.dapo(), Rollout(4, 4, carry_over="all")
    algorithm.importance_cap = 2.0
    changes = {"algorithm": algorithm, "rollout": rollout, "checkpoint": KEEP}
    with pytest.raises(ConfigError, match="checkpoint.keep_groups"):
        make_quick_config(tiny_folder, tmp_path / "run", **changes)


def without_costs(run_dir):
    rows = read_rows(run_dir)
    return [{k: v for k, v in row.items() if not k.startswith(tuple(COSTS))} for row in rows]


def used(run_dir):
    """The lines of responses that a step did not draw in vain."""
    files = read_rollouts(run_dir)
    return {
        name: [line for line in text.splitlines() if '"surplus": true' not in line]
        for name, text in files.items()
    }


def is_the_same(run_dir, expected) -> None:
    assert without_costs(run_dir) == without_costs(expected)
    assert used(run_dir) == used(expected)
    assert not (run_dir / FOLDER).exists()


@pytest.fixture(scope="module")
def uninterrupted(base, tmp_path_factory):
    """The run with its usual settings, in this process."""
    run_dir = tmp_path_factory.mktemp("whole")
    train(make_config(base, run_dir))
    return run_dir


def kill_at_random(base, run_dir, kills: int, seed: int) -> int:
    """Starts the run, and kills it at a random moment, that many times; then lets it end."""
    code = PROGRAM.format(base=str(base), run_dir=str(run_dir))
    rng, done = random.Random(seed), 0
    while True:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "begins\n"
        if done < kills:
            time.sleep(rng.uniform(0.5, 9.0))
            child.kill()
        out, err = child.communicate(timeout=300)
        assert child.returncode in (0, -9), err[-3000:]
        if child.returncode == 0:
            return done
        done += 1


def test_two_kills_at_random_change_nothing(base, uninterrupted, tmp_path):
    kill_at_random(base, tmp_path / "run", 2, seed=0)
    is_the_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_fifty_kills_at_random_change_nothing(base, uninterrupted, tmp_path):
    done = 0
    for seed in range(1, 100):
        done += kill_at_random(base, tmp_path / f"run_{seed}", 10, seed)
        is_the_same(tmp_path / f"run_{seed}", uninterrupted)
        if done >= 50:
            break
    print(f"{done} kills")


def test_what_was_finished_is_not_drawn_again(base, uninterrupted, tmp_path, monkeypatch):
    """Stopped in the last burst of the first step, and gone on with."""
    from dapo_jax.rollout import dynamic_sampling

    config, bursts = make_config(base, tmp_path / "run", checkpoint=KEEP), []
    read = dynamic_sampling.Collection.read_verdicts

    def read_and_fail(self, judge):
        read(self, judge)
        bursts.append(len(self._judged))
        if len(bursts) == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dynamic_sampling.Collection, "read_verdicts", read_and_fail)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert bursts[-2] > 0
    train(config)
    is_the_same(tmp_path / "run", uninterrupted)
    prefills, whole = (read_rows(path)[1]["prefills"] for path in (tmp_path / "run", uninterrupted))
    assert prefills <= whole - bursts[-2] + 1
