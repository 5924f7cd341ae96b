"""Settings of the policy, its sampler, its rewards and its optimizer."""

from typing import Annotated, Literal

from dapo_jax.runtime.rules import (
    AutoCount,
    Below1,
    Count,
    CountOr0,
    Positive,
    PositiveOr0,
    Range,
    Share,
    When,
)
from dapo_jax.runtime.settings import part, require, section, setting

IF_ENVIRONMENT = When("environment.name environment.tools", lambda name, tools: name or tools)
OF_THE_ANSWER = ("rule", "gym")  # parts that compare with the gold answer
SHAPING = ("format", "think_format", "repetition", "overlong")  # never decide what is right
BY_VALUE = When("reward.verifier", "math math_box math_label")
PAGED = When("sampler.cache", "auto paged")
# With carry-over these decide what is carried from one step to the next.
ON_POLICY = When("rollout.carry_over", "none")
IF_CRITIC = When("algorithm.critic")


@section
class Model:
    """The policy to train, and its reference."""

    folder: str = setting("", "Hugging Face layout: config.json, tokenizer.json, *.safetensors.")
    reference_folder: str = setting(
        "",
        "The frozen reference policy; empty: `folder` as it is.",
        read=When("algorithm.reference"),
    )
    freeze_layers: Below1 = setting(
        0.0, "Share of the first layers (rounded down) without gradient and optimizer memory."
    )


@section
class Teacher:
    """The frozen model that the policy is distilled from; of any shape."""

    folder: str = setting("", "Its folder; the tokenizer is the policy's.")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Of its forward pass: 'auto' (compute.dtype), 'float32' or 'bfloat16'."
    )
    weights_dtype: Literal["auto", "int8"] = setting(
        "auto",
        "Of its layers' matrices in memory: 'auto' (dtype) or 'int8', a scale per output channel.",
    )


@section
class Lora:
    """Low-rank adapters instead of all parameters."""

    rank: CountOr0 = setting(0, "Of the adapters, which alone are trained; 0: no adapters.")
    alpha: Positive = setting(
        32.0, "Adapters add x A B times alpha / rank.", read=When("lora.rank")
    )
    targets: str = setting(
        "query,key,value,out,gate,up,down",
        "Matrices with an adapter, comma-separated.",
        read=When("lora.rank"),
    )
    folder: str = setting(
        "", "Adapters to go on from, as PEFT saves them; empty: new ones, which change nothing yet."
    )


@section
class Architecture:
    """Shape of a policy made from nothing (Qwen2 family)."""

    layers: Count = setting(3, "Decoder layers.")
    embed: Count = setting(128, "Width of the residual stream.")
    heads: Count = setting(4, "Query heads.")
    kv_heads: Count = setting(2, "Key/value heads; divides heads.")
    head_dim: Count = setting(32, "Width of a head; even.")
    mlp: Count = setting(384, "Width of the gated MLP.")
    rope_theta: Annotated[float, Range(above=1)] = setting(
        10_000.0, "Base of the rotary wavelengths; short texts learn faster with a small one."
    )


@section
class Rollout:
    """Responses that a step collects and trains on."""

    prompts_per_step: Count = setting(32, "Groups per rollout batch (N).")
    samples_per_prompt: Count = setting(16, "Responses of a group (G).")
    updates_per_rollout: Count = setting(4, "Optimizer steps per rollout batch (U), in data order.")
    max_sample_rounds: Count = setting(
        10, "Dynamic sampling asks for at most this many times prompts_per_step prompts."
    )
    lag: Annotated[int, Range(at_least=0, at_most=1)] = setting(
        0,
        "1: collect the next step's groups while this one is learned, by the policy before it; "
        "needs algorithm.importance_cap, and memory for both at once.",
    )
    carry_over: Literal["none", "unfinished", "all"] = setting(
        "none",
        "Of what is drawn and not used when a batch is full, the next step goes on with: 'none' of "
        "it (on policy), the 'unfinished' responses with their groups, or 'all', also surplus "
        "groups; needs algorithm.importance_cap.",
    )
    carry_over_max_age: Count = setting(
        2,
        "A step waits for what was begun so many steps before it; nothing trained is older.",
        read=When("rollout.carry_over", "unfinished all"),
    )
    when_starved: Literal["partial", "stop"] = setting(
        "partial", "Too few groups after the last round: 'partial' trains on them, 'stop' stops."
    )


@section
class Environment:
    """The environment that answers the policy between its turns; none: responses of one turn."""

    name: str = setting(
        "",
        "calculator, guessing, second_try, openenv:module:Class, or the module:Class of your own.",
    )
    tools: str = setting(
        "",
        "Functions as module:function, comma-separated, that the policy may call, in the form that "
        "its chat template teaches.",
    )
    max_turns: Count = setting(8, "Turns of a trajectory.", read=IF_ENVIRONMENT)
    max_drawn_tokens: CountOr0 = setting(
        0,
        "Drawn tokens of a trajectory, all turns together; 0: sampler.max_response_tokens, in "
        "which observations take room too.",
        read=IF_ENVIRONMENT,
    )
    max_observation_tokens: Count = setting(
        256, "Tokens of one observation; of a longer one the beginning.", read=IF_ENVIRONMENT
    )
    rewards: Literal["sum", "last", "steps"] = setting(
        "sum",
        "Part 'environment': their sum, the last one, or each on its own turn's last token.",
        read=IF_ENVIRONMENT,
    )
    step_seconds: Positive = setting(
        5.0,
        "A step that takes longer is killed, and says so as its observation.",
        read=IF_ENVIRONMENT,
        may_change=True,
    )
    workers: Count = setting(
        4, "Processes that run steps side by side.", read=IF_ENVIRONMENT, may_change=True
    )
    wait_bursts: Count = setting(
        1,
        "Bursts of decoding during which a step may take its time; then decoding waits for it.",
        read=IF_ENVIRONMENT,
        may_change=ON_POLICY,
    )

    @property
    def used(self) -> bool:
        """True where trajectories have turns."""
        return bool(self.name or self.tools)


@section
class Sampler:
    """The decoding engine."""

    slots: Count = setting(128, "Responses decoded side by side.", may_change=ON_POLICY)
    keep_turns: bool = setting(
        False,
        "Trajectories keep slot and cache between turns; else each turn prefills the whole again.",
        read=IF_ENVIRONMENT,
    )
    burst_tokens: Count = setting(
        8, "Tokens decoded per call, between two looks from the host.", may_change=ON_POLICY
    )
    first_window_tokens: Count = setting(
        64,
        "Cache length to begin with; it doubles as responses outgrow it. With "
        "checkpoint.keep_groups it is the longest from the start.",
        may_change=True,
    )
    load_layers: CountOr0 = setting(
        0,
        "Layers of the policy copied to the sampler at once, where memory is short; 0: all.",
        may_change=True,
    )
    max_response_tokens: Count = setting(96, "Budget of a response; beyond it, it is truncated.")
    temperature: Annotated[float, Range(at_least=0.001, at_most=100.0)] = setting(
        1.0, "Softmax temperature while training."
    )
    top_p: Share = setting(1.0, "Nucleus share; below 1 the importance ratio is biased.")
    top_k: CountOr0 = setting(0, "Keep the k likeliest tokens; 0 keeps all; biases the ratio too.")
    cache: Literal["auto", "slots", "paged"] = setting(
        "auto",
        "Of keys and values: 'slots' (of one length), 'paged' (pages as responses grow, a prompt's "
        "shared by its responses) or 'auto': paged on TPU, slots elsewhere, where they are faster.",
        may_change=ON_POLICY,
    )
    page_tokens: Count = setting(
        128,
        "Tokens in a page of the paged cache; a multiple of 8 on TPU.",
        read=PAGED,
        may_change=ON_POLICY,
    )
    pages: CountOr0 = setting(
        0,
        "Pages of all devices; where they run out the youngest response is drawn again later. 0: "
        "as many as the slots need at full length.",
        read=PAGED,
        may_change=ON_POLICY,
    )
    prefill_prompts: Count = setting(
        8,
        "Prompts prefilled by one call; rounded up to a multiple of data x fsdp, which alone it is "
        "with checkpoint.keep_groups.",
        may_change=True,
    )
    prefill_chunk_tokens: CountOr0 = setting(
        2048, "Longer prompts are prefilled in pieces of so many tokens; 0: never.", may_change=True
    )
    cache_dtype: Literal["auto", "int8", "int8_per_head"] = setting(
        "auto",
        "Of keys and values: 'auto' (compute.dtype), 'int8' with a scale per token and head or, in "
        "pages, 'int8_per_head': kl_sampler_trainer is the error, importance_cap corrects it.",
    )
    weights_dtype: Literal["auto", "int8", "int8_products"] = setting(
        "auto",
        "Of matrices that decode (not the embedding): 'auto' (compute.dtype), 'int8' with a scale "
        "per output channel, 'int8_products' with the other factor rounded too, a scale per token.",
    )


@section
class Reward:
    """Rewards of a response, and the processes that judge it."""

    verifier: Literal["final_number", "math", "math_box", "math_label", "dapo"] = setting(
        "final_number", "A key of verifier.VERIFIERS."
    )
    unfinished: Literal["wrong", "right"] = setting(
        "wrong",
        "A right value not worked out (102^2-98^2 for 800, an expression copied from the problem): "
        "'wrong' or 'right'.",
        read=BY_VALUE,
    )
    percent: Literal["exact", "as_asked"] = setting(
        "exact",
        "'exact': 20% is 0.2; 'as_asked': also 20 where the problem asks for percent.",
        read=BY_VALUE,
    )
    parts: str = setting(
        "rule=1",
        "name=weight, comma-separated: rule, format, think_format, repetition, model, gym, "
        "environment, or the module:function of your own.",
    )
    model_folder: str = setting(
        "", "Sequence-classification folder (one label) that the part 'model' asks."
    )
    correct: Literal["verifier", "threshold", "spread"] = setting(
        "verifier",
        "What dynamic sampling goes by: the 'verifier', raw reward >= 'threshold', or a 'spread' "
        "of raw rewards inside the group.",
    )
    threshold: float = setting(
        0.5,
        "correct = 'threshold': raw rewards from here on are right.",
        read=When("reward.correct", "threshold"),
    )
    min_spread: PositiveOr0 = setting(
        1e-6,
        "correct = 'spread': largest - smallest must exceed it.",
        read=When("reward.correct", "spread"),
    )
    workers: Count = setting(
        1, "Threads that judge, each with worker processes of its own.", may_change=True
    )
    timeout_seconds: Positive = setting(
        5.0, "A worker that needs longer for one response or group is killed.", may_change=True
    )

    def needs_answer(self) -> bool:
        """True where anything compares responses with the gold answer."""
        return self.correct == "verifier" or not set(OF_THE_ANSWER).isdisjoint(self.weights())

    def weights(self) -> dict[str, float]:
        """Weight of each part, by name. Raises `ConfigError` for text of another form."""
        pairs = [entry.split("=") for entry in self.parts.split(",")]
        try:
            weights = {name.strip(): float(weight) for name, weight in pairs}
        except ValueError:
            weights = {}
        complete = len(weights) == len(pairs) and "" not in weights
        require(
            complete and all(abs(weight) <= 1e30 for weight in weights.values()),
            "reward.parts",
            self.parts,
            "name=weight, comma-separated, each name once, finite weights of at most 1e30",
        )
        return weights


@section
class Optimizer:
    """AdamW; warm-up and schedule count rollout steps."""

    learning_rate: Annotated[float, Range(above=0, at_most=1.0)] = setting(
        1e-6, "Peak learning rate."
    )
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "After the warm-up: a key of optimizer.SCHEDULES."
    )
    warmup_steps: CountOr0 = setting(20, "Rollout steps; the first runs at learning_rate / warmup.")
    beta1: Below1 = setting(0.9, "Decay of the first moment.")
    beta2: Below1 = setting(0.999, "Decay of the second moment.")
    eps: Positive = setting(1e-8, "Added to the root of the second moment.")
    weight_decay: PositiveOr0 = setting(0.1, "Decoupled; on matrices only.")
    max_grad_norm: Annotated[float, Range(above=0, at_most=1e15)] = setting(
        1.0, "Gradients are scaled down to this global norm."
    )
    max_skipped_steps: int = setting(
        3,
        "Steps in a row whose every update was skipped, for numbers that are not finite, before "
        "the run stops (exit code 4); 0: never.",
        may_change=True,
    )


@section
class Critic:
    """The value model, where the algorithm has one."""

    folder: str = setting(
        "",
        "A policy's or a reward model's folder; empty: model.folder.",
        read=IF_CRITIC,
    )
    pretrain_steps: AutoCount = setting(
        -1,
        "First rollout steps that train the critic alone, on the policy as it is; -1: as many as "
        "algorithm.critic_pretrain_steps.",
    )
    optimizer: Optimizer = part(lambda: Optimizer(learning_rate=2e-6), read=IF_CRITIC)
