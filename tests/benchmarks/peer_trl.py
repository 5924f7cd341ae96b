"""Times rollout, update and whole step of TRL's GRPOTrainer on the model and batch of ours.py.

    python tests/benchmarks/peer_trl.py --new-tokens 128 --repeats 5

- rollout: `generate` of transformers with its default cache, responses as long as asked.
- update: the trainer's own loss (DAPO's), backward, clipped gradient and AdamW, the batch at once.
- step: `GRPOTrainer.train`, one optimizer step a batch, without checkpointing of activations.

All CPU cores, float32. Prints a JSON line per measurement.
"""

import functools
import os
import tempfile
import time

import peers

INSTALL = (
    "pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 datasets==5.2.0 accelerate==1.15.0 "
    "peft==0.21.2"
)
PACKAGES = "torch trl transformers"


def make_model():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=peers.VOCAB,
            hidden_size=peers.HIDDEN,
            intermediate_size=peers.MLP,
            num_hidden_layers=peers.LAYERS,
            num_attention_heads=peers.HEADS,
            num_key_value_heads=peers.KV_HEADS,
            tie_word_embeddings=False,
            pad_token_id=peers.PAD,
            eos_token_id=peers.END,
            bos_token_id=None,
        )
    )


def make_tokenizer():
    """Make a tokenizer with a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(peers.VOCAB)}, "t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t2", padding_side="left"
    )


def random_tokens(rows: int, columns: int):
    import torch

    return torch.randint(
        2, peers.VOCAB, (rows, columns), generator=torch.Generator().manual_seed(0)
    )


def make_trainer(new_tokens: int, steps: int, callbacks=None):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts = random_tokens(peers.PROMPTS * steps, peers.PROMPT_TOKENS)
    rows = [" ".join(f"t{token}" for token in row) for row in prompts.tolist()]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        loss_type="dapo",
        epsilon_high=0.28,
        num_generations=peers.GROUP,
        max_completion_length=new_tokens,
        generation_kwargs={"min_new_tokens": new_tokens},
        per_device_train_batch_size=peers.RESPONSES,
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
        model=make_model(),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 2) for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=make_tokenizer(),
        callbacks=callbacks,
    )


def time_rollout(new_tokens: int, repeats: int) -> list[float]:
    import torch
    from transformers import GenerationConfig

    model, prompts = make_model().eval(), random_tokens(peers.PROMPTS, peers.PROMPT_TOKENS)
    rows = prompts.repeat_interleave(peers.GROUP, 0)
    law = GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=peers.PAD,
        eos_token_id=peers.END,
    )

    @torch.no_grad()
    def rollout():
        out = model.generate(rows, attention_mask=torch.ones_like(rows), generation_config=law)
        assert out.shape[1] == peers.PROMPT_TOKENS + new_tokens

    return peers.timed(rollout, repeats)


def time_update(new_tokens: int, repeats: int) -> list[float]:
    import torch

    trainer = make_trainer(new_tokens, 1)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    model, optimizer = trainer.model.train(), trainer.optimizer
    prompts = random_tokens(peers.PROMPTS, peers.PROMPT_TOKENS).repeat_interleave(peers.GROUP, 0)
    responses = random_tokens(peers.RESPONSES, new_tokens)
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": responses,
        "completion_mask": torch.ones_like(responses),
        "advantages": torch.randn(peers.RESPONSES),
        "num_items_in_batch": torch.tensor(responses.numel()),
    }

    def update():
        trainer.compute_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return peers.timed(update, repeats)


def time_step(new_tokens: int, repeats: int) -> list[float]:
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            ends.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    make_trainer(new_tokens, repeats + 1, [Clock()]).train()
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def main() -> None:
    args = peers.read_arguments(__doc__)
    peers.require("torch trl transformers datasets accelerate peft", INSTALL)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    benches = {"rollout": time_rollout, "update": time_update, "step": time_step}
    calls = {name: functools.partial(call, args.new_tokens) for name, call in benches.items()}
    peers.report(args, calls, PACKAGES)


if __name__ == "__main__":
    main()
