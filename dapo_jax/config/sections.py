"""The sections of an experiment, typed: every default once, every field explained."""

import dataclasses

from dapo_jax.runtime.settings import require, section, setting

DEFAULT_HELDOUT = 256
OF_THE_ANSWER = ("rule", "gym")  # parts that compare with the gold answer
SHAPING = ("format", "think_format", "repetition", "overlong")  # never decide what is right


@section
class Model:
    """Which policy."""

    folder: str = setting("", "Hugging Face layout: config.json, tokenizer.json, *.safetensors.")
    reference_folder: str = setting("", "The frozen reference policy; empty: `folder` as it is.")
    freeze_layers: float = setting(
        0.0, "Share of the first layers (rounded down) without gradient and optimizer memory."
    )


@section
class Lora:
    """Low-rank adapters instead of all parameters."""

    rank: int = setting(0, "Of the adapters, which alone are trained; 0: no adapters.")
    alpha: float = setting(32.0, "Adapters add x A B times alpha / rank.")
    targets: str = setting(
        "query,key,value,out,gate,up,down", "Matrices with an adapter, comma-separated."
    )


@section
class Architecture:
    """Shape of a policy made from nothing (Qwen2 family)."""

    layers: int = setting(3, "Decoder layers.")
    embed: int = setting(128, "Width of the residual stream.")
    heads: int = setting(4, "Query heads.")
    kv_heads: int = setting(2, "Key/value heads; divides heads.")
    head_dim: int = setting(32, "Width of a head; even.")
    mlp: int = setting(384, "Width of the gated MLP.")
    rope_theta: float = setting(
        10_000.0, "Base of the rotary wavelengths; short texts learn faster with a small one."
    )


@section
class Examples:
    """Worked examples of the embedded task."""

    errors: bool = setting(True, "Whether examples contain wrong steps and ramble.")
    min_terms: int = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")


@section
class Data:
    """Problems with known answers."""

    source: str = setting(
        "arithmetic",
        "NAME or NAME=WEIGHT, comma-separated: arithmetic, gym:TASK, or a file, folder or glob "
        "(also gs://) of jsonl, json, csv (.gz too), parquet or arrow; a bare name is looked up in "
        "`folder`.",
    )
    heldout_source: str = setting(
        "", "Names as in `source`, evaluated whole; empty: held-out problems of `source` itself."
    )
    fields: str = setting(
        "",
        "Which field of a row is what, where it is called otherwise: KEY=FIELD, comma-separated, "
        "as in problem=question,answer=meta.gold; keys: formats.FIELDS.",
    )
    folder: str = setting("data", "Where bare names are looked up.")
    bad_rows_limit: int = setting(10, "Malformed rows of a source that are skipped, not an error.")
    template: str = setting(
        "none",
        "Prompt template: a key of templates.TEMPLATES, or a text of your own, or a file of it, "
        "with {problem} in it or with {{ problem }}, as jinja.",
    )
    few_shot: int = setting(4, "Worked training examples before the problem (few_shot).")
    system_prompt: str = setting(
        "", "System message (chat, or jinja of your own) of rows that bring none; empty: none."
    )
    train_problems: int = setting(
        20_000, "Generated problems of one pass, which is then shuffled anew."
    )
    heldout_problems: int = setting(
        -1,
        "Problems generated or taken off for evaluation, never trained on; 0: no evaluation; -1: "
        "256, of a file at most a fifth.",
    )
    min_terms: int = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")
    max_prompt_tokens: int = setting(32, "Longest prompt the sampler accepts.")
    overlong_prompts: str = setting(
        "truncate_left", "'truncate_left' keeps the end of a longer prompt, 'drop' skips it."
    )
    changed: str = setting(
        "refuse",
        "A run goes on with other problems or answers than it began with: 'refuse' or 'allow'.",
    )

    def heldout_count(self) -> int:
        """Problems to generate or, where there are enough, to take off for evaluation."""
        return DEFAULT_HELDOUT if self.heldout_problems < 0 else self.heldout_problems


@section
class OwnData:
    """A user's own examples, or pairs of them."""

    source: str = setting(
        "arithmetic",
        "A file, folder or glob (also gs://) of jsonl, json, csv, parquet or arrow; a bare name "
        "is looked up in `folder`. For sft also arithmetic: generated, as `examples` says.",
    )
    folder: str = setting("data", "Where a bare name is looked up.")
    fields: str = setting(
        "",
        "Which fields of a row are read, as prompt=question,response=meta.target; empty: those "
        "of the known forms.",
    )
    bad_rows_limit: int = setting(10, "Malformed rows that are skipped, not an error.")
    template: str = setting(
        "none",
        "Of prompts that are plain text: as in reinforcement learning, but few_shot; messages "
        "always get the model's own.",
    )
    system_prompt: str = setting(
        "", "System message (chat, or jinja of your own) of rows that bring none; empty: none."
    )
    heldout_examples: int = setting(
        -1, "Taken off for evaluation, never trained on; -1: one in 20, at most 256; 0: none."
    )
    passes: float = setting(3.0, "Over the examples, each in an order of its own.")
    overlong: str = setting(
        "drop", "What exceeds packing.row_tokens: 'drop' it, or 'cut' the end of its answer."
    )


@section
class Rollout:
    """How many responses a step collects and trains on."""

    prompts_per_step: int = setting(32, "Groups per rollout batch (N).")
    samples_per_prompt: int = setting(16, "Responses of a group (G).")
    updates_per_rollout: int = setting(4, "Optimizer steps per rollout batch (U), in data order.")
    max_sample_rounds: int = setting(
        10, "Dynamic sampling asks for at most this many times prompts_per_step prompts."
    )
    lag: int = setting(
        0,
        "1: collect the next step's groups while this one is learned, by the policy before it; "
        "needs algorithm.importance_cap, and memory for both at once.",
    )
    carry_over: str = setting(
        "none",
        "Of what is drawn and not used when a batch is full, the next step goes on with: 'none' of "
        "it (on policy), the 'unfinished' responses with their groups, or 'all', also surplus "
        "groups; needs algorithm.importance_cap.",
    )
    carry_over_max_age: int = setting(
        2, "A step waits for what was begun so many steps before it; nothing trained is older."
    )
    when_starved: str = setting(
        "partial", "Too few groups after the last round: 'partial' trains on them, 'stop' stops."
    )


@section
class Sampler:
    """The decoding engine."""

    slots: int = setting(128, "Responses decoded side by side.")
    burst_tokens: int = setting(8, "Tokens decoded per call, between two looks from the host.")
    first_window_tokens: int = setting(
        64, "Cache length to begin with; it doubles as responses outgrow it."
    )
    load_layers: int = setting(
        0, "Layers of the policy copied to the sampler at once, where memory is short; 0: all."
    )
    max_response_tokens: int = setting(96, "Budget of a response; beyond it, it is truncated.")
    temperature: float = setting(1.0, "Softmax temperature while training.")
    top_p: float = setting(1.0, "Nucleus share; below 1 the importance ratio is biased.")
    top_k: int = setting(0, "Keep the k likeliest tokens; 0 keeps all; biases the ratio too.")
    cache: str = setting(
        "auto",
        "Of keys and values: 'slots' (of one length), 'paged' (pages as responses grow, a prompt's "
        "shared by its responses) or 'auto': paged on TPU, slots elsewhere, where they are faster.",
    )
    page_tokens: int = setting(128, "Tokens in a page of the paged cache; a multiple of 8 on TPU.")
    pages: int = setting(
        0,
        "Pages of all devices; where they run out the youngest response is drawn again later. 0: "
        "as many as the slots need at full length.",
    )
    prefill_prompts: int = setting(
        8, "Prompts prefilled by one call; rounded up to a multiple of data x fsdp."
    )
    prefill_chunk_tokens: int = setting(
        2048, "Longer prompts are prefilled in pieces of so many tokens; 0: never."
    )
    cache_dtype: str = setting(
        "auto",
        "Of keys and values: 'auto' (compute.dtype) or 'int8' with a scale per token and head: the "
        "mismatch shows in kl_sampler_trainer, and algorithm.importance_cap corrects it.",
    )
    weights_dtype: str = setting(
        "auto",
        "Of the matrices that decode (not the embedding): 'auto' (compute.dtype) or 'int8' with a "
        "scale per output channel; mismatch and correction as with cache_dtype.",
    )


@section
class Reward:
    """What a response earns, and the processes that judge it."""

    verifier: str = setting("final_number", "A key of verifier.VERIFIERS.")
    unfinished: str = setting(
        "wrong",
        "A right value not worked out (102^2-98^2 for 800, an expression copied from the problem): "
        "'wrong' or 'right'.",
    )
    percent: str = setting(
        "exact", "'exact': 20% is 0.2; 'as_asked': also 20 where the problem asks for percent."
    )
    parts: str = setting(
        "rule=1",
        "name=weight, comma-separated: rule, format, think_format, repetition, model, gym, or the "
        "module:function of your own.",
    )
    model_folder: str = setting(
        "", "Sequence-classification folder (one label) that the part 'model' asks."
    )
    correct: str = setting(
        "verifier",
        "What dynamic sampling goes by: the 'verifier', raw reward >= 'threshold', or a 'spread' "
        "of raw rewards inside the group.",
    )
    threshold: float = setting(0.5, "correct = 'threshold': raw rewards from here on are right.")
    min_spread: float = setting(1e-6, "correct = 'spread': largest - smallest must exceed it.")
    workers: int = setting(1, "Threads that judge, each with worker processes of its own.")
    timeout_seconds: float = setting(5.0, "A worker that needs longer for one response is killed.")

    def needs_answer(self) -> bool:
        """Whether anything compares responses with the gold answer."""
        return self.correct == "verifier" or not set(OF_THE_ANSWER).isdisjoint(self.weights())

    def weights(self) -> dict[str, float]:
        """Weight by name of part. Raises `ConfigError` for text that says something else."""
        pairs = [entry.split("=") for entry in self.parts.split(",")]
        try:
            found = {name.strip(): float(weight) for name, weight in pairs}
        except ValueError:
            found = {}
        require(
            len(found) == len(pairs)
            and "" not in found
            and all(abs(weight) <= 1e30 for weight in found.values()),
            "reward.parts",
            self.parts,
            "name=weight, comma-separated, each name once, finite weights of at most 1e30",
        )
        return found


@section
class Optimizer:
    """AdamW; warm-up and schedule count rollout steps."""

    learning_rate: float = setting(1e-6, "Peak learning rate.")
    schedule: str = setting("constant", "After the warm-up: a key of optimizer.SCHEDULES.")
    warmup_steps: int = setting(20, "Rollout steps; the first runs at learning_rate / warmup.")
    beta1: float = setting(0.9, "Decay of the first moment.")
    beta2: float = setting(0.999, "Decay of the second moment.")
    eps: float = setting(1e-8, "Added to the root of the second moment.")
    weight_decay: float = setting(0.1, "Decoupled; on matrices only.")
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this global norm.")
    max_skipped_steps: int = setting(
        3,
        "Steps in a row whose every update was skipped, for numbers that are not finite, before "
        "the run stops (exit code 4); 0: never.",
    )


@section
class Critic:
    """The value model, where the algorithm has one."""

    folder: str = setting("", "A policy's or a reward model's folder; empty: model.folder.")
    pretrain_steps: int = setting(
        -1,
        "First rollout steps that train the critic alone, on the policy as it is; -1: as many as "
        "algorithm.critic_pretrain_steps.",
    )
    optimizer: Optimizer = dataclasses.field(default_factory=lambda: Optimizer(learning_rate=2e-6))


@section
class Evaluation:
    """Sampled accuracy on held-out problems."""

    every_steps: int = setting(10, "Rollout steps between evaluations; 0: only before and after.")
    samples_per_problem: int = setting(4, "Responses per problem (k of avg@k).")
    temperature: float = setting(1.0, "Softmax temperature while evaluating; 0: greedy.")
    top_p: float = setting(0.7, "Nucleus share while evaluating; the default is DAPO's.")
    out: str = setting(
        "", "Where dapo-jax evaluate writes; empty: a folder in run_dir/evaluations."
    )


@section
class Log:
    """What people see."""

    show_group_every_steps: int = setting(10, "Show one group as a table; 0: never.")
    console: bool = setting(True, "Speak to the console; false: say nothing, not even warnings.")
    tensorboard: bool = setting(True, "Write TensorBoard event files.")
    wandb: str = setting(
        "",
        "Weights & Biases project, needs its package; empty: none. WANDB_MODE=offline sends later.",
    )
    rollouts: bool = setting(
        True, "Write every judged response to rollouts/ and evaluations/, step_*.jsonl."
    )
    token_groups: int = setting(
        1, "Of so many trained groups per step, the last, rollouts/ holds tokens and log-probs."
    )
    token_ratios: bool = setting(
        False,
        "Also their ratios and clips in the step's last update: one more forward pass of it.",
    )
    report: bool = setting(True, "Write report.html at the end, a page to look at the run.")
