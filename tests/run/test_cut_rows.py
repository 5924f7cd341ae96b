"""A training run whose rows are cut by length is the run that it is without."""

import json

import numpy as np
import pytest
from small_runs import make_quick_config

from dapo_jax.config.experiment import Mesh, Packing
from dapo_jax.run.run import train

SAME = ("loss", "gradient_norm", "entropy", "kl_sampler_trainer", "train_reward")


def metrics(base, folder, mesh) -> list[dict]:
    train(make_quick_config(base, folder, mesh=mesh, packing=Packing(64, 8)))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@pytest.mark.slow
def test_two_steps_with_cut_rows_equal_two_without(base, tmp_path):
    whole = metrics(base, tmp_path / "whole", Mesh(fsdp=8))
    cut = metrics(base, tmp_path / "cut", Mesh(fsdp=4, context=2))
    assert len(whole) == len(cut) == 2
    for one, other in zip(whole, cut, strict=True):
        names = [name for name in SAME if name in one]
        assert "gradient_norm" in names
        for name in names:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-3, atol=1e-5)
