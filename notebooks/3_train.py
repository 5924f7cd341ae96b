# %% [markdown]
# # Train a policy, look inside, change one thing
#
# A small policy (0.2 M parameters) learns chains of sums modulo 10: `3+7+5=` is answered
# `3+7=0,0+5=5#### 5`. It starts from worked examples that are often wrong; DAPO then learns which
# of its answers are correct. The notebook takes a few minutes on two CPU cores, which produced the
# outputs below. It needs no change for a GPU or TPU, but has not run there yet.

# %%
import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import matplotlib.pyplot as plt
import numpy as np

import dapo_jax
from dapo_jax import advantages

plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10})
QUICK = bool(os.environ.get("DAPO_NOTEBOOK_QUICK"))  # as the tests run it: no time to learn
BASE_STEPS, STEPS, EVERY = (40, 2, 1) if QUICK else (300, 40, 5)
LESS = 4 if QUICK else 1
FOLDER = pathlib.Path("runs/notebook_quick" if QUICK else "runs/notebook")
TERMS = {"min_terms": 2, "max_terms": 4}
print(jax.devices())

# %% [markdown]
# ## A policy to begin with
#
# Supervised training writes a folder in the Hugging Face layout. A folder of any supported model
# would also do (`docs/models.md`).

# %%
recipe = dapo_jax.SftConfig(
    out=str(FOLDER / "base"),
    total_steps=BASE_STEPS,
    examples_per_step=32 // LESS,
    architecture=dapo_jax.Architecture(layers=2, embed=64),
    examples=dapo_jax.Examples(**TERMS),
    max_response_tokens=48,
    optimizer=dapo_jax.Optimizer(learning_rate=5e-3, schedule="linear", warmup_steps=5),
    packing=dapo_jax.Packing(row_tokens=128, rows_per_microbatch=16 // LESS),
)
BASE = dapo_jax.sft(recipe).path

# %% [markdown]
# ## The experiment
#
# A config is a value, and an algorithm is one of its fields. The defaults are DAPO's. An unknown
# setting raises an error that names the nearest known one.


# %%
def experiment(name, **changes):
    algorithm = dapo_jax.preset("dapo")
    for field, value in changes.items():
        setattr(algorithm, field, value)
    return dapo_jax.Config(
        run_dir=str(FOLDER / name),
        total_steps=STEPS,
        algorithm=algorithm,
        model=dapo_jax.Model(folder=BASE),
        data=dapo_jax.Data(**TERMS, max_prompt_tokens=8, heldout_problems=64 // LESS),
        rollout=dapo_jax.Rollout(16 // LESS, samples_per_prompt=16, updates_per_rollout=2),
        sampler=dapo_jax.Sampler(slots=128 // LESS, burst_tokens=8, max_response_tokens=48),
        optimizer=dapo_jax.Optimizer(learning_rate=3e-4, warmup_steps=2),
        packing=dapo_jax.Packing(row_tokens=128, rows_per_microbatch=32 // LESS),
        evaluation=dapo_jax.Evaluation(every_steps=STEPS, samples_per_problem=4, top_p=1.0),
        log=dapo_jax.Log(console=False, tensorboard=False),
    )


try:
    dapo_jax.preset("dapo").clip_hgih = 0.3
except dapo_jax.ConfigError as error:
    print(error)

# %% [markdown]
# ## Inside a group
#
# Eight responses of the untrained policy to one problem, one token per cell (`∎` ends a response).
# The colour is the surprise of the sampled token, -log p in nats: at a dark cell the response could
# have continued differently. On the left are the verdict and the advantage, which multiplies every
# token of that response: its reward compared with the rest of the group. Responses of more than 38
# tokens earn less, since the overlong punishment starts there. If all are correct, or all are
# wrong, the advantage is 0 and the group teaches nothing.


# %%
def show_group(policy, title, problem, answer, samples=8):
    (responses,) = policy.sample([problem], samples=samples)
    right = np.array([dapo_jax.is_equivalent(one.text, answer) for one in responses])
    lengths = np.array([len(one) for one in responses])
    rewards = np.where(right, 1.0, -1.0) + dapo_jax.overlong_punishment(lengths, 48, 10)
    factors = advantages.normalise_in_groups(rewards, np.zeros(samples, int))

    surprise = np.full((samples, max(map(len, responses))), np.nan)
    _, axis = plt.subplots(figsize=(11, 0.3 * samples + 1.2), layout="constrained")
    for row, response in enumerate(responses):
        surprise[row, : len(response)] = -response.sampler_logprobs
        for place, token in enumerate(response.tokens):
            text = policy.tokenizer.decode([int(token)]).replace(" ", "␣") or "∎"
            colour = "white" if surprise[row, place] > 1.8 else "black"
            size = 10 if len(text) == 1 else 6
            axis.text(place, row, text, ha="center", va="center", color=colour, fontsize=size)
    shown = axis.imshow(surprise, cmap="YlOrRd", vmin=0, vmax=3, aspect="auto")
    labels = [
        f"{'right' if v else 'wrong'}   {f:+.2f}" for v, f in zip(right, factors, strict=True)
    ]
    axis.set_yticks(range(samples), labels)
    axis.set(title=f"{title}: {problem} (right: {answer})", xlabel="token of the response")
    axis.grid(False)
    axis.xaxis.get_major_locator().set_params(integer=True)
    plt.colorbar(shown, ax=axis, label="-log p")
    plt.show()


LIMITS = {"max_prompt_tokens": 8, "max_response_tokens": 48, "slots": 8}
PROBLEM, ANSWER = "1+2+2+6=", "1"  # held out: no run trains on it
show_group(dapo_jax.Policy(BASE, **LIMITS), "before", PROBLEM, ANSWER)

# %% [markdown]
# ## Train
#
# `on_step` gets the metrics of every step (`docs/metrics.md` explains the names). If it returns
# True, the run saves and ends. The same call resumes a stopped run, and returns the result of a
# finished one at once.


# %%
def say(step, row):
    if step % EVERY == 0:
        names = ("accuracy", "entropy", "kept_fraction", "response_tokens_mean")
        print(f"step {step:3}", *(f"{name} {row[name]:.3f}" for name in names), sep="   ")


dapo = dapo_jax.train(experiment("dapo"), on_step=say)
print(dapo.summary)

# %% [markdown]
# The same problem and random keys, with the trained policy:

# %%
show_group(dapo_jax.Policy(dapo.run_dir, **LIMITS), "after", PROBLEM, ANSWER)

# %% [markdown]
# ## Change one thing
#
# The same run without dynamic sampling: groups that teach nothing stay in the batch. Put any
# field of `dapo_jax.Algorithm` here, with another name for the run.

# %%
CHANGE = {"dynamic_sampling": False}
other = dapo_jax.train(experiment("no_dynamic_sampling", **CHANGE), on_step=say)

# %%
PANELS = {
    "accuracy": "Share of right answers, as sampled",
    "entropy": "Entropy, nats per token",
    "kept_fraction": "Share of groups with signal",
    "sampled_to_kept_tokens": "Tokens sampled per token trained",
}
_, axes = plt.subplots(1, 4, figsize=(16, 3.4), layout="constrained")
for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
    for result, label in ((dapo, "dapo"), (other, str(CHANGE))):
        rows = [row for row in result.metrics.to_pylist() if row[name] is not None]
        axis.plot([row["step"] for row in rows], [row[name] for row in rows], label=label)
    axis.set(title=title, xlabel="step")
axes[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# Dynamic sampling fills batches at the price of more sampling, shown in the last picture. Here it
# samples a fifth to four fifths more; once most groups are all correct, which these steps do not
# reach, it would be far more. One seed cannot say whether accuracy is worth it: train both with
# other seeds (`config.seed`), and trust only a difference that is larger than the spread of the
# seeds.
#
# ## Score
#
# Accuracy on problems that no run has seen, with 95 % intervals over problems.

# %%
for result in (dapo, other):
    scores = dapo_jax.evaluate(str(pathlib.Path(result.run_dir) / "config.json"))
    names = ("heldout_accuracy", "heldout_accuracy_low", "heldout_accuracy_high")
    print(pathlib.Path(result.run_dir).name, *(f"{scores[name]:.3f}" for name in names))

# %% [markdown]
# ## Export, load elsewhere, sample
#
# `transformers`, vLLM and others can load the exported folder.

# %%
EXPORTED = str(dapo_jax.export(dapo.run_dir, FOLDER / "exported"))
print(sorted(path.name for path in pathlib.Path(EXPORTED).iterdir() if path.name[0] != "."))

# %%
# In a separate process, as somebody who only has the exported folder.
ELSEWHERE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
asked = tokenizer(prompt, return_tensors="pt").input_ids
model = AutoModelForCausalLM.from_pretrained(folder)
said = model.generate(asked, max_new_tokens=48, do_sample=False)
print("transformers:", tokenizer.decode(said[0, asked.shape[1] :], skip_special_tokens=True))
"""
if all(map(importlib.util.find_spec, ("torch", "transformers"))):
    command = [sys.executable, "-c", ELSEWHERE, EXPORTED, PROBLEM]
    print(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
else:
    print("torch and transformers are not installed here: the next cell alone asks the folder")

# %%
((answer,),) = dapo_jax.sample(EXPORTED, [PROBLEM], temperature=0, max_response_tokens=48)
print("dapo_jax:", answer.text)
