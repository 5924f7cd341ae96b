"""Muon against a float64 loop over published matrices, on one device and on eight."""

import dataclasses
import functools
import pathlib

import hlo_arrays
import jax
import numpy as np
import pytest
from conftest import DELTA, MOE, TINY
from flax.traverse_util import unflatten_dict

from dapo_jax.config.experiment import Checkpoint, Optimizer
from dapo_jax.learner.batches import TrainState
from dapo_jax.learner.update import Learner, apply_gradient, make_optimizer
from dapo_jax.model import param_paths
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.load_huggingface import read_config
from dapo_jax.run.identity import Record
from dapo_jax.run.store import Checkpoints
from dapo_jax.runtime import sharding

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
SETTINGS = Optimizer(name="muon", weight_decay=0.1)
RATE = 0.01
DENSE = dataclasses.replace(TINY, tie_embeddings=False)
EXPERTS = dataclasses.replace(MOE, layers=3)  # no mesh divides 3 layers
GEMMA = dataclasses.replace(read_config(FIXTURES / "models/gemma4"), vocab=32)
MESHES = {
    "one device": lambda: sharding.make_mesh(1, 1, 1, jax.devices()[:1]),
    "fsdp and tensor": lambda: sharding.make_mesh(1, 4, 2),
    "replicas, experts and tensor": lambda: sharding.make_mesh(2, 1, 2, expert=2),
}


def make_learner(config: DecoderConfig, mesh: jax.sharding.Mesh):
    """Return a learner without a loss, and its optimizer step."""
    learner = Learner(None, None, abstract_params(config), SETTINGS, mesh)  # type: ignore[arg-type]
    step = functools.partial(apply_gradient, make_optimizer(SETTINGS))
    jitted = jax.jit(step, out_shardings=(learner.shardings, None))

    def update(state: TrainState, gradient: dict) -> tuple[TrainState, dict]:
        gradient = jax.device_put(unflatten_dict(gradient, sep="/"), learner.shardings.params)
        with sharding.activate(mesh):
            return jitted(state, gradient, RATE)

    return learner, update


def random_arrays(config: DecoderConfig, seed: int) -> dict[str, np.ndarray]:
    rng, shapes = np.random.default_rng(seed), param_paths.param_shapes(config)
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}


def start(learner: Learner, config: DecoderConfig) -> TrainState:
    params = unflatten_dict(random_arrays(config, 0), sep="/")
    return learner.start(jax.device_put(params, learner.shardings.params))


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Return five quintic Newton-Schulz iterations, scaled by 0.2 sqrt(max(rows, columns))."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return 0.2 * np.sqrt(max(x.shape)) * x


def loop(config: DecoderConfig, gradients: list[dict]) -> dict[str, np.ndarray]:
    """Return parameters after an update for each gradient."""
    params = {path: array.astype(np.float64) for path, array in random_arrays(config, 0).items()}
    first, second = ({path: np.zeros(x.shape) for path, x in params.items()} for _ in range(2))
    for count, gradient in enumerate(gradients, 1):
        norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradient.values()))
        for path, x in params.items():
            g = gradient[path].astype(np.float64) / max(1.0, norm)
            if path.endswith("kernel"):
                first[path] = 0.95 * first[path] + g
                nesterov, direction = g + 0.95 * first[path], np.zeros(x.shape)
                for index in np.ndindex(x.shape[: param_paths.stacked_axes(path)]):
                    # Where each number of the published matrix is in ours.
                    layer = nesterov[index]
                    places = np.arange(layer.size).reshape(layer.shape)
                    places = param_paths.to_published(path, places, config)
                    direction[index].flat[places] = orthogonalised(layer.flat[places])
            else:
                first[path] = 0.9 * first[path] + 0.1 * g
                second[path] = 0.999 * second[path] + 0.001 * g**2
                root = np.sqrt(second[path] / (1 - 0.999**count)) + 1e-8
                direction = first[path] / (1 - 0.9**count) / root
            if path.endswith(("kernel", "embedding", "head")):
                direction = direction + 0.1 * x
            params[path] = x - RATE * direction
    return params


@functools.cache
def two_updates(config: DecoderConfig) -> dict[str, np.ndarray]:
    return loop(config, [random_arrays(config, 1), random_arrays(config, 2)])


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (DENSE, "one device"),
        (DENSE, "fsdp and tensor"),
        (EXPERTS, "replicas, experts and tensor"),
        pytest.param(EXPERTS, "one device", marks=pytest.mark.slow),
        pytest.param(DELTA, "fsdp and tensor", marks=pytest.mark.slow),
        pytest.param(DELTA, "one device", marks=pytest.mark.slow),
        pytest.param(GEMMA, "fsdp and tensor", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.family,
)
def test_two_updates_equal_a_loop_over_published_matrices(config, mesh):
    learner, update = make_learner(config, MESHES[mesh]())
    state = start(learner, config)
    for seed in 1, 2:
        state, _ = update(state, random_arrays(config, seed))
    expected, before = two_updates(config), random_arrays(config, 0)
    for path, actual in sharding.flatten(jax.device_get(state.params)).items():
        change = np.abs(expected[path] - before[path]).max()
        np.testing.assert_allclose(actual, expected[path], atol=2e-3 * change, err_msg=path)


def test_no_device_holds_a_whole_stack():
    """Moments are sharded like parameters, and matrices are exchanged, not gathered."""
    config = dataclasses.replace(TINY, layers=8, embed=64, mlp=512, vocab=64)
    learner, update = make_learner(config, sharding.make_mesh(1, 4, 2))
    places = sharding.flatten(learner.shardings.params)
    momentum = learner.shardings.opt_state[1].inner_states["muon"].inner_state[0].trace
    kernels = sharding.flatten(momentum)
    assert all(kernels[path] == places[path] for path in places if path.endswith("kernel"))
    step = functools.partial(apply_gradient, make_optimizer(SETTINGS))
    with sharding.activate(learner.mesh):
        state = learner.abstract_state
        lowered = jax.jit(step, out_shardings=(learner.shardings, None)).lower(
            state, state.params, RATE
        )
    made = hlo_arrays.instructions(lowered.compile().as_text())
    share = config.layers * config.embed * config.mlp * 4 // 8
    assert max(array.bytes for array in made) <= share
    assert {"all-to-all"} <= {array.operation for array in made}


def test_a_restored_state_continues_with_the_same_bits(tmp_path):
    learner, update = make_learner(EXPERTS, MESHES["replicas, experts and tensor"]())
    state, _ = update(start(learner, EXPERTS), random_arrays(EXPERTS, 1))
    with Checkpoints(tmp_path, Checkpoint()) as checkpoints:
        checkpoints.save(Record(1, {}), {"state": state})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.state(learner.abstract_state)
    last = random_arrays(EXPERTS, 2)
    after, resumed = update(state, last)[0], update(restored, last)[0]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), jax.device_get(after))
