# %% [markdown]
# # What each choice does to a token
#
# Every algorithm of this package multiplies the gradient of `log p(token)` by a coefficient. This
# notebook plots that coefficient. Each picture calls the functions that training calls
# (`dapo_jax.losses`, `dapo_jax.advantages`) and differentiates them with `jax.grad`, so you see
# what a run computes.
#
# Run the cells and move the sliders; without widgets you see the pictures only.
# `docs/algorithms.md` lists the choices of every preset.

# %%
import dataclasses
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import dapo_jax
from dapo_jax import advantages, losses, overlong_punishment

plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10})
dapo, grpo, gspo = map(dapo_jax.preset, ("dapo", "grpo", "gspo"))


def panels(count, **options):
    """Return a row of axes."""
    _, axes = plt.subplots(1, count, figsize=(5.5 * count, 3.8), layout="constrained", **options)
    return axes


def play(draw, **ranges):
    """Show a picture with sliders, (from, to, step), or menus, [words], for its arguments."""
    if os.environ.get("DAPO_NOTEBOOK_STATIC"):
        draw()
        plt.show()
    else:
        import ipywidgets

        ipywidgets.interact(draw, **ranges)


def pull(algorithm, ratio, advantage, old=0.01):
    """Return the coefficient of log p(token): minus the gradient of the loss.

    Each token is a separate response, so a ratio of responses is the token's ratio. Sampler and
    trainer compute the same, and a KL to the reference is left out.
    """
    ratio, advantage = np.broadcast_arrays(np.float32(ratio), np.float32(advantage))
    shape = (1, ratio.size)
    segments = jnp.arange(ratio.size).reshape(shape) + 1
    before = jnp.full(shape, np.log(old))

    def loss(logprobs):
        factors = jnp.asarray(advantage).reshape(shape)
        ones = jnp.ones(shape)
        each = losses.policy_loss(algorithm, logprobs, before, factors, ones, segments)[0]
        if algorithm.kl == "loss" and algorithm.kl_to != "reference":  # to the policy that sampled
            kl = losses.KL_ESTIMATORS[algorithm.kl_estimator](logprobs, before)
            each += algorithm.kl_coefficient * kl
        return each.sum()

    return -np.asarray(jax.grad(loss)(before + np.log(ratio).reshape(shape))).reshape(ratio.shape)


# %% [markdown]
# ## 1. Clip-higher, in probabilities
#
# The clip bounds the *ratio* p / p_old, so a rare token has little space to grow. At 1 + 0.2, a
# token of 0.01 may reach 0.012 before its gradient is cut; at DAPO's 1 + 0.28 it may reach 0.0128.
# A token of 0.9 may reach 1: it never meets the bound. So the upper clip limits exploration, and
# little else.


# %%
def may_grow_to(algorithm, old):
    """Return the largest probability at which a token of a correct response has a gradient."""
    ratios = np.append(np.linspace(1, 2, 2001), 1 / old)
    pushed = (pull(algorithm, ratios, 1.0, old) > 0) & (ratios <= 1 / old)
    return ratios[pushed].max() * old


def clip_higher(clip_high=0.28):
    chosen = dataclasses.replace(dapo, clip_high=clip_high)
    olds = np.append(np.geomspace(0.001, 0.1, 20), np.linspace(0.11, 1, 90))
    left, right = panels(2)
    for algorithm, name in ((grpo, "GRPO, 0.2"), (chosen, f"clip_high {clip_high:g}")):
        tops = np.array([may_grow_to(algorithm, old) for old in olds])
        left.plot(olds, tops / olds, label=name)
        right.plot(olds, tops - olds, label=name)
    left.set(title="Largest p / p_old with a gradient", xscale="log", xlabel="p_old")
    right.set(title="Room to grow in one batch: p - p_old", xlabel="p_old")
    for old, place in ((0.01, "left"), (0.9, "right")):
        top = may_grow_to(chosen, old)
        left.plot(old, top / old, "ko")
        left.annotate(f"{old} to {top:.4g} ", (old, top / old - 0.01), ha=place, va="top")
    left.set_ylim(0.99)
    right.legend()


for old in (0.01, 0.1, 0.5, 0.9):
    print(f"{old:4} may grow to {may_grow_to(grpo, old):.4f} or {may_grow_to(dapo, old):.4f}")
play(clip_higher, clip_high=(0.05, 0.9, 0.01))

# %% [markdown]
# ## 2. Which tokens lose their gradient
#
# The axes are ratio and advantage, the colour is the coefficient; grey means no gradient. Two kinds
# of tokens are cut: those of correct answers that became likelier, and those of wrong answers that
# became rarer. A token of a *wrong* answer that became much likelier keeps its gradient, which
# grows with the ratio. The dual clip cuts it at `dual_clip`.


# %%
def plane(clip_low=0.2, clip_high=0.28, dual_clip=10.0):
    chosen = dataclasses.replace(dapo, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    ratios, factors = np.geomspace(0.25, 20, 300), np.linspace(-2, 2, 161)
    axes = panels(2, sharey=True)
    titles = ("GRPO", f"1 - {clip_low:g}, 1 + {clip_high:g}, dual clip {dual_clip:g}")
    for axis, algorithm, title in zip(axes, (grpo, chosen), titles, strict=True):
        values = pull(algorithm, ratios[None], factors[:, None])
        shown = np.ma.masked_where((values == 0) & (factors[:, None] != 0), values)
        axis.set_facecolor("0.65")
        axis.grid(False)
        norm = plt.matplotlib.colors.SymLogNorm(0.5, vmin=-40, vmax=40)
        colours = axis.pcolormesh(ratios, factors, shown, cmap="RdBu", norm=norm, rasterized=True)
        axis.set(title=title, xscale="log", xlabel="ratio p / p_old")
        axis.set_xticks([0.25, 0.5, 1, 2, 5, 10, 20], ["0.25", "0.5", "1", "2", "5", "10", "20"])
        axis.minorticks_off()
    axes[0].set_ylabel("advantage")
    for axis in axes:
        axis.text(5, 1, "no gradient", ha="center", va="center")
    ticks = [-30, -10, -3, -1, 0, 1, 3, 10, 30]
    plt.colorbar(colours, ax=axes, label="pull on log p", ticks=ticks, format="%g")


play(plane, clip_low=(0.0, 0.9, 0.01), clip_high=(0.0, 0.9, 0.01), dual_clip=(1.5, 20, 0.5))

# %% [markdown]
# ## 3. All methods in one picture
#
# The coefficient of a token of a correct answer (left) and of a wrong one (right), against its
# ratio; the other methods are grey. A *region* cuts the gradient if the token has moved too far: by
# its ratio (GRPO, DAPO, GSPO, GMPO), or by the change of its probability (DPPO, prime-rl, whose
# ends depend on the old probability). A *weight* keeps the gradient and bounds it (CISPO), or lets
# it fade (SAPO, VESPO). TOPR imitates correct answers at any ratio. DRO has no ratio, but a square
# that pulls back.


# %%
METHODS = (
    "reinforce grpo dapo gspo gmpo dppo_tv dppo_kl prime_rl ipo cispo sapo vespo topr dro"
).split()


def methods(method="sapo", beside="dapo", old=0.05):
    ratios = np.geomspace(1 / 16, min(16, 1 / old), 400)
    axes = panels(2)
    grey = {"color": "0.75", "lw": 1}
    styles = dict.fromkeys(METHODS, grey) | {beside: {"color": "C1", "lw": 3, "label": beside}}
    styles[method] = {"color": "C0", "lw": 3, "label": method}
    for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
        for name, style in sorted(styles.items(), key=lambda item: item[1]["lw"]):
            axis.plot(ratios, pull(dapo_jax.preset(name), ratios, advantage, old), **style)
        axis.axvline(1, color="k", lw=0.6)
        axis.set(xscale="log", xlabel="ratio p / p_old", title=f"Pull where A = {advantage:+g}")
        axis.set_xticks([0.1, 0.25, 0.5, 1, 2, 4, 10], ["0.1", "0.25", "0.5", "1", "2", "4", "10"])
        axis.minorticks_off()
    axes[0].set_ylim(-0.2, 6)
    axes[1].set_ylim(-6, 0.2)
    axes[0].legend(loc="upper left")


play(methods, method=METHODS, beside=METHODS, old=(0.005, 0.5, 0.005))

# %% [markdown]
# ## 4. How each aggregation weights responses
#
# Two groups of responses of different lengths. `token_mean` (DAPO) weights all tokens alike, so a
# long response counts more as a whole. `sequence_mean` (GRPO) weights all responses alike, so a
# token of a long response counts little, even if it rambles. The bars are fractions; the sum of all
# weights is in brackets. In one minibatch `sequence_sum` and `token_sum_over_budget` (Dr. GRPO)
# give the same fractions as `token_mean`. Their scale grows with the lengths, so a minibatch of
# long responses makes a larger step.


# %%
def aggregates(longest=256):
    tokens = np.array([16, 32, 64, longest, 24, 24, 96, 128])
    groups = np.repeat([0, 1], 4)
    left, right = panels(2)
    for number, (name, weigh) in enumerate(losses.LOSS_WEIGHTS.items()):
        if name == "pair_sum":  # for pairs of responses: twice sequence_sum
            continue
        weights = weigh(tokens, groups, 512)
        total = (weights * tokens).sum()
        places = np.arange(len(tokens)) + 0.16 * (number - 2)
        left.bar(places, weights / total * tokens.sum(), 0.16)
        right.bar(places, weights * tokens / total, 0.16, label=f"{name} ({total:.3g})")
    left.set(title="A token's weight, beside the mean token's")
    right.set(title="A response's share of all weight")
    for axis in (left, right):
        axis.set_xticks(range(len(tokens)), tokens)
        axis.axvline(3.5, color="k", lw=0.8)
        axis.set_xlabel("tokens of each response: group 1 | group 2")
    right.legend(fontsize=8)


play(aggregates, longest=(16, 512, 16))

# %% [markdown]
# ## 5. Dividing by the group's spread favours the easy and the hard
#
# A group has k correct answers out of G. GRPO and DAPO divide by the standard deviation of the
# group; Dr. GRPO only subtracts the mean. The z-score gives one correct answer among wrong ones a
# very large advantage. Compared with centring, it gives nearly solved and nearly unsolved questions
# more weight. A group with only correct or only wrong answers has no advantage either way: dynamic
# sampling drops it.


# %%
def difficulty(size=16):
    kinds = {
        "z-score, rewards ±1 (DAPO)": (advantages.normalise_in_groups, dapo),
        "centred, rewards 0 and 1 (Dr. GRPO)": (
            advantages.centre_in_groups,
            dapo_jax.preset("dr_grpo"),
        ),
    }
    counts = np.arange(size + 1)
    left, right = panels(2)
    for colour, (name, (estimate, algorithm)) in zip(("C0", "C1"), kinds.items(), strict=True):
        told = []
        for k in counts:
            rewards = np.where(
                np.arange(size) < k, algorithm.reward_correct, algorithm.reward_wrong
            )
            told.append(estimate(rewards, np.zeros(size, int)))
        told = np.array(told)
        left.plot(counts[1:], told[1:, 0], colour, label=name)
        left.plot(counts[:-1], told[:-1, -1], colour, ls="--")
        pulls = np.abs(told).mean(axis=1)
        right.plot(counts, pulls / pulls[size // 2], colour, marker=".", label=name)
    left.set(title="Advantage: right (line), wrong (dashed)", xlabel=f"right answers of {size}")
    right.set(title="Mean |advantage|, 1 at half right", xlabel=f"right answers of {size}")
    left.legend(fontsize=8)


play(difficulty, size=(4, 32, 2))

# %% [markdown]
# ## 6. Overlong responses: cut, slope or silence
#
# A response that is cut off at the limit has no answer, so it counts as wrong, however good its
# reasoning. *Soft overlong punishment* lowers the reward over the last tokens before the limit, so
# that there is a slope to learn from. *Overlong filtering* removes cut responses from the loss, but
# not from the group's mean. Below: a group of eight, of which the last two are cut, and the
# coefficient of each token.


# %%
def overlong(buffer_share=0.2):
    budget = 100
    buffer = max(1, round(buffer_share * budget))
    left, right = panels(2)
    lengths = np.arange(1, budget + 1)
    answered = np.where(lengths < budget, dapo.reward_correct, dapo.reward_wrong)
    left.plot(lengths, answered, label="rule alone")
    left.plot(lengths, answered + overlong_punishment(lengths, budget, buffer), label="with ramp")
    left.set(title="Reward where the reasoning is right", xlabel="tokens, of a budget of 100")
    left.legend(loc="lower left")

    tokens = np.array([40, 60, 85, 95, 50, 70, 100, 100])
    right_answer = np.array([1, 1, 1, 1, 0, 0, 0, 0], bool)
    one_group = np.zeros(8, int)
    rule = np.where(right_answer, dapo.reward_correct, dapo.reward_wrong)
    ramp = rule + overlong_punishment(tokens, budget, buffer)
    unfiltered, filtered = tokens, np.where(tokens < budget, tokens, 0)
    treatments = {
        "rule alone": (rule, unfiltered),
        "with ramp": (ramp, unfiltered),
        "filtering": (rule, filtered),
    }
    for number, (name, (rewards, trained)) in enumerate(treatments.items()):
        weights = losses.response_weights(dapo, trained, one_group, right_answer, budget)
        pulls = weights * advantages.normalise_in_groups(rewards, one_group)
        right.bar(np.arange(8) + 0.25 * (number - 1), 1000 * pulls, 0.25, label=name)
    marks = np.where(right_answer, "right", np.where(tokens == budget, "cut", "wrong"))
    names = [f"{n}\n{mark}" for n, mark in zip(tokens, marks, strict=True)]
    right.set_xticks(range(8), names)
    right.set(title="Pull on each token of eight responses, x 1000")
    right.legend(loc="lower left", fontsize=8)


play(overlong, buffer_share=(0.05, 1.0, 0.05))

# %% [markdown]
# ## 7. Estimators of one KL
#
# Each estimator uses the log-probs of one sampled token. The means and spreads here are exact: sums
# over a vocabulary of 50 instead of samples. k1 is unbiased and noisy. k3 is unbiased, and less
# noisy while the policies are close (up to its cap of 10 per token). k2 is biased if they are far
# apart. A *loss* uses only the gradient, and there the order differs. On policy, the mean gradient
# of k1 is zero, that of k2 is the KL's, and that of k3 is not. k3+ has the value of k3 and the
# gradient of k2.


# %%
def kl_estimators(spread=2.0):
    draws = np.random.default_rng(0)
    logits, change = spread * draws.normal(size=50), draws.normal(size=50)
    policy = jax.nn.log_softmax(jnp.asarray(logits))
    weights = jnp.exp(policy)  # of the draws: not differentiated

    def true_kl(logits, reference):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - reference))

    found = {name: [] for name in losses.KL_ESTIMATORS}
    truth = []
    for distance in np.linspace(0.1, 2.5, 13):
        reference = jax.nn.log_softmax(jnp.asarray(logits + distance * change))
        kl, wanted = jax.value_and_grad(true_kl)(jnp.asarray(logits), reference)
        truth.append(float(kl))
        for name, estimate in losses.KL_ESTIMATORS.items():
            each = estimate(policy, reference)
            mean = float(weights @ each)
            noise = float(jnp.sqrt(jnp.maximum(weights @ each**2 - mean**2, 0)))
            gradient = jax.grad(
                lambda logits, estimate=estimate, reference=reference: (
                    weights @ estimate(jax.nn.log_softmax(logits), reference)
                )
            )(jnp.asarray(logits))
            error = float(jnp.linalg.norm(gradient - wanted) / jnp.linalg.norm(wanted))
            found[name].append((mean, noise, error))
    titles = ("Mean of the estimate", "Standard deviation per token", "Error of the mean gradient")
    axes = panels(3)
    for column, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        for name, style in zip(found, ("-", "-.", "--", ":", "o-"), strict=True):
            axis.plot(truth, np.array(found[name])[:, column], style, lw=2, label=name)
        axis.set(title=title, xlabel="KL to the reference, nats")
    axes[0].plot(truth, truth, "k:", label="the KL")
    axes[2].set_ylabel("relative to the KL's gradient")
    axes[0].legend()


play(kl_estimators, spread=(0.0, 4.0, 0.5))

# %% [markdown]
# ## 8. A ratio of tokens or of responses
#
# Log-probs drift by the same small noise at every token. GRPO's ratio is per token, so its spread
# does not depend on the length of the response. GSPO's ratio is the geometric mean over the
# response, which averages the noise: hence its bounds of 3e-4 and 4e-4. It still cuts far more
# tokens, since all tokens of a response are cut together. Half of the responses here are wrong, so
# one half is the most that a bound can cut.


# %%
def sequence_ratios(drift=0.02):
    draws = np.random.default_rng(0)
    lengths = [4, 16, 64, 256, 1024]
    spreads, cut = {"token": [], "sequence": []}, {"token": [], "sequence": []}
    for n in lengths:
        changes = drift * draws.normal(size=(100, n)).astype(np.float32)
        segments, ones = jnp.ones((100, n), int), jnp.ones((100, n))
        factors = ones.at[::2].set(-1.0)  # every other response is wrong
        for name, algorithm in (("token", grpo), ("sequence", gspo)):
            _, seen = losses.policy_loss(algorithm, changes, 0 * ones, factors, ones, segments)
            spreads[name].append(np.quantile(seen["ratio"], [0.05, 0.95]))
            cut[name].append(float((seen["clipped_high"] + seen["clipped_low"]).mean()))
    left, right = panels(2)
    titles = {"token": "GRPO: a token's", "sequence": "GSPO: a response's"}
    for name, colour in (("token", "C0"), ("sequence", "C1")):
        low, high = np.array(spreads[name]).T
        left.fill_between(lengths, low, high, color=colour, alpha=0.5, label=titles[name])
        right.plot(lengths, cut[name], colour, marker="o", label=titles[name])
    left.set(title="Ratio, 5 to 95 % of tokens", xscale="log", xlabel="tokens of the response")
    right.set(title="Share of tokens without gradient", xscale="log", ylim=(-0.02, 0.55))
    right.set_xlabel("tokens of the response")
    left.legend(loc="lower right")
    right.legend(loc="center left")


play(sequence_ratios, drift=(0.005, 0.3, 0.005))

# %% [markdown]
# ## 9. GAE: how far back a reward reaches
#
# With a critic, lambda decides how much of the final reward reaches a token. Here the critic
# predicts 0 and the reward is 1, so a token's advantage *is* that fraction. A fixed 0.95 reaches
# about 60 tokens back: the first tokens of a long response get nothing. VAPO's lambda grows with
# the length, 1 - 1 / (alpha n), so the fraction depends only on the relative position. Its alpha of
# 0.05 is for thousands of tokens: below 20 tokens its lambda is 0. Early tokens learn through the
# critic, whose lambda is 1.


# %%
def gae_reach(algorithm, tokens):
    """Return the advantage of each token if the last earns 1 and the critic predicts 0."""
    feedback = advantages.gather_feedback(
        np.zeros((1, tokens), int),
        np.ones(1),
        groups=np.zeros(1, int),
        correct=np.ones(1, bool),
        values=np.zeros((1, tokens)),
    )
    return advantages.estimate(algorithm, feedback)[0][0]


def credit(fixed=0.95, alpha=0.05):
    # Whitening would hide the share.
    ppo = dataclasses.replace(dapo_jax.preset("ppo"), lambda_policy=fixed, whiten=False)
    vapo = dataclasses.replace(dapo_jax.preset("vapo"), lambda_alpha=alpha, whiten=False)
    left, right = panels(2, sharey=True)
    for tokens in (30, 100, 1000, 4000):
        place = np.linspace(0, 1, tokens)
        left.plot(place, gae_reach(ppo, tokens), label=f"{tokens} tokens")
        right.plot(place, gae_reach(vapo, tokens), label=f"{tokens} tokens")
    left.set(title=f"lambda {fixed:g}", ylabel="share of the reward that is heard")
    right.set(title=f"lambda 1 - 1 / ({alpha:g} n)")
    for axis in (left, right):
        axis.set_xlabel("place in the response")
    left.legend()


play(credit, fixed=(0.8, 1.0, 0.005), alpha=(0.02, 1.0, 0.02))

# %% [markdown]
# `3_train.ipynb` trains with all this.
