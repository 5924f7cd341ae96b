"""Curves of recorded runs: metrics by step, as means over seeds with the band that they span."""

import matplotlib.pyplot as plt
import numpy as np

STEPS = range(0, 21, 5)
SHARES = ("accuracy", "kept_fraction", "all_right_fraction", "working_fraction")
TITLES = {
    "accuracy": "accuracy of what is sampled",
    "reward": "reward",
    "entropy": "entropy, nats per token",
    "response_tokens_mean": "response length, tokens",
    "response_tokens_right": "length of right responses",
    "response_tokens_wrong": "length of wrong responses",
    "kept_fraction": "share of groups kept",
    "all_right_fraction": "share of groups all right",
    "truncated_fraction": "share cut off",
    "mean_probability": "mean probability of a token",
    "up_clipped_probability": "probability of up-clipped tokens",
    "clip_fraction_high": "share of tokens up-clipped",
    "working_fraction": "share that works step by step",
}


def column_of(run, column):
    """A metric by step; NaN where no token was clipped that could have had a probability."""
    values = run.columns[column]
    clipped = run.columns["clip_fraction_high"] > 0
    return np.where(clipped, values, np.nan) if column == "up_clipped_probability" else values


def draw_band(axis, x, values, label, colour, style="-"):
    """Mean of the seeds, with a band from the least to the largest."""
    values = np.ma.masked_invalid(values)
    axis.plot(x, values.mean(axis=0), style, color=colour, label=label)
    low, high = values.min(axis=0), values.max(axis=0)
    axis.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)


def draw_metric(axis, column, sets):
    """A metric by step, for each named set of runs."""
    for number, (name, runs) in enumerate(sets.items()):
        values = [column_of(run, column) for run in runs]
        steps = np.arange(1, len(values[0]) + 1)
        draw_band(axis, steps, values, name, f"C{number}", "-" if number == 0 else "--")
    axis.set(title=TITLES[column], xlabel="step", xticks=STEPS)
    axis.set_ylim((-0.03, 1.03) if column in SHARES else None)


def new_panels(rows, columns):
    size = (3.7 * columns, 2.9 * rows + 0.3)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def finish(figure, axis, title=""):
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside upper center", ncols=6, title=title
    )
    plt.show()


def label(name):
    return "none" if name == "none" else name.replace("+", " + ").replace("_", " ")
