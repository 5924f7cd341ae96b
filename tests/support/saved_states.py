"""Checkpoints of states without a model."""

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config.experiment import Checkpoint
from dapo_jax.run.identity import Record
from dapo_jax.run.store import Checkpoints
from dapo_jax.runtime.storage.retries import Storage

SIZE = 1000


def make_state(step, size=SIZE):
    """Return arrays that depend on the step and don't compress."""
    key = jax.random.key(step)
    return {"params": {"a": jax.random.normal(key, (size,)), "b": jnp.full((3,), float(step))}}


def save(run_dir, steps, size=SIZE, keep=9):
    with Checkpoints(run_dir, Checkpoint(keep=keep)) as checkpoints:
        for step in steps:
            checkpoints.save(Record(step, {}), {"state": make_state(step, size)})
            checkpoints.wait()


def restored(run_dir, settings=None):
    """Return the step that is resumed, after comparing its arrays, and the warnings."""
    warnings = []
    with Checkpoints(run_dir, settings, Storage(warnings.append)) as checkpoints:
        empty = jax.tree.map(jnp.zeros_like, make_state(0))
        step, state = checkpoints.newest(lambda record: (record.step, checkpoints.state(empty)))
        assert checkpoints.latest_step() == step
    jax.tree.map(np.testing.assert_array_equal, state, make_state(step))
    return step, warnings
