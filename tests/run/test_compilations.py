"""A run compiles nothing after its first steps, whatever the response lengths."""

import jax
import numpy as np
import pytest
from small_runs import make_quick_config

import dapo_jax

COMPILED = "/jax/core/compile/backend_compile_duration"
WARM_STEPS, STEPS = 6, 20


@pytest.mark.slow
def test_twenty_steps_of_varied_lengths_compile_in_the_first_ones_only(
    base, tmp_path, alone, fresh_programs
):
    compiled, by_step, lengths = [0], [], []

    def count(event: str, seconds: float, **_) -> None:
        compiled[0] += event == COMPILED

    def on_step(step: int, values: dict[str, float]) -> None:
        by_step.append(compiled[0])
        lengths.append((values["response_tokens_mean"], values["trained_groups"]))

    config = make_quick_config(base, tmp_path / "run", total_steps=STEPS)
    jax.monitoring.register_event_duration_secs_listener(count)
    dapo_jax.train(config, on_step=on_step)
    assert len(set(lengths)) > STEPS / 2 and len(by_step) == STEPS
    assert by_step[0] > 0 and by_step[WARM_STEPS - 1] == by_step[-2], np.diff(by_step)
