"""What tests of several processes share: starting them on one machine, and waiting for them."""

import dataclasses
import os
import pathlib
import socket
import time

import forked
import jax
import numpy as np
from conftest import first_devices
from small_runs import make_config, read_rollouts

from dapo_jax.config import experiment
from dapo_jax.config.experiment import Checkpoint, Config, Data, Log, Mesh, Rollout, Sampler
from dapo_jax.learner.update import learning_rate
from dapo_jax.run.build import build
from dapo_jax.run.loop import train
from dapo_jax.run.store import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/support")))
GONE_SECONDS = 30  # after which nobody may still wait for a dead process

COMMAND = "import runpy; runpy.run_module('dapo_jax', run_name='__main__', alter_sys=True)"
PROGRAM = """
import os, signal, sys
import conftest
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count={devices}"  # the last counts
from several import make_small_config
from dapo_jax.run import checks
from dapo_jax.runtime import processes
from dapo_jax.commands.train import work
INDEX = int(os.environ.get("DAPO_PROCESS_ID", "0"))
config = make_small_config({base!r}, {run_dir!r})
{patch}
sys.exit(processes.run(lambda: checks.guarded(lambda: work(config))))
"""


@dataclasses.dataclass
class Ended:
    code: int
    out: str
    err: str


class Several:
    """Processes of one program, joined over loopback."""

    def __init__(
        self, folder: pathlib.Path, program: str, count: int, *arguments: str, **variables
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        variables |= {"DAPO_PROCESSES": str(count), "PYTHONPATH": PATH}
        if count > 1:
            variables |= {"DAPO_COORDINATOR": f"127.0.0.1:{port}", "COLUMNS": "300"}
        self._paths = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(count)]
        self.children = []
        for i, (out, err) in enumerate(self._paths):
            changed = variables | ({"DAPO_PROCESS_ID": str(i)} if count > 1 else {})
            self.children.append(forked.Child(program, arguments, (out, err), changed))

    def wait(self, seconds: float = 240) -> list[Ended]:
        """Wait until all have ended; kill them and fail if one has not after `seconds`."""
        until = time.monotonic() + seconds
        try:
            codes = [c.wait(max(0.1, until - time.monotonic())) for c in self.children]
        finally:
            for child in self.children:
                child.kill()
        texts = [(out.read_text(), err.read_text()) for out, err in self._paths]
        return [Ended(code, *both) for code, both in zip(codes, texts, strict=True)]


def make_small_config(base, run_dir) -> Config:
    """Three steps on four devices, however many processes; its reward asks worker processes."""
    return make_config(
        base,
        run_dir,
        total_steps=3,
        mesh=Mesh(2, 2, 1),
        data=Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=6),
        rollout=Rollout(prompts_per_step=4, samples_per_prompt=4, updates_per_rollout=2),
        sampler=Sampler(slots=16, burst_tokens=8, max_response_tokens=24),
        packing=experiment.Packing(row_tokens=64, rows_per_microbatch=4),
        reward=experiment.Reward(parts="rule=1,think_format=0.1", workers=1),
        evaluation=experiment.Evaluation(every_steps=0, samples_per_problem=2, top_p=1.0),
        # Log-probs of tokens are rounded, and may round otherwise on another mesh.
        log=Log(tensorboard=False, show_group_every_steps=0, token_groups=0),
    )


def assert_rounded_alike(params, expected, moved: float) -> None:
    """Compare parameters after two trainings that differ in the order of their sums alone.

    Adam divides by a gradient's own size: if one is nearly 0 its rounding may turn its sign, and
    that parameter moves the other way. So a few parameters may be apart by twice `moved`, the sum
    of the learning rates of all updates, and only the others have to be close.
    """
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
    apart = np.concatenate([np.abs(np.ravel(a) - np.ravel(b)) for a, b in pairs])
    # In few updates Adam's direction exceeds 1 by 2 % at most (Cauchy-Schwarz, beta1 and beta2).
    assert apart.max() <= 2.1 * moved, apart.max()
    assert np.mean(apart > 1e-5) <= 1e-3, np.sort(apart)[-20:]


def start_training(base, run_dir, count: int, devices: int, *, patch: str = "") -> Several:
    """Start `count` processes of `devices` virtual devices each that train together.

    `patch` is run in each before it joins; it knows its number as INDEX, and `config`.
    """
    program = PROGRAM.format(base=str(base), run_dir=str(run_dir), devices=devices, patch=patch)
    folder = pathlib.Path(f"{run_dir}_output")
    return Several(folder, program, count)


STEPS = 3
IN_STEP_2 = """
from dapo_jax.rollout import dynamic_sampling as filtering
read, asked = filtering.Collection.read_verdicts, []
def read_and_send(self, judge, wait):
    asked.append(self)
    steps = list(dict.fromkeys(map(id, asked)))
    if len(steps) == 2 and steps[1] == id(asked[-2]) and INDEX == VICTIM:
        os.kill(os.getpid(), signal.SIGNAL)
    read(self, judge, wait)
filtering.Collection.read_verdicts = read_and_send
"""
AT_THE_END = """
from dapo_jax.run.loop import Run
finish = Run.finish
def save_and_send(self):
    self.checkpoints.wait()
    if INDEX == VICTIM:
        os.kill(os.getpid(), signal.SIGNAL)
    return finish(self)
Run.finish = save_and_send
"""


def send(where: str, name: str, victim: int) -> str:
    """The patch that sends one process a signal, in the second step it collects or at the end."""
    return where.replace("SIGNAL", name).replace("VICTIM", str(victim))


def final_states(base, *run_dirs) -> list[tuple]:
    """Parameters and moments of the newest checkpoints, read by this process on eight devices."""
    parts, found = build(make_config(base, run_dirs[0])), []
    for run_dir in run_dirs:
        with Checkpoints(run_dir, Checkpoint()) as checkpoints:
            state = checkpoints.state(parts.learners.policy.abstract_state)
            record = checkpoints.record()
        place = record.progress.position, record.progress.kept_fraction
        found.append((jax.device_get(state), {"step": record.step, "place": place}))
    parts.close()
    return found


def assert_same_run(base, run_dir, other) -> None:
    """Same groups, tokens, verdicts, rewards; moments, which are sums of gradients, within 1e-6."""
    assert read_rollouts(run_dir) == read_rollouts(other)
    (state, record), (expected, expected_record) = final_states(base, run_dir, other)
    assert record == expected_record and record["step"] == STEPS
    moments = state.opt_state, expected.opt_state
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), *moments)
    config = make_small_config(base, run_dir)
    rates = [learning_rate(config.optimizer, step, STEPS) for step in range(STEPS)]
    moved = sum(rates) * config.rollout.updates_per_rollout
    assert_rounded_alike(state.params, expected.params, moved)


def train_with(base, run_dir, count: int, code: int = 0, **options: str) -> list[Ended]:
    """The ends of `count` processes with four devices in all; all exit with `code`."""
    ended = start_training(base, run_dir, count, 4 // count, **options).wait()
    assert [one.code for one in ended] == [code] * count, [one.err[:6000] for one in ended]
    return ended


def train_alone(base, run_dir) -> None:
    """The same in this process, which sees four of its eight devices."""
    with first_devices(4):
        train(make_small_config(base, run_dir))
