# %% [markdown]
# # Four switches
#
# What DAPO adds to GRPO is four switches: clip-higher, dynamic sampling, the token-level loss and
# the soft overlong punishment. Here is every one of their sixteen combinations, trained three
# times: 48 runs of `configs/ladder.py`, recorded by `python notebooks/measure.py`, which makes
# them again (about half a minute each on one core). Nothing below is drawn by hand.
#
# The task is small: a policy of 0.6 M parameters works out chains of seven or eight sums modulo
# 10, starts with a third of them right, and is cut off at 64 tokens. A step samples 32 groups of
# 8 and takes 16 updates of two groups each, at a learning rate near the edge of what goes well.

# %%
import os
import pathlib
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np

import dapo_jax

HERE = pathlib.Path(dapo_jax.__file__).parent.parent
if not (HERE / "notebooks/measurements").is_dir():  # installed without what was measured
    HERE = pathlib.Path("dapo_jax_repository")
    if not HERE.exists():
        subprocess.run(["git", "clone", "--depth=1", "{repository}", HERE], check=True)
sys.path.insert(0, str(HERE))

from notebooks import measured  # noqa: E402

plt.rcParams.update({"figure.dpi": 68, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10})
KNOBS, SEEDS = measured.KNOBS, 3
RUNS = {name: measured.runs(name, SEEDS) for name in measured.COMBINATIONS}
print(len(RUNS), "combinations,", sum(map(len, RUNS.values())), "runs")

# %% [markdown]
# ## All sixteen
#
# Held-out accuracy after 16 steps; a dot is a seed, the line is the 95 % interval that resamples
# seeds and problems. Few seeds make such intervals too narrow, so look at the dots.


# %%
def label(name):
    return "none" if name == "none" else name.replace("+", " + ").replace("_", " ")


def all_combinations():
    order = sorted(RUNS, key=lambda name: measured.accuracy(RUNS[name]).value)
    _, axis = plt.subplots(figsize=(11, 6), layout="constrained")
    for height, name in enumerate(order):
        found = measured.accuracy(RUNS[name])
        colour = "C0" if "dynamic_sampling" in name else "C1"
        axis.plot([found.low, found.high], [height, height], colour, lw=6, alpha=0.25)
        axis.plot([run.after.mean() for run in RUNS[name]], [height] * SEEDS, "o", color=colour)
    axis.set_yticks(range(len(order)), map(label, order))
    before = np.mean([run.before.mean() for runs in RUNS.values() for run in runs])
    axis.axvline(before, color="k", ls=":", lw=1)
    axis.text(before, 4.5, "before training ", ha="right")
    axis.set(title="Blue: with dynamic sampling", xlabel="held-out accuracy", xlim=(-0.02, 1))
    plt.show()


all_combinations()

# %% [markdown]
# ## What each adds
#
# The mean difference between on and off, over the eight states of the other three.

# %%
for knob in KNOBS:
    print(f"{knob:20} {measured.written(measured.effect(knob, SEEDS), signed=True)}")

# %% [markdown]
# ## One switch in a picture
#
# Means over the eight combinations with it (solid) and without it (dashed); the band reaches from
# the lowest seed to the highest. Kept groups hold both right and wrong answers: the others teach
# nothing.

# %%
PANELS = {
    "accuracy": "accuracy of what is sampled",
    "reward": "reward",
    "entropy": "entropy, nats per token",
    "response_tokens_mean": "response length, tokens",
    "kept_fraction": "share of groups kept",
    "truncated_fraction": "share cut off",
}
SHARES = ("accuracy", "kept_fraction")  # on an axis from 0 to 1


def draw_panels(titles, draw, title=""):
    """A panel for each metric, with the legend above all of them."""
    figure, axes = plt.subplots(2, 3, figsize=(11.5, 6.3), layout="constrained")
    for axis, (column, name) in zip(axes.flat, titles.items(), strict=True):
        draw(axis, column)
        axis.set(title=name, xlabel="step", xticks=range(4, 17, 4))
        axis.set_ylim((-0.03, 1.03) if column in SHARES else None)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, title=title)
    plt.show()


def over_seeds(runs, column):
    """Mean, least and largest of the seeds, by step; a seed's value is the mean of its runs."""
    by_seed = [[run.columns[column] for run in runs if run.seed == seed] for seed in range(SEEDS)]
    values = np.array([np.nanmean(of_seed, axis=0) for of_seed in by_seed])
    return np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0)


def draw_curves(sets):
    """A line with the band of its seeds for each named set of runs."""

    def draw(axis, column):
        for number, (name, (runs, style)) in enumerate(sets.items()):
            mean, low, high = over_seeds(runs, column)
            steps = np.arange(1, len(mean) + 1)
            axis.plot(steps, mean, style, color=f"C{number}", label=name)
            axis.fill_between(steps, low, high, color=f"C{number}", alpha=0.2, lw=0)

    draw_panels(PANELS, draw)


def one_switch(switch):
    on = [run for name, runs in RUNS.items() if switch in name for run in runs]
    off = [run for name, runs in RUNS.items() if switch not in name for run in runs]
    draw_curves({switch.replace("_", " "): (on, "-"), "without": (off, "--")})


for knob in KNOBS:
    one_switch(knob)

# %% [markdown]
# ## Any two combinations
#
# Set the switches; plain GRPO (all off) is drawn beside.


# %%
def compare(clip_higher=True, dynamic_sampling=True, token_level=True, overlong_punishment=True):
    states = clip_higher, dynamic_sampling, token_level, overlong_punishment
    name = measured.combined([knob for knob, on in zip(KNOBS, states, strict=True) if on])
    draw_curves({label(name): (RUNS[name], "-"), "all off": (RUNS["none"], "--")})


def play(draw):
    """The picture with a switch for each argument."""
    if os.environ.get("DAPO_NOTEBOOK_STATIC"):
        draw()
    else:
        import ipywidgets

        ipywidgets.interact(draw)


play(compare)

# %% [markdown]
# ## How plain GRPO fails here
#
# Each line is a seed, as one of them fails alone; above everything off, below everything on.
#
# - *Collapse* is real: seed 0 climbs to 0.95 and is thrown to 0 by the updates of one step. From
#   then on every group is all wrong, no group has signal, and the gradient is 0 for good: nothing
#   can bring it back. Over all 66 recorded runs none with clip-higher died so, 4 of 31 without.
# - *The share with signal vanishes*: it falls from 0.97 to a third as the policy gets good, and
#   with two groups to an update many updates see one or none. Dynamic sampling refills them, at
#   2.7 times the sampled tokens.
# - *Long wrong responses* show only in the seed that died (57 tokens, two thirds cut off).
# - *Entropy collapse* as in the paper's figure 2 does not show: entropy falls alike with and
#   without clip-higher, because the right answers of this task leave nothing to be unsure of.

# %%
FAILURES = {
    "accuracy": "accuracy of what is sampled",
    "entropy": "entropy, nats per token",
    "kept_fraction": "share of groups kept",
    "gradient_norm": "gradient norm",
    "response_tokens_wrong": "length of wrong responses",
    "truncated_fraction": "share cut off",
}


def failures(name):
    def draw(axis, column):
        for run in RUNS[name]:
            axis.plot(np.arange(1, 17), run.columns[column], ".-", label=f"seed {run.seed}")

    draw_panels(FAILURES, draw, title="everything off" if name == "none" else label(name))


failures("none")
failures("+".join(KNOBS))
