"""The figure of docs/algorithms.md: a token's coefficient against its ratio, for each policy term.

    python docs/coefficients.py

Each number is minus the gradient of the loss that training differentiates, by the log-prob of one
token that is a response of its own. The numbers stand in the picture's metadata.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, PngImagePlugin

from dapo_jax.config.algorithms import preset
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.policy import policy_objective

PICTURE = pathlib.Path(__file__).with_name("coefficients.png")
OLD = 0.05  # probability before the step, which decides where tv and kl end
RATIOS = np.geomspace(1 / 16, 16, 241)
SIGNS = (1.0, -1.0)
TERMS = (
    "reinforce grpo dapo gspo gmpo dppo_tv dppo_kl prime_rl ipo deepseek_v3p2 "
    "cispo sapo vespo topr dro"
).split()
COLOURS = 32


def coefficients(name: str, sign: float, ratios: np.ndarray = RATIOS) -> np.ndarray:
    """Coefficients of log p where the advantage is 1 or -1, without a KL to the reference.

    The sampler is the old policy.
    """
    algorithm = preset(name)
    if algorithm.kl_to == "reference":
        algorithm = dataclasses.replace(algorithm, kl="none")
    shape = (1, len(ratios))
    zeros, ones = jnp.zeros(shape, int), jnp.ones(shape)
    old = jnp.full(shape, np.log(OLD))
    rollouts = PackedRows(zeros, jnp.arange(len(ratios))[None] + 1, zeros, zeros, old)
    batch = TrainBatch(ScoredBatch(rollouts, old), sign * ones, ones)

    def loss(logprobs):
        return policy_objective(algorithm, batch, logprobs, 0 * ones)[0]

    return -np.asarray(jax.grad(loss)(old + np.log(ratios)[None]))[0]


def numbers() -> dict[str, list[list[float]]]:
    """Coefficients of every policy term, for A = 1 and A = -1."""
    return {name: [coefficients(name, sign).round(4).tolist() for sign in SIGNS] for name in TERMS}


def recorded() -> dict[str, list[list[float]]]:
    """The numbers that the committed picture shows."""
    return json.loads(Image.open(PICTURE).info["numbers"])


def draw(values: dict[str, list[list[float]]]) -> None:
    """Writes the picture, with a palette and its numbers."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "font.size": 10})
    figure, axes = plt.subplots(
        3, 5, figsize=(13, 7.5), dpi=90, sharex=True, sharey=True, layout="constrained"
    )
    for axis, (name, lines) in zip(axes.flat, values.items(), strict=True):
        for sign, line, colour in zip(SIGNS, lines, ("C0", "C3"), strict=True):
            axis.plot(RATIOS, line, colour, lw=2, label=f"A = {sign:+g}")
        axis.set_title(name)
        axis.axvline(1, color="k", lw=0.6)
    axes[0, 0].set(xscale="log", ylim=(-20, 20))
    axes[0, 0].set_yscale("asinh", linear_width=0.5)
    axes[0, 0].set_yticks([-10, -3, -1, 0, 1, 3, 10], ["-10", "-3", "-1", "0", "1", "3", "10"])
    axes[0, 0].set_xticks([0.1, 0.25, 0.5, 1, 2, 4, 10], ["0.1", "¼", "½", "1", "2", "4", "10"])
    for axis in axes.flat:
        axis.minorticks_off()
    for axis in axes[2]:
        axis.set_xlabel("ratio p / p_old")
    for axis in axes[:, 0]:
        axis.set_ylabel("coefficient")
    axes[0, 0].legend(loc="lower left")
    figure.savefig(PICTURE)
    picture = Image.open(PICTURE).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    metadata = PngImagePlugin.PngInfo()
    metadata.add_text("numbers", json.dumps(values), zip=True)
    picture.save(PICTURE, optimize=True, pnginfo=metadata)


if __name__ == "__main__":
    draw(numbers())
    print(f"{PICTURE.name}: {PICTURE.stat().st_size / 1e3:.0f} kB")
