# %% [markdown]
# # Four switches
#
# DAPO ([2503.14476](https://arxiv.org/abs/2503.14476)) adds four switches to GRPO: clip-higher,
# dynamic sampling, the token-level loss and the soft overlong punishment. This notebook asks the
# question of each figure of the paper on a task that a laptop trains in a minute,
# `configs/two_strategies.py`. The runs are recorded; `python notebooks/measure.py` repeats them.
# The last section trains two of them here. [The ablation](../docs/ablation.md) has the tables.

# %%
import os
import pathlib
import sys

import matplotlib.pyplot as plt
import numpy as np

import dapo_jax

HERE = pathlib.Path(dapo_jax.__file__).parent.parent
if not (HERE / "notebooks/measurements").is_dir():
    raise FileNotFoundError("a wheel lacks the recorded runs: pip install -e . in a checkout")
sys.path.insert(0, str(HERE))

from configs import two_strategies  # noqa: E402
from notebooks import measure, measured  # noqa: E402
from notebooks.curves import (  # noqa: E402
    STEPS,
    TITLES,
    draw_band,
    draw_metric,
    finish,
    label,
    new_panels,
)

plt.rcParams.update({"figure.dpi": 76, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10})
KNOBS, RUNGS = measured.KNOBS, list(measured.LADDER)
names = sorted({name for name, _ in measured.PLAN})
print(len(measured.PLAN), "recorded runs,", len(names), "kinds of them")

# %% [markdown]
# ## The task: a rare strategy that is right
#
# The policy (0.15 M parameters) can answer a chain of sums in two ways. Nearly always it answers at
# once, and is mostly wrong. A few responses in a hundred work step by step: they are long and
# mostly right, unless they start over until the limit of 64 tokens cuts them off. Reinforcement
# learning has to find the rare way, as it has to find long chains of thought in a language model.

# %%
PROBLEM, ANSWER = "7+5+8+6+9=", "5"
base = dapo_jax.Policy(
    "dapo_jax:two_strategies_base", max_prompt_tokens=16, max_response_tokens=64, slots=64
)
(drawn,) = base.sample([PROBLEM], samples=40 if os.environ.get("DAPO_NOTEBOOK_QUICK") else 400)
kinds: dict[str, list] = {"at once": [], "step by step": [], "starts over": []}
for one in drawn:
    way = "starts over" if "again" in one.text else "step by step"
    kinds["at once" if one.text.startswith(measure.AT_ONCE) else way].append(one)
for kind, found in kinds.items():
    right = sum(dapo_jax.is_equivalent(one.text, ANSWER) for one in found)
    example = min((one.text for one in found), key=len, default="")
    print(f"{kind:12} {len(found):3} of {len(drawn)}, {right:2} right, such as {example}")

# %% [markdown]
# ## Does the climb reproduce?
#
# Mostly. The policy also learns without any switch. Clip-higher, the punishment, the token-level
# loss and dynamic sampling each raise the accuracy or reach it sooner. Overlong filtering is the
# only step down.


# %%
def pairs(switch, *before_and_after):
    """Curves with and without a switch, and what it adds with its 95 % interval."""
    sets = {}
    for before, after in before_and_after:
        with_it, without = measured.all_runs(after), measured.all_runs(before)
        shared = {run.seed for run in with_it} & {run.seed for run in without}
        paired = [[run for run in runs if run.seed in shared] for runs in (with_it, without)]
        print(f"{label(before)} -> {label(after)}, {len(shared)} seeds")
        for at, outcome in measured.OUTCOMES.items():
            added = measured.difference(*paired, outcome)
            print(f"    {at:15} {measured.written(added, signed=True)}")
        sets[before] = {f"with {switch}": with_it, "without": without}
    return sets


def compare_pairs(sets, columns):
    """A row of panels for each pair."""
    figure, axes = new_panels(len(sets), len(columns))
    for row, (before, runs) in zip(axes, sets.items(), strict=True):
        for axis, column in zip(row, columns, strict=True):
            draw_metric(axis, column, runs)
        row[0].set_ylabel(f"added to: {label(measured.LADDER.get(before, before))}", fontsize=8)
    finish(figure, axes[0, 0])


def ladder():
    """Accuracy of each rung, and its curve."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for height, rung in enumerate(RUNGS):
        runs, colour = measured.all_runs(rung), plt.cm.viridis(height / 6)
        found = measured.estimate(runs)
        left.plot([found.low, found.high], [height, height], color=colour, lw=6, alpha=0.35)
        left.plot([run.after.mean() for run in runs], [height] * len(runs), "o", color=colour)
        curve = np.mean([run.columns["accuracy"] for run in runs], axis=0)
        right.plot(np.arange(1, len(curve) + 1), curve, color=colour, label=rung)
    left.set_yticks(range(len(RUNGS)), RUNGS)
    left.invert_yaxis()
    left.set(title="held-out accuracy after 20 steps", xlabel="dots: seeds; bar: 95 % interval")
    right.set(title=TITLES["accuracy"], xlabel="step", xticks=STEPS)
    right.legend(fontsize=8)
    plt.show()


ladder()

# %% [markdown]
# ## Figure 2: does clip-higher raise accuracy and keep the policy exploring?
#
# Accuracy: yes, a little: the rare strategy takes off one step earlier on the ladder. Entropy: no,
# it falls alike with and without clip-higher, because a correct answer of this task leaves nothing
# uncertain.

# %%
CLIP = "2_overlong_filtering", "3_clip_higher"
clip_pairs = pairs("clip-higher", CLIP, ("token_level", "clip_higher+token_level"))
compare_pairs(clip_pairs, ("accuracy", "entropy", "working_fraction"))

# %% [markdown]
# ## Figure 3a: which tokens does the upper clip hold down?
#
# Rare ones, until the strategy takes off. In the first steps the clipped tokens have a mean
# probability near 0.1; in the paper it stays under 0.2. Here it then grows with the strategy. The
# higher bound clips fewer tokens.

# %%


def figure_3a():
    figure, (axes,) = new_panels(1, 3)
    draw_metric(axes[0], "up_clipped_probability", clip_pairs[CLIP[0]])
    old = np.linspace(0, 1, 400)
    for number, clip in enumerate((0.28, 0.2)):
        axes[0].axhline(1 / (1 + clip), color=f"C{number}", ls=":", lw=1)
        growth = np.minimum(1, old * (1 + clip)) - old
        axes[2].plot(old, growth, "--" if number else "-", color=f"C{number}")
    axes[0].set_ylim(0, 1)
    draw_metric(axes[1], "clip_fraction_high", clip_pairs[CLIP[0]])
    axes[2].set(title="most that a step lets a token gain", xlabel="probability of the token")
    finish(figure, axes[0], title="dotted: a token above this probability is never up-clipped")


figure_3a()

# %% [markdown]
# ## Figure 3b: do more and more groups teach nothing?
#
# Yes: the fraction of groups with only correct answers grows with the policy, as in the paper. At
# the start two groups in three have only wrong answers, so the fraction that is kept first rises
# and then falls.

# %%


def figure_3b():
    figure, (axes,) = new_panels(1, 3)
    sets = {rung: measured.all_runs(rung) for rung in ("5_token_level", "1_naive")}
    for axis, column in zip(axes, ("all_right_fraction", "kept_fraction", "accuracy"), strict=True):
        draw_metric(axis, column, sets)
    finish(figure, axes[0])


figure_3b()

# %% [markdown]
# ## Figure 4: does the token-level loss hold long wrong responses back?
#
# Yes: with it the policy takes off sooner, ends with a lower entropy, and fewer responses are cut
# off. A long response then counts by its tokens, whether it is right or repeats itself. The mean
# per sequence gives it no more weight than an immediate answer.

# %%
token_pairs = pairs(
    "token-level loss", ("4_overlong_punishment", "5_token_level"), ("none", "token_level")
)
compare_pairs(token_pairs, ("entropy", "response_tokens_mean", "truncated_fraction", "accuracy"))

# %% [markdown]
# ## Figure 5: does hiding the responses that were cut off help?
#
# No, here it costs accuracy. Responses that are cut off repeat themselves and would never have
# reached an answer. Without a loss they are never unlearned, and their fraction and the entropy
# rise.

# %%
filtered = pairs("overlong filtering", ("1_naive", "2_overlong_filtering"))
compare_pairs(filtered, ("accuracy", "entropy", "truncated_fraction"))

# %% [markdown]
# ## Figure 6: does dynamic sampling pay for its samples?
#
# In steps and updates, yes: it is ahead at every step from the fifth on. In sampled tokens, no: up
# to an accuracy of 0.7 it needs more of them, since it drops two groups in three at the start.

# %%


def figure_6():
    sets = pairs("dynamic sampling", ("5_token_level", "6_dynamic_sampling"))["5_token_level"]
    figure, (axes,) = new_panels(1, 3)
    draw_metric(axes[0], "accuracy", sets)
    draw_metric(axes[2], "kept_fraction", sets)
    for number, (name, runs) in enumerate(sets.items()):
        spent = [run.columns["sampled_tokens"].cumsum() / 1000 for run in runs]
        grid = np.linspace(0, min(one[-1] for one in spent), 200)
        values = [
            np.interp(grid, one, run.columns["accuracy"])
            for one, run in zip(spent, runs, strict=True)
        ]
        draw_band(axes[1], grid, values, name, f"C{number}", "-" if number == 0 else "--")
        mean = np.mean(values, axis=0)
        where = {goal: np.interp(goal, mean, grid) for goal in (0.25, 0.5, 0.7)}
        said = ", ".join(f"{goal} after {tokens:.0f}" for goal, tokens in where.items())
        print(f"{name + ':':24} {said} thousand tokens")
    axes[1].set(title=TITLES["accuracy"], xlabel="thousand tokens sampled", ylim=(-0.03, 1.03))
    finish(figure, axes[0])


figure_6()

# %% [markdown]
# ## Figure 7: what does a whole run of DAPO look like?
#
# Length and reward rise together, as in the paper. Entropy falls and the mean probability rises
# throughout, while the paper's entropy recovers. This task has one right way of working, and
# nothing to explore beyond it.

# %%
WHOLE = "response_tokens_mean", "reward", "entropy", "mean_probability"


def whole_runs(*rungs):
    figure, (axes,) = new_panels(1, 4)
    for axis, column in zip(axes, WHOLE, strict=True):
        draw_metric(axis, column, {rung: measured.all_runs(rung) for rung in rungs})
    finish(figure, axes[0])


whole_runs("6_dynamic_sampling", "1_naive")

# %% [markdown]
# ## Do length and accuracy grow together?
#
# With all switches off, not at first: responses grow to the limit before they become right, because
# those that start over grow too. DAPO goes straight from short and wrong to long and right. Each
# line is a seed. At the start one response in twenty used the strategy.

# %%


def together():
    figure, (axes,) = new_panels(1, 3)
    for axis, rung in zip(axes, ("1_naive", "3_clip_higher", "6_dynamic_sampling"), strict=True):
        for run in measured.all_runs(rung):
            x, y = run.columns["response_tokens_mean"], run.columns["accuracy"]
            axis.plot(x, y, color="0.8", lw=1, zorder=1)
            dots = axis.scatter(x, y, c=np.arange(1, len(x) + 1), s=14, zorder=2)
        axis.set(title=rung, xlabel="response length, tokens", xlim=(0, 50), ylim=(0, 1))
    axes[0].set_ylabel("accuracy of what is sampled")
    figure.colorbar(dots, ax=axes, label="step", ticks=STEPS)
    plt.show()


together()

# %% [markdown]
# ## When does the rare strategy take off?
#
# The seeds of a rung differ by a step or two, so the switch matters more than luck. Seeds whose
# first step has more responses with the strategy tend to take off sooner.

# %%


def take_offs():
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for height, rung in enumerate(RUNGS):
        runs, colour = measured.all_runs(rung), plt.cm.viridis(height / 6)
        steps = [run.take_off or np.nan for run in runs]
        left.plot(steps, height + np.linspace(-0.2, 0.2, len(runs)), "o", color=colour)
        left.plot(np.nanmean(steps), height, "|", color="k", ms=22)
        first = [run.columns["working_fraction"][0] for run in runs]
        right.plot(first, steps + np.full(len(steps), 0.07 * height), "o", color=colour)
    left.set_yticks(range(len(RUNGS)), RUNGS)
    left.invert_yaxis()
    left.set(title="step of take-off; line: mean", xlabel="step")
    right.set(title="beside the first step", xlabel="share that works in step 1", ylabel="step")
    for axis in (left.xaxis, right.yaxis):
        axis.get_major_locator().set_params(integer=True)
    centred = []
    for rung in RUNGS:
        runs = [run for run in measured.all_runs(rung) if run.take_off]
        both = np.array([(run.columns["working_fraction"][0], run.take_off) for run in runs])
        centred.append(both - both.mean(axis=0))
    correlation = np.corrcoef(np.concatenate(centred).T)[0, 1]
    print(f"correlation of the two within a rung: {correlation:+.2f}")
    plt.show()


take_offs()

# %% [markdown]
# ## All sixteen combinations
#
# Held-out accuracy after 20 steps: a dot is a seed, a bar is the 95 % interval that resamples seeds
# and problems. Five seeds make such intervals too narrow, so look at the dots.

# %%


def all_combinations():
    order = sorted(measured.COMBINATIONS, key=lambda n: measured.estimate(measured.runs(n)).value)
    _, axis = plt.subplots(figsize=(10, 5.2), layout="constrained")
    for height, name in enumerate(order):
        runs, colour = measured.runs(name), "C0" if "clip_higher" in name else "C1"
        found = measured.estimate(runs)
        axis.plot([found.low, found.high], [height, height], colour, lw=6, alpha=0.25)
        axis.plot([run.after.mean() for run in runs], [height] * len(runs), "o", color=colour)
    axis.set_yticks(range(len(order)), map(label, order), fontsize=8)
    axis.set(title="blue: with clip-higher", xlabel="held-out accuracy")
    plt.show()


all_combinations()

# %% [markdown]
# ## What each switch adds, alone and with another
#
# A switch's effect is the mean with it minus the mean without it, over all states of the others.
# The interaction of two, below, is half of what one adds with the other, minus half of what it adds
# without. Grey intervals contain 0. The token-level loss and dynamic sampling add most, clip-higher
# a little. The punishment adds nothing on average: it helps if the token-level loss is off and
# costs if it is on, since both shorten what is too long.

# %%


def effects():
    rows = [(knob,) for knob in KNOBS]
    rows += [(one, other) for place, one in enumerate(KNOBS) for other in KNOBS[place + 1 :]]
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
    for axis, (name, outcome) in zip(axes, measured.OUTCOMES.items(), strict=True):
        for height, switches in enumerate(rows):
            found = measured.contrast(switches, outcome)
            clear = found.low > 0 or found.high < 0
            colour = ("C0" if found.value > 0 else "C3") if clear else "0.6"
            axis.plot([found.low, found.high], [height, height], color=colour, lw=4, alpha=0.5)
            axis.plot(found.value, height, "o", color=colour)
        axis.axvline(0, color="k", lw=1)
        axis.set(title=f"accuracy{'' if name == 'accuracy' else ' ' + name}", xlabel="difference")
    axes[0].set_yticks(range(len(rows)), [label(" x ".join(row)) for row in rows], fontsize=8)
    axes[0].invert_yaxis()
    plt.show()


effects()

# %% [markdown]
# ## Any two combinations
#
# Set the switches to compare with plain GRPO (all off).

# %%
PANELS = "accuracy reward entropy response_tokens_mean kept_fraction truncated_fraction".split()


def draw_panels(sets):
    figure, axes = new_panels(2, 3)
    for axis, column in zip(axes.flat, PANELS, strict=True):
        draw_metric(axis, column, sets)
    finish(figure, axes[0, 0])


def compare(clip_higher=True, dynamic_sampling=True, token_level=True, overlong_punishment=True):
    states = clip_higher, dynamic_sampling, token_level, overlong_punishment
    name = measured.combined([knob for knob, on in zip(KNOBS, states, strict=True) if on])
    draw_panels({label(name): measured.runs(name), "all off": measured.runs("none")})


def play(draw):
    """The picture with a switch for each argument."""
    if os.environ.get("DAPO_NOTEBOOK_STATIC"):
        draw()
    else:
        import ipywidgets

        ipywidgets.interact(draw)


play(compare)

# %% [markdown]
# ## Train two of them here
#
# These are the first steps of the recorded runs, with another seed and no evaluations. Ten steps
# are enough to see which run takes off first. Set `LIVE_STEPS` to 20 for all steps, and replace the
# two names by any of the page. A finished run is not repeated.

# %%
QUICK = bool(os.environ.get("DAPO_NOTEBOOK_QUICK"))  # as the tests run it: no time to learn
LIVE_STEPS = 1 if QUICK else 10
FOLDER = pathlib.Path("runs/notebook_switches_quick" if QUICK else "runs/notebook_switches")


def say(step, row):
    if step % 5 == 0:
        names = ("accuracy", "entropy", "response_tokens_mean", "kept_fraction")
        print(f"step {step:3}", *(f"{name} {row[name]:.3f}" for name in names), sep="   ")


def train(name, seed=0):
    config = two_strategies.get_config(name)
    config.run_dir, config.seed = str(FOLDER / f"{name}_seed{seed}"), seed
    config.data.heldout_problems, config.log.console = 0, False
    config.total_steps = LIVE_STEPS
    if QUICK:
        config.rollout = dapo_jax.Rollout(4, samples_per_prompt=8, updates_per_rollout=2)
        config.sampler.slots, config.compute.scan_unroll = 32, 1
    print(name)
    rows = dapo_jax.train(config, on_step=say).metrics.to_pylist()
    kept = [measure.kept_row(row) for row in rows if row["step"] > 0]
    columns = {key: np.array([row[key] for row in kept], float) for key in kept[0]}
    return measured.Run(name, seed, columns, np.zeros(0), np.zeros(0))


draw_panels({name: [train(name)] for name in ("6_dynamic_sampling", "1_naive")})
