"""Times a DAPO step of configs/smollm2.py beside TRL's, and compares the two gradients.

    python tests/benchmarks/real_model.py --trl V/bin/python
    python tests/benchmarks/real_model.py --trl V/bin/python --learn 12

Both libraries start from the same folder and take the same prompts, samples per prompt, updates
per rollout, response limit, learning rate and optimizer, in float32 and without dynamic sampling,
which TRL does not have. A response ends where the policy ends it. The gradient is that of the
first minibatch that dapo_jax sampled; TRL computes it from the same tokens and advantages.

`--learn N` trains N steps instead, ours with dynamic sampling as in the config, and `--rounds`
seeds. It prints seconds of training, and the accuracy on held-out problems that `dapo-jax evaluate`
finds of either policy.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import bench

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "smollm2.py"
BATCH, GRADIENT = "batch.json", "gradient"
PARTS = ["rollout", "update", "step"]
EVERY = 3  # steps between evaluations of --learn
GOAL = 0.6  # held-out accuracy
WARM_UP = 2  # steps before the timed ones: dapo_jax compiles its update for two lengths of rows


def peak_gib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def print_line(**values: Any) -> None:
    print(json.dumps(values), file=sys.__stdout__, flush=True)


class Ours:
    """dapo_jax with the words config; writes the batch that TRL computes again."""

    def __init__(self, args: Any):
        from dapo_jax.config.experiment import Config
        from dapo_jax.config.files import read_config

        self.args = args
        config = read_config(Config, f"{CONFIG}:words")
        self.config = dataclasses.replace(
            config,
            seed=args.seed,
            algorithm=dataclasses.replace(config.algorithm, dynamic_sampling=False),
            lora=dataclasses.replace(config.lora, rank=0),
            model=dataclasses.replace(config.model, folder=args.model),
            rollout=dataclasses.replace(
                config.rollout,
                prompts_per_step=args.prompts,
                samples_per_prompt=args.group,
                updates_per_rollout=args.updates,
            ),
            sampler=dataclasses.replace(config.sampler, max_response_tokens=args.new_tokens),
            optimizer=dataclasses.replace(config.optimizer, learning_rate=args.learning_rate),
        )

    def measure(self) -> None:
        """Time steps; write prompts, and tokens, advantages and gradient of the first minibatch."""
        from dapo_jax.learner.update import LearnerStates
        from dapo_jax.rollout.source import SourceState
        from dapo_jax.run.build import build
        from dapo_jax.step import TrainerState

        with contextlib.closing(build(self.config)) as parts:
            self.write_rows(parts.prompts)
            policy = parts.learners.policy.start(parts.first_params())
            state = TrainerState(0, LearnerStates(policy), SourceState(kept_fraction=1.0))
            for step in range(self.args.repeats + WARM_UP):
                state, values, record = self.step(parts, state)
                if step == 0:
                    self.write_gradient(parts, record)
                if step >= WARM_UP:
                    print_line(**values)
        print_line(peak_gib=peak_gib())

    @staticmethod
    def step(parts: Any, state: Any) -> tuple[Any, dict[str, float], Any]:
        import jax

        from dapo_jax.run import metrics
        from dapo_jax.runtime.clock import Clock
        from dapo_jax.step import train_step

        clock = Clock()
        with clock.running():
            state, record = train_step(parts.trainer(), state)
            jax.block_until_ready(state.learners.policy)
        values = metrics.measure(parts.config, record, clock)
        seconds = {"rollout": values["seconds_rollout"], "step": values["seconds_step"]}
        seconds["update"] = seconds["step"] - seconds["rollout"]
        tokens = sum(len(c.tokens) for group in record.rollouts.groups for c in group.completions)
        return state, seconds | {"tokens": tokens}, record

    def write_rows(self, prompts: Any) -> None:
        """Write training prompts for TRL."""
        steps = max(self.args.learn, self.args.repeats + WARM_UP)
        rows = [next(prompts) for _ in range(self.args.prompts * steps)]
        texts = [{"prompt": row.text, "answer": row.answer} for row in rows]
        (self.args.work / "rows.json").write_text(json.dumps(texts))

    def learn(self) -> None:
        """Train `--learn` steps; print seconds and held-out accuracy after each evaluation."""
        from dapo_jax.run.build import build

        with contextlib.closing(build(self.config)) as parts:
            self.write_rows(parts.prompts)
        run, steps = self.args.work / "ours", self.args.learn
        flags = [f"--config.run_dir={run}", f"--config.model.folder={self.args.model}"]
        flags += [f"--config.total_steps={steps}", f"--config.evaluation.every_steps={EVERY}"]
        flags += [f"--config.seed={self.args.seed}"]
        bench.command("train", f"--config={CONFIG}:words", *flags)
        seconds = 0.0
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            seconds += row.get("seconds_step", 0.0)
            if "heldout_accuracy" in row:
                print_line(step=row["step"], seconds=seconds, accuracy=row["heldout_accuracy"])

    def write_gradient(self, parts: Any, record: Any) -> None:
        from dapo_jax.learner.packing import take_tokens
        from dapo_jax.model import save_huggingface

        update, segments = record.updates[0], record.minibatches.segments[0]
        policy = parts.learners.policy
        params = policy.start(parts.first_params()).params
        gradient = policy.differentiate(params, update.batch, update.microbatches)[0]
        save_huggingface.save_folder(self.args.work / GRADIENT, gradient, parts.decoder, (2,))
        advantages = take_tokens(record.advantages, record.minibatches.rollouts.response_index)
        responses = [
            {
                "prompt": segment.prompt.tokens.tolist(),
                "response": segment.completion.tokens.tolist(),
                "advantage": float(advantages[segment.index][0]),
            }
            for segment in segments
        ]
        (self.args.work / BATCH).write_text(json.dumps(responses))


class Trl:
    """TRL's GRPOTrainer with the same sizes; needs torch, trl and safetensors, not dapo_jax."""

    def __init__(self, args: Any):
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self.args = args
        self.rows = json.loads((args.work / "rows.json").read_text())

    @staticmethod
    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        """Return 1 if the number after the last `####` is the answer, else -1."""
        numbers = [re.findall(r"####\s*(-?\d+)", text) for text in completions]
        pairs = zip(numbers, answer, strict=True)
        return [1.0 if numbers[-1:] == [right] else -1.0 for numbers, right in pairs]

    def make_trainer(self, steps: int) -> Any:
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        args = self.args
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            loss_type="dapo",
            epsilon_high=0.28,
            beta=0.0,
            num_generations=args.group,
            max_completion_length=args.new_tokens,
            per_device_train_batch_size=args.prompts * args.group // args.updates,
            steps_per_generation=args.updates,
            gradient_accumulation_steps=1,
            max_steps=steps * args.updates,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            temperature=1.0,
            top_k=0,
            seed=args.seed,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        return GRPOTrainer(
            model=args.model,
            reward_funcs=self.reward,
            args=config,
            train_dataset=Dataset.from_list(self.rows),
            processing_class=tokenizer,
        )

    def timed_steps(self, trainer: Any, after_step: Callable[[int, float], None]) -> None:
        """Train; call `after_step` with the rollout step and the seconds of its rollout."""
        from transformers import TrainerCallback

        spent, updates = [0.0], self.args.updates
        generate = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            started = time.perf_counter()
            batch = generate(inputs)
            spent[0] = time.perf_counter() - started
            return batch

        class Clock(TrainerCallback):
            def on_step_end(self, _, state: Any, *__: Any, **___: Any) -> None:
                if state.global_step % updates == 0:
                    after_step(state.global_step // updates, spent[0])

        trainer._generate_and_score_completions = timed
        trainer.add_callback(Clock())
        trainer.train()

    def measure(self) -> None:
        """Compute the gradient of the batch of `Ours`, then time steps."""
        trainer = self.make_trainer(self.args.repeats + WARM_UP)
        self.write_gradient(trainer)
        last = [time.perf_counter()]

        def after_step(step: int, rollout: float) -> None:
            now = time.perf_counter()
            if step > WARM_UP:
                whole = now - last[0]
                print_line(rollout=rollout, update=whole - rollout, step=whole)
            last[0] = now

        self.timed_steps(trainer, after_step)
        print_line(peak_gib=peak_gib())

    def learn(self) -> None:
        """Train `--learn` steps; print seconds, and the folder of the policy every few steps."""
        trainer, seconds, last = self.make_trainer(self.args.learn), 0.0, time.perf_counter()

        def after_step(step: int, _: float) -> None:
            nonlocal seconds, last
            seconds += time.perf_counter() - last
            if step % EVERY == 0 or step == self.args.learn:
                folder = str(self.args.work / f"trl_{step}")
                trainer.save_model(folder)
                print_line(step=step, seconds=seconds, folder=folder)
            last = time.perf_counter()

        self.timed_steps(trainer, after_step)

    def write_gradient(self, trainer: Any) -> None:
        import torch
        from safetensors.torch import save_file

        rows = json.loads((self.args.work / BATCH).read_text())
        prompts = max(len(row["prompt"]) for row in rows)
        width = max(len(row["response"]) for row in rows)

        def padded(name: str, width: int, left: bool) -> tuple[Any, Any]:
            tokens = torch.zeros(len(rows), width, dtype=torch.long)
            mask = torch.zeros(len(rows), width, dtype=torch.long)
            for i, row in enumerate(rows):
                count = len(row[name])
                place = slice(width - count, width) if left else slice(count)
                tokens[i, place] = torch.tensor(row[name])
                mask[i, place] = 1
            return tokens, mask

        prompt_ids, prompt_mask = padded("prompt", prompts, left=True)
        completion_ids, completion_mask = padded("response", width, left=False)
        model = trainer.model.train()
        trainer.current_gradient_accumulation_steps = self.args.updates  # one window: the batch
        batch = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor([row["advantage"] for row in rows]),
            "num_items_in_batch": completion_mask.sum(),
        }
        trainer.compute_loss(model, batch).backward()
        gradient = {name: leaf.grad for name, leaf in model.named_parameters()}
        (self.args.work / "trl").mkdir(exist_ok=True)
        save_file(gradient, self.args.work / "trl" / "model.safetensors")
        model.zero_grad(set_to_none=True)


def run_side(args: Any, side: str, python: str) -> list[dict]:
    """Run a side in a process of its own; return the lines that it prints."""
    settings = [f"--{name}={value}" for name, value in vars(args).items() if value]
    return bench.json_lines([python, __file__, *settings, f"--side={side}"])


def gradient_difference(work: pathlib.Path) -> tuple[float, float]:
    """Return the norm of the difference of the gradients over the norm of ours, and the cosine."""
    import numpy as np
    from safetensors.numpy import load_file

    ours = load_file(work / GRADIENT / "model.safetensors")
    theirs = load_file(work / "trl" / "model.safetensors")
    missing = set(ours) ^ set(theirs)
    if missing:
        raise SystemExit(f"parameters of one side only: {sorted(missing)[:5]}")
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in ours.values()))
    squares = sum(np.sum(np.square(ours[n] - theirs[n], dtype=np.float64)) for n in ours)
    return float(np.sqrt(squares) / norm), float(norm)


def compare(args: Any) -> None:
    """Measure both sides in turn, `--rounds` times; print tables and the gradients' difference."""
    sides = {"dapo_jax": ("ours", sys.executable)} | (
        {"TRL": ("trl", args.trl)} if args.trl else {}
    )
    rounds: list[dict[str, list[dict]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            args.work = pathlib.Path(folder) / str(args.seed)
            args.work.mkdir()
            lines = {name: run_side(args, side, python) for name, (side, python) in sides.items()}
            print_line(**lines)
            rounds.append(lines)
            args.seed += 1
        if args.learn:
            print_learning(rounds, args.seed - args.rounds)
            return
        print_seconds(rounds)
        if args.trl:
            difference, norm = gradient_difference(args.work)
            print(f"gradient: norm {norm:.4f}, relative difference {difference:.1e}")


def print_seconds(rounds: list[dict[str, list[dict]]]) -> None:
    """Print medians over the rounds, and TRL's seconds over ours in each round."""
    sides = list(rounds[0])
    heads = ["TRL / dapo_jax (rounds)"] if len(sides) > 1 else []
    bench.print_table(["part", *(f"{side}, s" for side in sides), *heads])
    for part in PARTS:
        seconds = [[median(lines[side], part) for lines in rounds] for side in sides]
        cells = [f"{statistics.median(values):.2f}" for values in seconds]
        if len(sides) > 1:
            ratios = [theirs / own for own, theirs in zip(*seconds, strict=True)]
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            cells.append(f"{statistics.median(ratios):.2f} ({each})")
        bench.print_row([part, *cells])
    peaks = [max(lines[side][-1]["peak_gib"] for lines in rounds) for side in sides]
    bench.print_row(["peak memory, GiB", *peaks, *("" for _ in heads)])


def median(lines: list[dict], part: str) -> float:
    return statistics.median(line[part] for line in lines if part in line)


def accuracy(folder: str, seed: int) -> float:
    """Return the accuracy of a policy on the held-out problems of the config."""
    flags = [f"--model={folder}", f"--config.run_dir={folder}_scores", f"--config.seed={seed}"]
    printed = bench.command("evaluate", f"--config={CONFIG}:words", *flags)
    return json.loads(printed.splitlines()[-1])["heldout_accuracy"]


def print_learning(rounds: list[dict[str, list[dict]]], first_seed: int) -> None:
    """Print accuracies by seconds, and the seconds after which each side has `GOAL`."""
    bench.print_table(["library", "seed", "step", "seconds", "held-out accuracy"])
    reached: dict[str, list[str]] = {}
    for seed, lines in enumerate(rounds, first_seed):
        for side, rows in lines.items():
            scores = [
                row["accuracy"] if "accuracy" in row else accuracy(row["folder"], seed)
                for row in rows
            ]
            for row, score in zip(rows, scores, strict=True):
                bench.print_row([side, seed, row["step"], f"{row['seconds']:.1f}", f"{score:.3f}"])
            there = [
                row["seconds"] for row, score in zip(rows, scores, strict=True) if score >= GOAL
            ]
            reached.setdefault(side, []).append(f"{there[0]:.0f}" if there else "never")
    for side, seconds in reached.items():
        print(f"{side}: seconds to {GOAL}: {', '.join(seconds)}")


def read_arguments() -> Any:
    return bench.read_arguments(
        __doc__,
        model="runs/smollm2_base",
        trl="",  # a Python with TRL
        side="",
        work="",
        rounds=1,
        seed=0,  # of the first round; each has its own
        repeats=3,
        learn=0,
        prompts=8,
        group=8,
        updates=2,
        new_tokens=40,
        learning_rate=1e-5,
    )


def main() -> None:
    args = read_arguments()
    if not args.side:
        compare(args)
        return
    args.work = pathlib.Path(args.work)
    with contextlib.redirect_stdout(sys.stderr):  # what a library prints looks like JSON
        side = {"ours": Ours, "trl": Trl}[args.side](args)
        side.learn() if args.learn else side.measure()


if __name__ == "__main__":
    main()
