"""Two processes and their checkpoints: one of them lost in a save, and what is carried over."""

import signal

import pytest
from several import IN_STEP_2, assert_same_run, send, start_training, train_alone, train_with
from small_runs import read_rows

from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.runtime.processes import PEER_LOST

pytestmark = pytest.mark.usefixtures("compiled_once")

IN_SAVE_2 = """
from dapo_jax.run.checkpointing.checkpoints import Checkpoints
save = Checkpoints.save
def save_and_send(self, record, states):
    save(self, record, states)
    if record.step == 2 and INDEX == VICTIM:
        os.kill(os.getpid(), signal.SIGNAL)
Checkpoints.save = save_and_send
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_is_lost_in_a_save_leaves_the_checkpoint_before_whole(victim, base, tmp_path):
    run_dir = tmp_path / "run"
    patch = send(IN_SAVE_2, "SIGKILL", victim)
    ended = start_training(base, run_dir, 2, 2, patch=patch).wait()
    assert ended[victim].code == -signal.SIGKILL
    assert ended[1 - victim].code in (PEER_LOST, -signal.SIGABRT)
    with Checkpoints(run_dir) as checkpoints:
        step = checkpoints.latest_step()
    assert step in (1, 2)  # whole, or absent
    first, _ = train_with(base, run_dir, 2)
    assert f"after step {step}" in first.out and "damaged" not in first.err
    train_alone(base, tmp_path / "alone")
    assert_same_run(base, run_dir, tmp_path / "alone")


@pytest.mark.slow
def test_two_processes_carry_over_what_one_does(base, tmp_path):
    """They are stopped in a step, too, and go on with what their checkpoint carries."""
    carry = "config.rollout.carry_over, config.algorithm.importance_cap = 'all', 2.0\n"
    train_with(base, tmp_path / "one", 1, patch=carry)
    train_with(base, tmp_path / "two", 2, patch=carry + send(IN_STEP_2, "SIGTERM", 1))
    assert len(read_rows(tmp_path / "two")) == 2
    train_with(base, tmp_path / "two", 2, patch=carry)
    assert_same_run(base, tmp_path / "two", tmp_path / "one")
    assert any(row["policy_lag"] > 0 for row in read_rows(tmp_path / "two")[1:])
