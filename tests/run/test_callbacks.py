"""Callbacks of `dapo_jax.train`: what they receive, and how they stop a run."""

import os

import pytest
from small_runs import make_quick_config, read_rows

import dapo_jax
from dapo_jax.config.experiment import Checkpoint, Data, Evaluation
from dapo_jax.run.store import saved_steps
from dapo_jax.types.contracts import RunSink
from dapo_jax.types.errors import ConfigError

DATA = Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=4)


class Recorder:
    """A callback with the three methods of the documentation."""

    def __init__(self):
        self.events = []

    def on_step(self, step, values):
        assert "loss" in values
        self.events.append(f"step {step}")

    def on_evaluation(self, step, responses):
        assert len({response.index for response in responses}) == 4
        self.events.append(f"evaluation {step}")

    def on_checkpoint(self, step, folder):
        assert os.path.isdir(folder) and folder.endswith(f"checkpoints/{step}")
        assert os.path.exists(f"{folder}/_CHECKPOINT_METADATA")
        self.events.append(f"checkpoint {step}")


class Rows(RunSink):
    def __init__(self):
        self.rows, self.summary, self.closed = [], None, None

    def on_row(self, step, values):
        self.rows.append(step)

    def on_summary(self, summary):
        self.summary = summary

    def close(self, failed):
        self.closed = failed


def config_of(base, run_dir, **changes):
    changes = {"data": DATA, "checkpoint": Checkpoint(every_steps=1)} | changes
    return make_quick_config(base, run_dir, evaluation=Evaluation(every_steps=1), **changes)


def test_callbacks_receive_steps_evaluations_and_complete_checkpoints(base, tmp_path, alone):
    recorder, sink, steps = Recorder(), Rows(), []
    result = dapo_jax.train(
        config_of(base, tmp_path),
        callbacks=[recorder, sink],
        on_step=lambda step, _: steps.append(step),
    )
    assert result.summary == sink.summary and sink.rows == [0, 1, 2] and sink.closed is False
    assert steps == [1, 2]
    saved = [event for event in recorder.events if event.startswith("checkpoint")]
    others = [event for event in recorder.events if event not in saved]
    assert others == ["evaluation 0", "evaluation 1", "step 1", "evaluation 2", "step 2"]
    assert saved == ["checkpoint 1", "checkpoint 2"]


def test_a_callback_stops_a_run_which_then_resumes(base, tmp_path, alone):
    stop = type("Stop", (), {"on_evaluation": lambda self, step, responses: step == 1})()
    stopped = dapo_jax.train(config_of(base, tmp_path), callbacks=[stop])
    assert stopped.summary is None and stopped.stopped == "on_evaluation"
    assert saved_steps(tmp_path) == [1] and len(read_rows(tmp_path)) == 2
    resumed = dapo_jax.train(config_of(base, tmp_path)).summary
    assert resumed and resumed["steps"] == 2


@pytest.mark.parametrize("last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_whose_callback_raises_is_saved_first(last, base, tmp_path, alone):
    steps, sink = [], Rows()

    class Failing:
        def on_step(self, step, values):
            steps.append(step)
            if step == 1 + last:
                raise KeyError("mine")

    config = config_of(base, tmp_path, checkpoint=Checkpoint(every_steps=0))
    with pytest.raises(KeyError, match="mine") as raised:
        dapo_jax.train(config, callbacks=[Failing(), sink])
    assert raised.traceback[-1].name == "on_step"
    assert steps == sink.rows[1:] == [1, 2][: 1 + last] and sink.closed is True
    assert saved_steps(tmp_path) == [1 + last]


class Misspelled:
    def on_steps(self, step, values): ...


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (Misspelled(), "callbacks[0].on_steps: there is no such event; did you mean on_step"),
        (Recorder, "must be an object with one or more of the methods on_step, on_evaluation"),
        (print, "config.callbacks[0] = <built-in function print>: must be an object"),
    ],
)
def test_what_is_no_callback_is_named(callback, text, base, tmp_path):
    with pytest.raises(ConfigError) as raised:
        dapo_jax.train(make_quick_config(base, tmp_path), callbacks=[callback])
    assert text in str(raised.value) and "\n" not in str(raised.value)
