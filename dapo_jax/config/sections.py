"""Sections of settings: model, data, rollouts, rewards, optimizer, compute and outputs."""

from typing import Annotated, Literal

from dapo_jax.config.algorithm import IF_CRITIC
from dapo_jax.runtime.rules import (
    AutoCount,
    Below1,
    Count,
    CountOr0,
    Dtype,
    Positive,
    PositiveOr0,
    Range,
    Share,
    Temperature,
    When,
)
from dapo_jax.runtime.settings import part, require, section, setting

DEFAULT_HELDOUT = 256
GENERATED = ("arithmetic", "multi_digit_sums")  # data.source of a supervised run without files
SHOW_NO_SYSTEM = ("none", "dapo", "r1", "qwen_math", "few_shot")  # templates
OF_THE_ANSWER = ("rule", "gym")  # reward parts that compare with the gold answer
SHAPING = ("format", "think_format", "repetition", "overlong")  # reward parts without a verdict

IF_ENVIRONMENT = When("environment.name environment.tools", lambda name, tools: name or tools)
BY_VALUE = When("reward.verifier", "math math_box math_label")
PAGED = When("sampler.cache", "auto paged")
# With carry-over, these settings decide which responses the next step gets.
ON_POLICY = When("rollout.carry_over", "none")
IF_LORA = When("lora.rank")
IF_ROLLOUTS = When("log.rollouts")
# All ratios are 1 in the first update of a step.
SHOWS_RATIOS = When(
    "log.rollouts log.token_groups algorithm.ratio rollout.updates_per_rollout "
    "algorithm.old_logprobs",
    lambda rollouts, groups, ratio, updates, old: (
        rollouts and groups > 0 and ratio != "none" and (updates > 1 or old == "sampler")
    ),
)


@section
class Model:
    """The policy to train, and its reference."""

    folder: str = setting("", "Hugging Face layout: config.json, tokenizer.json, *.safetensors.")
    reference_folder: str = setting(
        "", "The frozen reference policy; empty: `folder`.", read=When("algorithm.reference")
    )
    freeze_layers: Below1 = setting(
        0.0, "Fraction of the layers, from the first, without gradient and optimizer memory."
    )


@section
class Teacher:
    """The frozen model that the policy is distilled from; of any shape."""

    folder: str = setting("", "Model folder; the tokenizer is the policy's.")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Of the forward pass: 'auto' (compute.dtype), 'float32' or 'bfloat16'."
    )
    weights_dtype: Literal["auto", "int8"] = setting(
        "auto", "Of the layers' matrices: 'auto' (dtype) or 'int8', a scale per output channel."
    )


@section
class Lora:
    """Low-rank adapters instead of all parameters."""

    rank: CountOr0 = setting(0, "Rank of the adapters; only they are trained; 0: no adapters.")
    alpha: Positive = setting(32.0, "Adapters add x A B times alpha / rank.", read=IF_LORA)
    targets: str = setting(
        "query,key,value,out,gate,up,down", "Matrices with adapters, comma-separated.", read=IF_LORA
    )
    folder: str = setting("", "Adapters to start from, in PEFT's format; empty: new ones.")


@section
class Architecture:
    """Shape of a new policy (Qwen2 family)."""

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
class Compute:
    """Numerics of the policy."""

    dtype: Dtype = setting("float32", "'float32' or 'bfloat16'; parameters stay float32.")
    remat: Literal["none", "full", "dots", "attention", "offload"] = setting(
        "none",
        "What backward recomputes of a layer: 'none'; 'full'; all but 'attention' (not plain) or "
        "'dots', which also keeps other products; 'offload': full, layer inputs in host memory.",
        may_change=True,
    )
    scan_unroll: Count = setting(
        1, "Layers per iteration of the training scan; more compile more slowly.", may_change=True
    )
    attention: Literal["auto", "plain", "blocked", "splash", "triton"] = setting(
        "auto",
        "In training: 'plain' (short rows), 'blocked', 'splash' (TPU; row_tokens a multiple of "
        "128), 'triton' (GPU; the same) or 'auto' (by platform and row_tokens).",
        may_change=True,
    )
    logprob_chunk_tokens: Count = setting(
        2048, "Tokens, per device, with logits in memory at the same time.", may_change=True
    )


@section
class Packing:
    """Rows of packed prompts and responses."""

    row_tokens: int = setting(
        256,
        "Length of a row; at least prompt + response limit. 'auto' (-1): that, or two to four "
        "times that, whichever fills best; each length compiles once. Not for examples.",
        auto=-1,
    )
    rows_per_microbatch: Count = setting(
        16, "Rows per gradient, all devices; fewer if 'auto' makes the rows longer."
    )


SizeOrRest = Annotated[int, Range(above=0, also=-1)]  # -1: the devices that are left


@section
class OneMesh:
    """Device mesh. Batch is split over data x fsdp x expert, weights over fsdp x expert x context x
    tensor."""

    data: SizeOrRest = setting(1, "Replicas of the weights; -1: all devices that are left.")
    fsdp: SizeOrRest = setting(
        -1, "Shards of weights and optimizer along embed; -1: all devices that are left."
    )
    tensor: Count = setting(1, "Shards along heads, mlp and vocabulary.")
    expert: Count = setting(1, "Shards of the experts; other layers treat this axis like fsdp.")
    context: Count = setting(
        1,
        "Shards of a row's length in training, for very long rows; row_tokens is a multiple of "
        "twice that. Decoding treats this axis like fsdp.",
    )
    decode_tensor: Count = setting(
        1, "More tensor shards for decoding; training treats this axis like fsdp."
    )


@section
class Mesh(OneMesh):
    """Device mesh, or one to learn and one to sample. Batch is split over data x fsdp, weights over
    fsdp x tensor."""

    sampler_share: Below1 = setting(
        0.0,
        "Fraction of each process's devices that only sample, in a separate mesh with as many "
        "tensor shards and more replicas. 0: the same devices sample and learn.",
    )


@section
class Examples:
    """Worked examples of the embedded tasks."""

    errors: bool = setting(
        True, "Examples with errors.", read=When("examples.direct_share", lambda share: share == 0)
    )
    direct_share: Annotated[float, Range(at_least=0, below=1)] = setting(
        0.0,
        "Fraction of examples that answer at once. arithmetic: with the sum of the first two "
        "operands; the others make no mistakes, and ramble. multi_digit_sums: correctly; the "
        "others call the calculator.",
    )
    min_terms: int = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")


@section
class Data:
    """Problems with known answers."""

    source: str = setting(
        "arithmetic",
        "NAME or NAME=WEIGHT, comma-separated: arithmetic, multi_digit_sums, gym:TASK, or a file, "
        "folder or glob (also gs://) of jsonl, json, csv (.gz too), parquet or arrow; a bare name "
        "is looked up in `folder`.",
    )
    heldout_source: str = setting(
        "", "Names as in `source`, evaluated whole; empty: held-out problems of `source`."
    )
    fields: str = setting(
        "",
        "Names of a row's fields if they are not the usual ones: KEY=FIELD, comma-separated, as in "
        "problem=question,answer=meta.gold; keys: row_formats.FIELDS.",
    )
    folder: str = setting("data", "Folder for bare names.")
    bad_rows_limit: CountOr0 = setting(10, "Malformed rows of a source that are skipped.")
    template: str = setting(
        "none",
        "Prompt template: a key of templates.TEMPLATES, or a text, or a file of it, with {problem} "
        "in it or, as jinja, {{ problem }}.",
    )
    few_shot: Count = setting(
        4, "Worked training examples before the problem.", read=When("data.template", "few_shot")
    )
    system_prompt: str = setting(
        "",
        "System message (chat or jinja) of rows without one; empty: none.",
        read=When("data.template", lambda name: name not in SHOW_NO_SYSTEM),
    )
    train_problems: Count = setting(20_000, "Generated problems per pass.")
    heldout_problems: AutoCount = setting(
        -1,
        "Problems for evaluation, generated or taken from `source`, never trained on; 0: no "
        "evaluation; -1: 256, of a file at most a fifth.",
    )
    min_terms: int = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")
    max_prompt_tokens: Count = setting(32, "Longest prompt of the sampler.")
    overlong_prompts: Literal["truncate_left", "drop"] = setting(
        "truncate_left", "'truncate_left' keeps the end of a longer prompt, 'drop' skips it."
    )
    changed: Literal["refuse", "allow"] = setting(
        "refuse", "On resume with other problems or answers: 'refuse' or 'allow'.", may_change=True
    )

    def heldout_count(self) -> int:
        """Return the number of problems to hold out, if there are enough."""
        return DEFAULT_HELDOUT if self.heldout_problems < 0 else self.heldout_problems


@section
class OwnData:
    """A user's own examples, or pairs of them."""

    source: str = setting(
        "arithmetic",
        "A file, folder or glob (also gs://) of jsonl, json, csv, parquet or arrow; a bare name is "
        "looked up in `folder`. For sft also arithmetic, multi_digit_sums: generated (`examples`).",
    )
    folder: str = setting("data", "Folder for a bare name.")
    fields: str = setting(
        "", "Names of a row's fields, as prompt=question,response=meta.target; empty: known names."
    )
    bad_rows_limit: CountOr0 = setting(10, "Malformed rows that are skipped.")
    template: str = setting("none", "Of plain prompts: as for problems, without few_shot.")
    system_prompt: str = setting(
        "", "System message (chat or jinja) of rows without one; empty: none."
    )
    heldout_examples: AutoCount = setting(
        -1, "Taken for evaluation, never trained on; -1: one in 20, at most 256; 0: none."
    )
    passes: Positive = setting(
        3.0, "Passes over the examples.", read=When("total_steps", lambda steps: steps == 0)
    )
    overlong: Literal["drop", "cut"] = setting(
        "drop", "Examples longer than packing.row_tokens: 'drop' them, or 'cut' their end."
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
        "Surplus work of a full batch that the next step resumes: 'none' (on policy), the "
        "'unfinished' responses with their groups, or 'all', also surplus groups; needs "
        "algorithm.importance_cap.",
    )
    carry_over_max_age: Count = setting(
        2,
        "A step waits for responses that began this many steps earlier; nothing trained is older.",
        read=When("rollout.carry_over", "unfinished all"),
    )
    when_starved: Literal["partial", "stop"] = setting(
        "partial", "Too few groups after the last round: 'partial' trains on them, 'stop' stops."
    )


@section
class Environment:
    """The environment that answers the policy between its turns; none: responses of one turn."""

    name: str = setting(
        "", "calculator, guessing, second_try, openenv:module:Class, or your module:Class."
    )
    tools: str = setting(
        "",
        "Functions that the policy may call, as module:function, comma-separated; the model's chat "
        "template defines the form of a call.",
    )
    max_turns: Count = setting(8, "Turns of a trajectory.", read=IF_ENVIRONMENT)
    max_drawn_tokens: CountOr0 = setting(
        0,
        "Sampled tokens of a trajectory, all turns together; 0: sampler.max_response_tokens, which "
        "also counts observations.",
        read=IF_ENVIRONMENT,
    )
    max_observation_tokens: Count = setting(
        256, "Tokens of an observation; longer ones lose their end.", read=IF_ENVIRONMENT
    )
    rewards: Literal["sum", "last", "steps"] = setting(
        "sum", "Part 'environment': 'sum', 'last' or 'steps' (per turn).", read=IF_ENVIRONMENT
    )
    step_seconds: Positive = setting(
        5.0, "A longer step is killed and reported.", read=IF_ENVIRONMENT, may_change=True
    )
    workers: Count = setting(
        4, "Processes that run steps in parallel.", read=IF_ENVIRONMENT, may_change=True
    )
    wait_bursts: Count = setting(
        1, "Bursts before decoding waits for a step.", read=IF_ENVIRONMENT, may_change=ON_POLICY
    )

    @property
    def used(self) -> bool:
        """True if trajectories have turns."""
        return bool(self.name or self.tools)


@section
class Sampler:
    """The decoding engine."""

    slots: Count = setting(128, "Responses decoded in parallel.", may_change=ON_POLICY)
    keep_turns: bool = setting(
        False, "Keep slot and cache between turns; else prefill again.", read=IF_ENVIRONMENT
    )
    burst_tokens: Count = setting(8, "Tokens decoded per call of the host.", may_change=ON_POLICY)
    first_window_tokens: Count = setting(
        64,
        "First cache length; it doubles as responses outgrow it. With checkpoint.keep_groups it "
        "starts at the longest.",
        may_change=True,
    )
    load_layers: CountOr0 = setting(
        0, "Layers copied to the sampler at once, to save memory; 0: all.", may_change=True
    )
    max_response_tokens: Count = setting(96, "Limit of a response; a longer one is truncated.")
    temperature: Annotated[float, Range(at_least=0.001, at_most=100.0)] = setting(
        1.0, "Softmax temperature while training."
    )
    top_p: Share = setting(1.0, "Nucleus fraction; below 1 the importance ratio is biased.")
    top_k: CountOr0 = setting(0, "Keep the k likeliest tokens; 0 keeps all; biases the ratio too.")
    cache: Literal["auto", "slots", "paged"] = setting(
        "auto",
        "Of keys and values: 'slots' (of one length), 'paged' (pages as responses grow; a group "
        "shares its prompt's) or 'auto': paged on TPU, slots elsewhere, where they are faster.",
        may_change=ON_POLICY,
    )
    page_tokens: Count = setting(
        128, "Tokens per cache page; a multiple of 8 on TPU.", read=PAGED, may_change=ON_POLICY
    )
    pages: CountOr0 = setting(
        0,
        "Pages of all devices; if none is left, the youngest response is sampled again later. 0: "
        "enough for all slots at full length.",
        read=PAGED,
        may_change=ON_POLICY,
    )
    prefill_prompts: Count = setting(
        8,
        "Prompts per prefill call, rounded up to a multiple of data x fsdp; exactly data x fsdp "
        "with checkpoint.keep_groups.",
        may_change=True,
    )
    prefill_chunk_tokens: CountOr0 = setting(
        2048, "Longer prompts are prefilled in chunks of this length; 0: never.", may_change=True
    )
    cache_dtype: Literal["auto", "int8", "int8_per_head"] = setting(
        "auto",
        "Of keys and values: 'auto' (compute.dtype), 'int8' with a scale per token and head or, in "
        "pages, 'int8_per_head': kl_sampler_trainer is the error, importance_cap corrects it.",
    )
    weights_dtype: Literal["auto", "int8", "int8_products"] = setting(
        "auto",
        "Of decoding matrices (not the embedding): 'auto' (compute.dtype), 'int8' with a scale per "
        "output channel, 'int8_products' with the other factor rounded too, a scale per token.",
    )


@section
class Reward:
    """Rewards of a response, and the processes that compute them."""

    verifier: Literal["final_number", "math", "math_box", "math_label", "dapo"] = setting(
        "final_number", "A key of verifier.VERIFIERS."
    )
    unfinished: Literal["wrong", "right"] = setting(
        "wrong",
        "A correct value that is not worked out (102^2-98^2 for 800, an expression copied from the "
        "problem): 'wrong' or 'right'.",
        read=BY_VALUE,
    )
    percent: Literal["exact", "as_asked"] = setting(
        "exact", "'exact': 20% is 0.2; 'as_asked': 20 if the problem asks for %.", read=BY_VALUE
    )
    parts: str = setting(
        "rule=1",
        "name=weight, comma-separated: rule, format, think_format, repetition, model, gym, "
        "environment, or your module:function.",
    )
    model_folder: str = setting("", "Reward model (one label) of the part 'model'.")
    correct: Literal["verifier", "threshold", "spread"] = setting(
        "verifier",
        "What is correct for dynamic sampling: the 'verifier', raw reward >= 'threshold', or a "
        "'spread' of raw rewards inside the group.",
    )
    threshold: float = setting(
        0.5, "Smallest raw reward of a correct response.", read=When("reward.correct", "threshold")
    )
    min_spread: PositiveOr0 = setting(
        1e-6, "Largest - smallest must exceed it.", read=When("reward.correct", "spread")
    )
    workers: Count = setting(
        1, "Threads that compute rewards, each with worker processes.", may_change=True
    )
    timeout_seconds: Positive = setting(
        5.0, "A worker that needs longer for one response or group is killed.", may_change=True
    )

    def needs_answer(self) -> bool:
        """Return True if responses are compared with the gold answer."""
        return self.correct == "verifier" or not set(OF_THE_ANSWER).isdisjoint(self.weights())

    def weights(self) -> dict[str, float]:
        """Return the weight of each part by name; raise `ConfigError` for another format."""
        pairs = [entry.split("=") for entry in self.parts.split(",")]
        try:
            weights = {name.strip(): float(weight) for name, weight in pairs}
        except ValueError:
            weights = {}
        is_complete = len(weights) == len(pairs) and "" not in weights
        is_finite = all(abs(weight) <= 1e30 for weight in weights.values())
        allowed = "name=weight, comma-separated, each name once, finite weights of at most 1e30"
        require(is_complete and is_finite, "reward.parts", self.parts, allowed)
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
        3, "Steps in a row without finite updates before exit code 4; 0: never.", may_change=True
    )


@section
class Critic:
    """The value model of an algorithm with a critic."""

    folder: str = setting(
        "", "Folder of a policy or a reward model; empty: model.folder.", read=IF_CRITIC
    )
    pretrain_steps: AutoCount = setting(
        -1, "First rollout steps that train only the critic; -1: algorithm.critic_pretrain_steps."
    )
    optimizer: Optimizer = part(lambda: Optimizer(learning_rate=2e-6), read=IF_CRITIC)


@section
class Checkpoint:
    """Orbax checkpoints in run_dir/checkpoints."""

    every_steps: CountOr0 = setting(10, "Rollout steps between saves; 0 saves only at the end.")
    keep: Count = setting(2, "Number of newest checkpoints to keep.")
    keep_groups: bool = setting(
        False,
        "Save scored groups before their step is done, so that a killed run loses no finished "
        "response: the step is the same, its cost is counted from the resume.",
    )
    leave_seconds: PositiveOr0 = setting(
        30.0,
        "Longest wait of SIGTERM and Ctrl-C for a point to save at; then the process exits with "
        "the newest checkpoint. 0: no limit.",
    )


@section
class Evaluation:
    """Sampled accuracy on held-out problems."""

    every_steps: CountOr0 = setting(
        10, "Rollout steps between evaluations; 0: only before and after."
    )
    samples_per_problem: Count = setting(4, "Responses per problem (k of avg@k).")
    temperature: Temperature = setting(1.0, "Softmax temperature while evaluating; 0: greedy.")
    top_p: Share = setting(0.7, "Nucleus fraction while evaluating; the default is DAPO's.")
    out: str = setting("", "Output of dapo-jax evaluate; empty: a folder in run_dir/evaluations.")


@section
class Log:
    """Console, metric writers and recorded rollouts."""

    show_group_every_steps: CountOr0 = setting(10, "Show one group as a table; 0: never.")
    console: bool = setting(True, "Print to the console; false: nothing, not even warnings.")
    tensorboard: bool = setting(True, "Write TensorBoard event files.")
    wandb: str = setting(
        "", "Weights & Biases project (needs its package); empty: none. See also WANDB_MODE."
    )
    mlflow: str = setting(
        "", "MLflow experiment (needs its package); empty: none. See also MLFLOW_TRACKING_URI."
    )
    trackio: str = setting(
        "", "Trackio project (needs its package); empty: none. See also TRACKIO_SPACE_ID."
    )
    rollouts: bool = setting(
        True, "Write every scored response to rollouts/ and evaluations/, step_*.jsonl."
    )
    rollouts_keep: CountOr0 = setting(
        0, "Number of newest files of rollouts/ to keep; 0: all.", read=IF_ROLLOUTS
    )
    token_groups: CountOr0 = setting(
        1, "Trained groups per step with tokens and log-probs in rollouts/.", read=IF_ROLLOUTS
    )
    token_ratios: bool = setting(
        False, "Also ratios and clips in the last update: one more forward.", read=SHOWS_RATIOS
    )
    report: bool = setting(True, "Write report.html at the end.")


@section
class Watch:
    """Limits of metrics: beyond them a step prints a warning. 0: not watched."""

    min_entropy: PositiveOr0 = setting(0.005, "Lower limit of `entropy`, in nats.")
    max_length_growth: PositiveOr0 = setting(
        2.0, "Limit of `response_tokens_mean` relative to its mean in the ten steps before."
    )
    max_all_right: PositiveOr0 = setting(0.9, "Limit of `all_right_fraction`.")
    max_all_wrong: PositiveOr0 = setting(0.9, "Limit of `all_wrong_fraction`.")
    max_answer_not_found: PositiveOr0 = setting(0.5, "Limit of `answer_not_found_rate`.")
    max_verifier_failures: PositiveOr0 = setting(0.05, "Limit of `verifier_failures` per verdict.")
