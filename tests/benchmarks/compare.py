"""Runs our benchmark and TRL's in turn, several rounds, and prints one table.

    python tests/benchmarks/compare.py --rounds 3 --workload uniform real --trl V/bin/python

Interleaved, because a shared machine's speed drifts: a ratio is taken inside a round, and the
median over rounds is what to quote. TRL decodes static batches, which run until their longest row
is done: beside the 512 responses of `real` (ours.py has their law) stand eight of its uniform
batches of 64 at 512 new tokens. A ratio is of seconds for the same responses.

`--workload smollm2` compares a real model's whole step with TRL's (real_model.py).

`V/bin/python compare.py --peer` times TRL alone, in an environment without dapo_jax (README.md:
which packages), in float32, responses as long as asked:

- rollout: `generate` of transformers.
- update: DAPO's loss, backward, clipped gradient and AdamW, the batch at once.
- step: `GRPOTrainer.train`.
"""

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import bench

# The model and the batch of ours.py's `uniform`.
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 512, 256, 4, 4, 2, 1024
PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 32
RESPONSES = PROMPTS * GROUP
PAD, END = 0, 1
REAL_MODEL = __file__.replace("compare.py", "real_model.py")
BENCHES = ["rollout", "update", "step"]
PACKAGES = "torch", "trl", "transformers"
# New tokens of TRL's responses, and batches of 64 for all of them.
TRLS_SIZES = {"uniform": (128, 1), "real": (512, 8), "smoke": (32, 1)}


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of `repeats` calls and of one before them."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


class Trl:
    """TRL's GRPOTrainer on all cores, without checkpointing of activations."""

    def __init__(self, new_tokens: int):
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self.new_tokens = new_tokens
        self.prompts = self.random_tokens(PROMPTS, PROMPT_TOKENS).repeat_interleave(GROUP, 0)

    @staticmethod
    def random_tokens(rows: int, columns: int):
        import torch

        generator = torch.Generator().manual_seed(0)
        return torch.randint(2, VOCAB, (rows, columns), generator=generator)

    @staticmethod
    def make_model():
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            eos_token_id=END,
            bos_token_id=None,
        )
        return Qwen2ForCausalLM(config)

    @staticmethod
    def make_tokenizer():
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, "t2"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        named = {"pad_token": "t0", "eos_token": "t1", "unk_token": "t2"}
        return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **named)

    def make_trainer(self, steps: int, callbacks=None):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        prompts = self.random_tokens(PROMPTS * steps, PROMPT_TOKENS).tolist()
        rows = [" ".join(f"t{token}" for token in row) for row in prompts]
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            loss_type="dapo",
            epsilon_high=0.28,
            num_generations=GROUP,
            max_completion_length=self.new_tokens,
            generation_kwargs={"min_new_tokens": self.new_tokens},
            per_device_train_batch_size=RESPONSES,
            max_steps=steps,
            learning_rate=1e-5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
        )
        return GRPOTrainer(
            model=self.make_model(),
            reward_funcs=lambda completion_ids, **_: [
                float(sum(ids) % 2) for ids in completion_ids
            ],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": rows}),
            processing_class=self.make_tokenizer(),
            callbacks=callbacks,
        )

    def rollout(self, repeats: int) -> list[float]:
        import torch
        from transformers import GenerationConfig

        model = self.make_model().eval()
        law = GenerationConfig(
            max_new_tokens=self.new_tokens,
            min_new_tokens=self.new_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=PAD,
            eos_token_id=END,
        )

        @torch.no_grad()
        def rollout():
            mask = torch.ones_like(self.prompts)
            out = model.generate(self.prompts, attention_mask=mask, generation_config=law)
            assert out.shape[1] == PROMPT_TOKENS + self.new_tokens

        return timed(rollout, repeats)

    def update(self, repeats: int) -> list[float]:
        import torch

        trainer = self.make_trainer(1)
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
        model, optimizer = trainer.model.train(), trainer.optimizer
        responses = self.random_tokens(RESPONSES, self.new_tokens)
        batch = {
            "prompt_ids": self.prompts,
            "prompt_mask": torch.ones_like(self.prompts),
            "completion_ids": responses,
            "completion_mask": torch.ones_like(responses),
            "advantages": torch.randn(RESPONSES),
            "num_items_in_batch": torch.tensor(responses.numel()),
        }

        def update():
            trainer.compute_loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return timed(update, repeats)

    def step(self, repeats: int) -> list[float]:
        from transformers import TrainerCallback

        ends: list[float] = []

        class Clock(TrainerCallback):
            def on_train_begin(self, *_, **__):
                ends.append(time.perf_counter())

            on_step_end = on_train_begin

        self.make_trainer(repeats + 1, [Clock()]).train()
        return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def time_peer(args: argparse.Namespace) -> None:
    """Print a JSON line per measurement of TRL, the first call, which warms up, apart."""
    logging.disable(logging.WARNING)
    peer = Trl(args.new_tokens)
    for name in args.only:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints looks like JSON
            first, *seconds = getattr(peer, name)(args.repeats)
        line = {
            "bench": name,
            "median_s": round(statistics.median(seconds), 4),
            "all_s": [round(second, 4) for second in seconds],
            "first_call_s": round(first, 2),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        }
        print(json.dumps(line), flush=True)


def measure_round(args: argparse.Namespace, workload: str) -> dict:
    """Return our lines, and TRL's seconds for the same responses."""
    new_tokens, batches = TRLS_SIZES[workload]
    common = ["--repeats", str(args.repeats), "--only", *args.only]
    command = [sys.executable, __file__.replace("compare.py", "ours.py"), "--workload", workload]
    lines = {"dapo_jax": {line["bench"]: line for line in bench.json_lines([*command, *common])}}
    if args.trl:
        command = [args.trl, __file__, "--peer", "--new_tokens", str(new_tokens)]
        measured = bench.json_lines([*command, *common])
        lines["TRL"] = {line["bench"]: batches * line["median_s"] for line in measured}
    print(json.dumps(lines | {"workload": workload}), flush=True)
    return lines


def cells(rounds: list[dict], name: str) -> list[str]:
    """Return medians over the rounds, and the ratio of each round."""
    median = statistics.median
    own = [lines["dapo_jax"][name] for lines in rounds]
    made = [f"{median(line['tokens_per_s'] for line in own):,.0f}"]
    made.append(f"{median(line['median_s'] for line in own):.2f}")
    if theirs := [lines["TRL"][name] for lines in rounds if "TRL" in lines]:
        made.append(f"{median(theirs):.2f}")
        ratios = [seconds / line["median_s"] for seconds, line in zip(theirs, own, strict=True)]
        made.append(f"{median(ratios):.2f}x ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    share = median(line["gflops"] / line["matmul_gflops"] for line in own)
    return [*made, f"{share:.0%} of {median(line['matmul_gflops'] for line in own):.0f}"]


def main() -> None:
    args = bench.read_arguments(
        __doc__,
        workload=["uniform"],
        rounds=3,
        repeats=5,
        only=BENCHES,
        trl="",  # a Python with TRL
        peer=False,
        new_tokens=128,
        model="runs/smollm2_base",  # of the workload smollm2
    )
    if args.workload == ["smollm2"]:
        asked = [
            f"--{name}={getattr(args, name)}" for name in ("model", "trl", "rounds", "repeats")
        ]
        raise SystemExit(subprocess.call([sys.executable, REAL_MODEL, *asked]))
    if args.peer:
        time_peer(args)
        return
    rounds = {workload: [] for workload in args.workload}
    for _ in range(args.rounds):
        for workload in args.workload:
            rounds[workload].append(measure_round(args, workload))
    heads = ["workload", "bench", "tokens/s", "dapo_jax, s"]
    heads += ["TRL, s", "against TRL"] if args.trl else []
    bench.print_table([*heads, "GFLOP/s of matmul"])
    for workload, lines in rounds.items():
        for name in args.only:
            bench.print_row([workload, name, *cells(lines, name)])


if __name__ == "__main__":
    main()
