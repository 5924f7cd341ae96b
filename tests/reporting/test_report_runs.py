"""What a run stores for its report and its sinks, and its report."""

import json

import numpy as np
import pytest
from conftest import first_devices
from small_runs import make_quick_config, read_rollouts, read_rows

from dapo_jax.config.experiment import Log, Optimizer
from dapo_jax.extras.report import page
from dapo_jax.run.loop import train


@pytest.fixture(scope="module")
def traced(base, tmp_path_factory):
    """A run with ratios of all trained groups, whose updates are large enough to be clipped."""
    run_dir = tmp_path_factory.mktemp("traced") / "run"
    with first_devices():
        log = Log(0, console=False, tensorboard=False, token_groups=4, token_ratios=True)
        optimizer = Optimizer(learning_rate=3e-2, warmup_steps=0)
        train(make_quick_config(base, run_dir, total_steps=1, log=log, optimizer=optimizer))
    return run_dir


def test_stored_clips_are_those_that_the_update_made(traced):
    (row,) = read_rows(traced)
    lines = [json.loads(line) for line in read_rollouts(traced)["step_000001.jsonl"].splitlines()]
    trained = [line for line in lines if line["advantage"] is not None]
    ratios = [line for line in trained if "token_ratios" in line]
    # The first of two updates sees ratios of 1: what is clipped is clipped in the second.
    tokens = sum(line["tokens"] for line in trained)
    assert len(trained) == 16 and len(ratios) == 8
    assert all("token_texts" in line for line in trained)
    for number, name in (1, "low"), (2, "high"), (3, "dual"):
        cut = sum(line["token_clipped"].count(number) for line in ratios)
        logged = row[f"clip_fraction_{name}"]
        assert cut / tokens == pytest.approx(logged, abs=1.5 / tokens), name
    assert any(1 in line["token_clipped"] or 2 in line["token_clipped"] for line in ratios)
    for line in trained:
        assert "".join(line["token_texts"]) == line["response"]
        assert len(line["token_logprobs"]) == len(line["token_texts"]) == line["tokens"]
        assert all(x <= 0 for x in line["token_logprobs"])


def test_stored_advantages_are_the_algorithms(traced):
    text = read_rollouts(traced)["step_000001.jsonl"]
    groups: dict = {}
    for line in map(json.loads, text.splitlines()):
        groups.setdefault(line["index"], []).append(line)
    mixed = [g for g in groups.values() if g[0]["advantage"] is not None]
    assert len(mixed) == 4
    for group in mixed:
        rewards = np.array([line["reward"] for line in group])
        expected = (rewards - rewards.mean()) / rewards.std(ddof=1)
        result = [line["advantage"] for line in group]
        np.testing.assert_allclose(result, expected, rtol=1e-3)


def test_a_run_writes_its_page(traced):
    text = (traced / page.PAGE).read_text()
    assert "<h3>Reward</h3>" in text and "log-probability -" in text and 'class="clip"' in text
