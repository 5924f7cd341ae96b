"""Experiments of the commands and their sections of settings.

A file in `configs/` returns an experiment; the command line overrides its settings.
"""

import dataclasses
from typing import Annotated, Literal

from dapo_jax.config.algorithm import IF_CRITIC, IF_TEACHER, Algorithm
from dapo_jax.config.rules import (
    AutoCount,
    Below1,
    Count,
    CountOr0,
    Dtype,
    Port,
    Positive,
    PositiveOr0,
    Range,
    Seed,
    Share,
    Temperature,
    Unit,
    Url,
    When,
)
from dapo_jax.config.settings import part, section, setting
from dapo_jax.runtime import registry
from dapo_jax.types.errors import require

DEFAULT_HELDOUT = 256
GENERATED = ("arithmetic", "multi_digit_sums")  # data.source of a supervised run without files
WORD_PROBLEMS = ("word_problems", "calculator_problems")  # generated too, as rows of a file
SHOW_NO_SYSTEM = ("none", "dapo", "r1", "qwen_math", "few_shot")  # templates
OF_THE_ANSWER = ("rule", "gym")  # reward parts that compare with the gold answer
SHAPING = ("format", "think_format", "repetition", "overlong")  # reward parts without a verdict
SYSTEM_PROMPT = "System message for rows without one, if the template shows it; empty: none."

IF_TURNS = When("environment.name environment.tools", lambda name, tools: name or tools)
MADE_ROWS = When("data.source", lambda name: name in WORD_PROBLEMS or name.startswith("gym:"))
BY_VALUE = When("reward.verifier", "math math_box math_label")
PAGED = When("sampler.cache", "auto paged")
# With carry-over, these settings decide which responses the next step gets.
Schedule = Literal["constant", "linear", "cosine"]
Rate = Annotated[float, Range(above=0, at_most=1.0)]
AUTO = -1
AutoRate = Annotated[float, Range(above=0, at_most=1.0, also=AUTO)]
Cache = Literal["auto", "slots", "paged"]
ON_POLICY = When("rollout.carry_over", "none")
IF_SAMPLERS = When("sampler.engine", "samplers")
IF_VLLM = When("sampler.engine", "vllm")
FEW_SHOT = When("data.template", "few_shot")
IF_CHAT = When("data.template", "chat")
IF_REFERENCE = When("algorithm.reference")
SHOWS_SYSTEM = When("data.template", lambda name: name not in SHOW_NO_SYSTEM)
IF_LORA = When("lora.rank")
IF_TINKER = When("tinker")
IF_JUDGE = When(
    "reward.parts",
    lambda parts: any(part.strip().startswith("judge=") for part in parts.split(",")),
)
RECORDS = When("log.rollouts")
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

    folder: str = setting("", "Folder in Hugging Face layout, or dapo_jax:arithmetic_base.")
    reference_folder: str = setting("", "Reference policy; empty: `folder`.", read=IF_REFERENCE)
    freeze_layers: Below1 = setting(0.0, "Fraction of first layers that are not trained.")


@section
class Teacher:
    """Frozen teacher model of a distillation; its shape may differ from the policy's."""

    folder: str = setting("", "Model folder; the tokenizer is the policy's.")
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", "Type; 'auto': compute.dtype.")
    weights_dtype: Literal["auto", "int8"] = setting(
        "auto", "Type of the layers' matrices: 'auto' (dtype), or 'int8' with a scale per channel."
    )


@section
class Lora:
    """Low-rank adapters instead of all parameters."""

    rank: CountOr0 = setting(0, "Rank of the adapters; only they are trained; 0: no adapters.")
    alpha: Positive = setting(32.0, "Adapters add x A B times alpha / rank.", read=IF_LORA)
    rslora: bool = setting(False, "Divide alpha by the square root of the rank.", read=IF_LORA)
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

    dtype: Dtype = setting("float32", "Type of computation, 'float32' or 'bfloat16'.")
    remat: Literal["none", "full", "dots", "attention", "offload"] = setting(
        "none", "Recomputed by the backward pass; 'offload': inputs on the host.", may_change=True
    )
    scan_unroll: Count = setting(1, "Layers per iteration of the training scan.", may_change=True)
    attention: Literal["auto", "plain", "blocked", "splash", "cudnn"] = setting(
        "auto", "Attention kernel in training; 'splash': TPU; 'cudnn': GPU.", may_change=True
    )
    logprob_chunk_tokens: Count = setting(2048, "Tokens with logits at a time.", may_change=True)


@section
class Packing:
    """Rows of packed prompts and responses."""

    row_tokens: int = setting(
        256, "Tokens per row; 'auto' (-1): the longest response, or 2 to 4 times that.", auto=-1
    )
    rows_per_microbatch: Count = setting(
        16, "Rows per gradient, all devices; fewer if 'auto' makes the rows longer."
    )
    share_prompts: bool = setting(
        True, "Pack a prompt once for several responses if that is less work; not in sft and dpo."
    )


SizeOrRest = Annotated[int, Range(above=0, also=-1)]  # -1: the devices that are left


@section
class OneMesh:
    """Device mesh. Batch is split over data x fsdp x expert, weights over fsdp x expert x context x
    tensor."""

    data: SizeOrRest = setting(1, "Replicas of the weights; -1: all devices that are left.")
    fsdp: SizeOrRest = setting(-1, "Shards of weights and optimizer; -1: all that are left.")
    tensor: Count = setting(1, "Shards along heads, mlp and vocabulary.")
    expert: Count = setting(1, "Shards of the experts; other layers treat this axis like fsdp.")
    context: Count = setting(1, "Shards of a row; row_tokens must be a multiple of twice that.")
    decode_tensor: Count = setting(1, "More tensor shards in decoding; as fsdp in training.")


@section
class Mesh(OneMesh):
    """Device mesh, or one to learn and one to sample. Batch is split over data x fsdp, weights over
    fsdp x tensor."""

    sampler_share: Below1 = setting(0.0, "Share of a process's devices that only sample; 0: none.")


@section
class Examples:
    """Worked examples of the embedded tasks."""

    errors: bool = setting(
        True, "Make some errors.", read=When("examples.direct_share", lambda share: share == 0)
    )
    direct_share: Below1 = setting(0.0, "Fraction answering at once; others ramble or use tools.")
    min_terms: int = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")


@section
class Data:
    """Problems with known answers."""

    source: str = setting(
        "arithmetic",
        "NAME or NAME=WEIGHT, comma-separated: arithmetic, multi_digit_sums, word_problems, "
        "gym:TASK, verifiers:ID, or a file, folder or glob (also gs://) of jsonl, json, csv (.gz "
        "too), parquet or arrow; a bare name or the hub's OWNER/NAME is looked up in `folder`.",
    )
    heldout_source: str = setting("", "Held-out problems, all of them; empty: some of `source`.")
    fields: str = setting("", "Fields of rows: KEY=FIELD,.., as problem=question,answer=meta.x.")
    folder: str = setting("data", "Folder in which bare names are looked up.")
    bad_rows_limit: CountOr0 = setting(10, "Malformed rows of a source that are skipped.")
    template: str = setting(
        "none", "none, dapo, r1, qwen_math, few_shot, chat; a text or file with {problem} or jinja."
    )
    user_template: str = setting(
        "", "With 'chat', the user's turn: a text or file as for `template`.", read=IF_CHAT
    )
    few_shot: Count = setting(4, "Worked examples before the problem.", read=FEW_SHOT)
    system_prompt: str = setting("", SYSTEM_PROMPT, read=SHOWS_SYSTEM)
    difficulty: str = setting("", "LOW..HIGH: pass rates to train on, as 0.1..0.9; empty: all.")
    difficulty_file: str = setting(
        "", "Pass rates of `evaluate --write_difficulty`.", read=When("data.difficulty")
    )
    train_problems: Count = setting(20_000, "Generated problems per pass.")
    heldout_problems: AutoCount = setting(
        -1, "Problems for evaluation, never trained on; 0: none; -1: 256, at most 1 in 5 of a file."
    )
    min_terms: int = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")
    max_prompt_tokens: Count = setting(32, "Longest prompt, in tokens.")
    overlong_prompts: Literal["truncate_left", "drop"] = setting(
        "truncate_left", "'truncate_left' keeps the end of a longer prompt, 'drop' skips it."
    )
    changed: Literal["refuse", "allow"] = setting(
        "refuse", "If a resumed run has other problems: 'refuse' or 'allow'.", may_change=True
    )

    def count(self, split: str) -> int:
        """Return the number of generated problems of a split, 'train' or 'heldout'."""
        return self.heldout_count() if split == "heldout" else self.train_problems

    def heldout_count(self) -> int:
        """Return the number of problems to hold out, if there are enough."""
        return DEFAULT_HELDOUT if self.heldout_problems < 0 else self.heldout_problems


@section
class OwnData:
    """A user's own examples, or pairs of them."""

    source: str = setting(
        "arithmetic",
        "A file, folder or glob (also gs://) of jsonl, json, csv, parquet or arrow; a bare name is "
        "looked up in `folder`. For sft also arithmetic, multi_digit_sums: generated (`examples`), "
        "and word_problems, calculator_problems, gym:TASK: `generated_examples` of them.",
    )
    folder: str = setting("data", "Folder for a bare name.")
    fields: str = setting("", "Fields of rows: KEY=FIELD,.., as prompt=question,response=meta.x.")
    bad_rows_limit: CountOr0 = setting(10, "Malformed rows that are skipped.")
    template: str = setting("none", "Template of plain prompts: as for problems, no few_shot.")
    system_prompt: str = setting("", SYSTEM_PROMPT)
    heldout_examples: AutoCount = setting(-1, "Examples for evaluation; -1: 1 in 20, up to 256.")
    generated_examples: Count = setting(400, "Number of generated examples.", read=MADE_ROWS)
    passes: Positive = setting(3.0, "Passes over the examples, if total_steps is 0.")
    overlong: Literal["drop", "cut"] = setting(
        "drop", "Examples longer than packing.row_tokens: 'drop' them, or 'cut' their end."
    )


@section
class Rollout:
    """Responses that a step collects and trains on."""

    prompts_per_step: Count = setting(32, "Prompts of a step, each with a group of responses.")
    samples_per_prompt: Count = setting(16, "Responses per prompt: the size of a group (G).")
    updates_per_rollout: Count = setting(4, "Optimizer steps per rollout batch (U), in data order.")
    max_sample_rounds: Count = setting(10, "Limit of asked prompts, in units of prompts_per_step.")
    staleness: CountOr0 = setting(
        0, "Updates that each step's policy is behind: sampling overlaps; needs a correction."
    )
    carry_over: Literal["none", "unfinished", "all"] = setting(
        "none", "Surplus responses that the next step resumes; needs algorithm.importance_cap."
    )
    carry_over_max_age: Count = setting(
        2, "Most steps that a group is carried.", read=When("rollout.carry_over", "unfinished all")
    )
    when_starved: Literal["partial", "stop"] = setting(
        "partial", "If the last round leaves too few groups: 'partial' trains on them, 'stop' ends."
    )
    curriculum: Literal["none", "pools"] = setting(
        "none",
        "'pools': a problem whose group was all right or all wrong is requested more rarely.",
    )
    resting_rate: Rate = setting(
        0.25,
        "Fraction of its turns in which such a problem is requested, until its group has a signal.",
        read=When("rollout.curriculum", "pools"),
    )
    when_broken: Literal["drop", "resample"] = setting(
        "drop",
        "If the rewards of over half of a group, or of all but one response, failed: 'drop' it, or "
        "'resample' it once.",
    )
    reward_bursts: AutoCount = setting(
        AUTO, "Bursts until decoding waits for rewards; 0: never.", auto=AUTO, may_change=ON_POLICY
    )


@section
class Environment:
    """The environment that answers the policy between its turns; none: responses of one turn."""

    name: str = setting(
        "",
        "calculator, guessing, second_try, openenv:module:Class, gymnasium:ID, verifiers:ID, "
        "module:Class.",
    )
    tools: str = setting("", "Tools of the policy: module:function, comma-separated.")
    max_turns: Count = setting(8, "Limit of turns of a trajectory.")
    max_drawn_tokens: CountOr0 = setting(
        0, "Limit of sampled tokens of a trajectory; 0: max_response_tokens (with observations)."
    )
    max_observation_tokens: Count = setting(256, "Limit of an observation; a longer one is cut.")
    rewards: Literal["sum", "last", "steps"] = setting(
        "sum", "Reward of a trajectory: 'sum' or 'last' of its steps, or per turn ('steps')."
    )
    step_seconds: Positive = setting(5.0, "A longer step is killed and reported.", may_change=True)
    workers: Count = setting(4, "Processes that run steps in parallel.", may_change=True)
    wait_bursts: Count = setting(1, "Bursts before decoding waits.", may_change=ON_POLICY)

    @property
    def used(self) -> bool:
        """True if trajectories have turns."""
        return bool(self.name or self.tools)


@section
class Sampler:
    """The decoding engine."""

    slots: Count = setting(128, "Responses decoded in parallel.", may_change=ON_POLICY)
    keep_turns: bool = setting(False, "Keep slot and cache between turns.", read=IF_TURNS)
    burst_tokens: Count = setting(8, "Decode steps per call.", may_change=ON_POLICY)
    first_window_tokens: Count = setting(
        64, "First cache length; it doubles as responses outgrow it.", may_change=True
    )
    load_layers: CountOr0 = setting(0, "Layers copied at once; 0: all.", may_change=True)
    max_response_tokens: Count = setting(96, "Limit of a response; a longer one is truncated.")
    temperature: Annotated[float, Range(at_least=0.001, at_most=100.0)] = setting(
        1.0, "Softmax temperature."
    )
    top_p: Share = setting(1.0, "Nucleus sampling; below 1 the importance ratio is biased.")
    top_k: CountOr0 = setting(0, "Keep the k likeliest tokens; 0 keeps all; biases the ratio too.")
    cache: Cache = setting("auto", "Cache layout; 'auto': paged on TPU.", may_change=ON_POLICY)
    page_tokens: Count = setting(
        128, "Tokens per cache page; a multiple of 8 on TPU.", read=PAGED, may_change=ON_POLICY
    )
    pages: CountOr0 = setting(0, "Cache pages; 0: as needed.", read=PAGED, may_change=ON_POLICY)
    prefill_prompts: Count = setting(
        8, "Prompts per prefill call, rounded up to a multiple of data x fsdp.", may_change=True
    )
    prefill_chunk_tokens: CountOr0 = setting(
        2048, "Longer prompts are prefilled in chunks of this length; 0: never.", may_change=True
    )
    cache_dtype: Literal["auto", "int8", "int8_per_head"] = setting(
        "auto", "Type of keys and values; int8: a scale per token and head; 'auto': compute.dtype."
    )
    weights_dtype: Literal["auto", "int8", "int8_products"] = setting(
        "auto", "Type of matrices in decoding; int8 has a scale per channel; 'auto': compute.dtype."
    )
    engine: str = setting(
        "own",
        "What samples: 'own', 'samplers' (of `dapo-jax sampler`), 'vllm', or a package's.",
        may_change=True,
    )


@section
class SamplersSettings:
    """Processes of `dapo-jax sampler` that sample groups for a run (`sampler.engine=samplers`)."""

    host: str = setting("127.0.0.1", "Address for samplers.", read=IF_SAMPLERS, may_change=True)
    port: Port = setting(
        8200, "Port for samplers; 0: any that is free.", read=IF_SAMPLERS, may_change=True
    )
    key_file: str = setting(
        "", "File with the samplers' key; empty: DAPO_API_KEY.", read=IF_SAMPLERS, may_change=True
    )
    lease_seconds: Positive = setting(
        60.0, "Silence that ends a sampler's leases.", read=IF_SAMPLERS, may_change=True
    )


@section
class VllmSettings:
    """Servers of vLLM that sample for a run (`sampler.engine=vllm`)."""

    servers: Url = setting(
        "", "URLs of the servers, comma-separated.", read=IF_VLLM, may_change=True
    )
    folder: str = setting(
        "",
        "Folder of adapters, which the servers see too; empty: RUN/adapters.",
        read=IF_VLLM,
        may_change=True,
    )


@section
class Extras:
    """Settings of extras."""

    samplers: SamplersSettings = part(SamplersSettings)
    vllm: VllmSettings = part(VllmSettings)


@section
class ModelJudge:
    """A language model behind OpenAI's chat endpoint that grades responses (part `judge`).

    The key is read from the environment variable OPENAI_API_KEY."""

    url: Url = setting("http://127.0.0.1:8000/v1", "Address of the endpoint, up to /v1.")
    model: str = setting("", "Name of the judge at the endpoint.")
    rubric: str = setting(
        "Does the response solve the problem?",
        "What the score measures, if the row has no column `rubric`.",
    )
    highest: Count = setting(10, "Highest score, which is a reward of 1; the lowest is 0.")
    structured: bool = setting(
        True, "Ask for JSON by a schema (response_format); false for `dapo-jax serve`."
    )
    temperature: Temperature = setting(0.0, "Softmax temperature of the judge.")
    max_tokens: Count = setting(1024, "Limit of a reply.")
    retries: CountOr0 = setting(3, "Further tries without a reply or score.", may_change=True)
    request_seconds: Positive = setting(120.0, "Limit of a request.", may_change=True)
    concurrency: Count = setting(16, "Requests at a time.", may_change=True)
    cache: str = setting("runs/judge_cache", "Folder of replies; empty: none.", may_change=True)
    input_price: PositiveOr0 = setting(0.0, "Price of 10^6 prompt tokens.", may_change=True)
    output_price: PositiveOr0 = setting(0.0, "Price of 10^6 reply tokens.", may_change=True)


@section
class Reward:
    """Rewards of a response, and the processes that compute them."""

    verifier: str = setting(
        "final_number",
        "How answers are read and compared: final_number, math, math_box, math_label, dapo, code "
        "(run with the row's tests), or your module:function.",
    )
    unfinished: Literal["wrong", "right"] = setting(
        "wrong", "A correct value that is not worked out, as 102^2-98^2 for 800.", read=BY_VALUE
    )
    percent: Literal["exact", "as_asked"] = setting(
        "exact", "'exact': 20% is 0.2; 'as_asked': 20 if the problem asks for %.", read=BY_VALUE
    )
    parts: str = setting(
        "rule=1",
        "name=weight, comma-separated: rule, tests, format, think_format, repetition, model, "
        "judge, gym, environment, or your module:function.",
    )
    model_folder: str = setting("", "Reward model (one label) of the part 'model'.")
    correct: Literal["verifier", "threshold", "spread"] = setting(
        "verifier", "Verdict of dynamic sampling: verifier, reward >= threshold, spread in a group."
    )
    threshold: float = setting(
        0.5, "Smallest raw reward of a correct response.", read=When("reward.correct", "threshold")
    )
    min_spread: PositiveOr0 = setting(
        1e-6, "Spread that a group must exceed.", read=When("reward.correct", "spread")
    )
    workers: Count = setting(1, "Threads that compute rewards, with processes.", may_change=True)
    timeout_seconds: Positive = setting(
        5.0,
        "A worker that needs longer for a response or group is killed, and asked again once for 4 "
        "times as long.",
        may_change=True,
    )
    concurrency: Count = setting(64, "Calls of an async function at a time.", may_change=True)
    judge: ModelJudge = part(ModelJudge, read=IF_JUDGE)

    def needs_answer(self) -> bool:
        """Return True if responses are compared with the gold answer."""
        decides = self.correct == "verifier" or not set(OF_THE_ANSWER).isdisjoint(self.weights())
        plugin = registry.find("verifiers", self.verifier)
        return decides and getattr(plugin, "reads_answers", True)

    def reads_verdicts(self) -> bool:
        """Return True if a reward or the choice of groups depends on the verifier."""
        read = {*OF_THE_ANSWER, "tests", "format"}
        return self.correct == "verifier" or not read.isdisjoint(self.weights())

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
    """AdamW or Muon; warm-up and schedule count rollout steps."""

    learning_rate: AutoRate = setting(
        float(AUTO),
        "Peak rate; 'auto' (-1): by the number of parameters, more for adapters.",
        auto=AUTO,
    )
    schedule: Schedule = setting("constant", "Learning rate after the warm-up.")
    warmup_steps: AutoCount = setting(
        AUTO, "Rollout steps with a rising rate; 'auto' (-1): a tenth, at most 20.", auto=AUTO
    )
    beta1: Below1 = setting(0.9, "Decay of the first moment.")
    beta2: Below1 = setting(0.999, "Decay of the second moment.")
    eps: Positive = setting(1e-8, "Added to the root of the second moment.")
    weight_decay: PositiveOr0 = setting(0.1, "Weight decay, on matrices only.")
    max_grad_norm: Annotated[float, Range(above=0, at_most=1e15)] = setting(
        1.0, "Gradients are scaled down to this global norm."
    )
    max_skipped_steps: int = setting(
        3, "Steps in a row without finite updates before exit code 4; 0: never.", may_change=True
    )
    name: Literal["adamw", "muon"] = setting(
        "adamw", "'muon': Muon for the matrices of layers, 'adamw' for everything else."
    )


@section
class Critic:
    """The value model of an algorithm with a critic."""

    folder: str = setting("", "Start model; empty: model.folder.", read=IF_CRITIC)
    pretrain_steps: AutoCount = setting(
        -1, "First rollout steps that train only the critic; -1: algorithm.critic_pretrain_steps."
    )
    optimizer: Optimizer = part(Optimizer, read=IF_CRITIC)


@section
class Checkpoint:
    """Orbax checkpoints in run_dir/checkpoints."""

    every_steps: CountOr0 = setting(10, "Rollout steps between saves; 0 saves only at the end.")
    keep: Count = setting(2, "Number of newest checkpoints to keep.")
    keep_groups: bool = setting(False, "Save scored groups at once: a kill loses no response.")
    leave_seconds: PositiveOr0 = setting(30.0, "Longest wait of a signal for a save; 0: no limit.")


@section
class Evaluation:
    """Sampled accuracy on held-out problems."""

    every_steps: CountOr0 = setting(10, "Steps between evaluations; 0: only before and after.")
    samples_per_problem: Count = setting(4, "Responses per problem (k of avg@k).")
    temperature: Temperature = setting(1.0, "Softmax temperature while evaluating; 0: greedy.")
    top_p: Share = setting(0.7, "Nucleus fraction while evaluating; the default is DAPO's.")
    out: str = setting("", "Output of dapo-jax evaluate; empty: a folder in run_dir/evaluations.")
    write_difficulty: str = setting("", "File for each problem's pass rate; empty: none.")


@section
class Log:
    """Console, metric writers and recorded rollouts."""

    show_group_every_steps: CountOr0 = setting(10, "Show one group as a table; 0: never.")
    console: bool = setting(True, "Print to the console; false: nothing, not even warnings.")
    tensorboard: bool = setting(False, "Write TensorBoard event files (needs its package).")
    wandb: str = setting("", "Weights & Biases project (needs its package); empty: none.")
    sinks: str = setting(
        "", "Further receivers, comma-separated: of installed packages, or your module:Class."
    )
    rollouts: bool = setting(True, "Write every scored response to rollouts/ and evaluations/.")
    rollouts_keep: CountOr0 = setting(0, "Newest files of rollouts/ to keep; 0: all.", read=RECORDS)
    token_groups: CountOr0 = setting(1, "Groups per step with tokens in rollouts/.", read=RECORDS)
    token_ratios: bool = setting(False, "Ratios and clips of those tokens.", read=SHOWS_RATIOS)
    report: bool = setting(True, "Write report.html at the end.")


@section
class Watch:
    """Limits of metrics: beyond them a step prints a warning, or the run stops. 0: not watched."""

    min_entropy: PositiveOr0 = setting(0.005, "Lower limit of `entropy`, in nats.")
    max_length_growth: PositiveOr0 = setting(
        2.0, "Limit of `response_tokens_mean` relative to its mean in the ten steps before."
    )
    max_all_right: PositiveOr0 = setting(0.9, "Limit of `all_right_fraction`.")
    max_all_wrong: PositiveOr0 = setting(0.9, "Limit of `all_wrong_fraction`.")
    max_answer_not_found: PositiveOr0 = setting(0.5, "Limit of `answer_not_found_rate`.")
    max_failed_rewards: Unit = setting(
        0.5, "Limit of `failed_rewards`: beyond it the run saves and stops with exit code 3."
    )


# With other schedules, the rate of every step depends on total_steps.
CONSTANT_RATES = When(
    "optimizer.schedule algorithm.critic critic.optimizer.schedule",
    lambda policy, has_critic, critic: policy == "constant" == (critic if has_critic else policy),
)
IF_MERGED = When("weights", "merged")
GENERATES = When("data.source", " ".join(GENERATED))
READS_FILES = When("data.source", lambda source: source not in GENERATED)


@section
class Config:
    """A reinforcement-learning run (`dapo-jax train`, `dapo-jax evaluate`)."""

    run_dir: str = setting("runs/dapo", "Output folder; resumed if it exists.", may_change=True)
    seed: Seed = setting(0, "Random seed.")
    total_steps: Count = setting(20, "Rollout steps.", may_change=CONSTANT_RATES)
    algorithm: Algorithm = part(Algorithm)
    model: Model = part(Model)
    teacher: Teacher = part(Teacher, read=IF_TEACHER)
    lora: Lora = part(Lora)
    compute: Compute = part(Compute)
    data: Data = part(Data)
    rollout: Rollout = part(Rollout)
    environment: Environment = part(Environment, read=IF_TURNS)
    sampler: Sampler = part(Sampler)
    reward: Reward = part(Reward)
    optimizer: Optimizer = part(Optimizer)
    critic: Critic = part(Critic)
    packing: Packing = part(Packing, may_change=True)
    mesh: Mesh = part(Mesh, may_change=True)
    checkpoint: Checkpoint = part(Checkpoint, may_change=True)
    evaluation: Evaluation = part(Evaluation, may_change=True)
    log: Log = part(Log, may_change=True)
    watch: Watch = part(Watch, may_change=True)
    extras: Extras = part(Extras)

    def rows(self) -> Packing:
        """Return the packing that is compiled first: 'auto' begins with the shortest rows."""
        if self.packing.row_tokens > 0:
            return self.packing
        longest = self.longest_tokens()
        unit = 128 if longest > 512 else 8  # attention on TPU needs multiples of 128
        unit *= 2 * self.mesh.context if self.mesh.context > 1 else 1  # for each shard of a row
        return dataclasses.replace(self.packing, row_tokens=-(-longest // unit) * unit)

    def longest_tokens(self) -> int:
        """Return the largest number of tokens of a prompt and its response."""
        return self.data.max_prompt_tokens + self.sampler.max_response_tokens

    def drawn_budget(self) -> int:
        """Return the largest number of sampled tokens of a response or a trajectory."""
        limit = self.sampler.max_response_tokens
        return min(self.environment.max_drawn_tokens or limit, limit)

    def reward_bursts(self) -> int:
        """Return after how many bursts rewards are read; 0: as soon as they are there."""
        counts = self.rollout.carry_over != "none" or self.environment.used
        return int(counts) if self.rollout.reward_bursts < 0 else self.rollout.reward_bursts

    def critic_pretrain_steps(self) -> int:
        """Return the number of first steps that train only the critic."""
        steps = self.critic.pretrain_steps
        return self.algorithm.critic_pretrain_steps if steps < 0 else steps


@section
class SftConfig:
    """A supervised run on examples (`dapo-jax sft`); writes a model folder."""

    out: str = setting("runs/base", "Model folder to write; replaces an earlier one of sft.")
    seed: Seed = setting(0, "Random seed.")
    start: str = setting("", "Model folder to start from; empty: random weights of `architecture`.")
    total_steps: CountOr0 = setting(0, "Optimizer steps; 0: as data.passes requires.")
    examples_per_step: Count = setting(32, "Examples per optimizer step.")
    save_every_steps: Count = setting(100, "Steps between checkpoints, next to `out`.")
    architecture: Architecture = part(Architecture, read=When("start", lambda start: not start))
    lora: Lora = part(Lora)
    compute: Compute = part(Compute)
    data: OwnData = part(OwnData, read=READS_FILES)
    examples: Examples = part(Examples, read=GENERATES)
    max_response_tokens: Count = setting(160, "Longest example; others are cut.", read=GENERATES)
    optimizer: Optimizer = part(lambda: Optimizer(schedule="cosine"))
    packing: Packing = part(Packing, may_change=True)
    mesh: OneMesh = part(OneMesh, may_change=True)


@section
class DpoConfig:
    """Preference optimisation on offline pairs (`dapo-jax dpo`); writes a model folder."""

    out: str = setting("runs/dpo", "Model folder to write; replaces an earlier one of dpo.")
    seed: Seed = setting(0, "Random seed.")
    start: str = setting("", "Model folder to start from.")
    reference: str = setting("", "The frozen reference policy; empty: `start`.")
    beta: Positive = setting(0.1, "DPO's beta: strength of a margin, in 1 / nats.")
    lora: Lora = part(Lora)
    total_steps: CountOr0 = setting(0, "Optimizer steps; 0: as data.passes requires.")
    pairs_per_step: Count = setting(32, "Pairs per optimizer step.")
    save_every_steps: Count = setting(100, "Steps between checkpoints, next to `out`.")
    compute: Compute = part(Compute)
    data: OwnData = part(lambda: OwnData(source="", passes=1.0))
    optimizer: Optimizer = part(lambda: Optimizer(schedule="linear"))
    packing: Packing = part(Packing, may_change=True)
    mesh: OneMesh = part(OneMesh, may_change=True)


@section
class ExportConfig:
    """Export of a checkpoint as a model folder (`dapo-jax export`)."""

    run: str = setting("", "The run_dir with the policy, or a folder of PEFT's adapters.")
    out: str = setting("", "Model folder to write; new, empty, or an earlier export.")
    step: CountOr0 = setting(0, "Step of the checkpoint; 0: the newest.")
    model: str = setting("", "Folder with its config and tokenizer; empty: the run's model.folder.")
    weights: Literal["merged", "adapter"] = setting(
        "merged", "For runs with adapters: 'merged' weights and OUT.adapter, or only the 'adapter'."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Type of weights; 'auto': the model folder's.", read=IF_MERGED
    )
    max_shard_gb: Positive = setting(5.0, "Largest weight file, in 10^9 bytes.", read=IF_MERGED)
    base_model: str = setting("", "OWNER/NAME of the start model on the hub, for the model card.")
    datasets: str = setting("", "Data sets on the hub, comma-separated, for the model card.")
    license: str = setting("", "Licence for the model card, as apache-2.0; empty: no entry.")


@section
class ReportConfig:
    """One page that shows runs (`dapo-jax report`)."""

    run: str = setting("", "The run_dir of a run, or a glob of several; may be repeated.")
    out: str = setting("report.html", "The page to write; an earlier report is replaced.")


@section
class InitConfig:
    """A config for a file of problems (`dapo-jax init`)."""

    data: str = setting("", "File of problems, with or without answers.")
    out: str = setting("", "Output folder; empty: a new folder named after the file.")
    question: str = setting("", "Field of the problem: a text or messages; a.b is a nested field.")
    answer: str = setting("", "Field of the answer, or of a worked solution that ends with it.")
    model: str = setting("models/Qwen2.5-0.5B-Instruct", "Model folder of the policy.")


@section
class DoctorConfig:
    """Checks of this machine (`dapo-jax doctor`)."""

    out: str = setting("", "Folder to time and for doctor.json; empty: nothing is written.")
    short: bool = setting(False, "Check small sizes, in a minute.")


@section
class SamplerConfig:
    """A process that samples groups for a trainer (`dapo-jax sampler`)."""

    run: str = setting("", "The run_dir of the run, for its settings and the policy's weights.")
    trainer: Url = setting("", "URL of the trainer, as http://HOST:8200.")
    model: str = setting("", "Its model folder; empty: the run's.")
    key_file: str = setting("", "File with the trainer's key; empty: DAPO_API_KEY, if set.")
    slots: CountOr0 = setting(0, "Responses decoded in parallel; 0: as the trainer.")
    pages: CountOr0 = setting(0, "Cache pages; 0: as the trainer.")
    stall_seconds: Positive = setting(
        1800.0, "Time in one burst, compiling included, after which its leases end."
    )
    mesh: OneMesh = part(OneMesh)


@section
class ServeConfig:
    """A served policy (`dapo-jax serve`)."""

    model: str = setting("", "Folder in Hugging Face layout, or a run: its newest checkpoint.")
    served_name: str = setting("", "Model name for HTTP clients; empty: the folder's name.")
    host: str = setting("127.0.0.1", "Address to listen on; the default is this machine only.")
    http_port: Port = setting(8000, "Port of OpenAI's HTTP protocol; 0: any that is free.")
    metrics_port: Port = setting(0, "HTTP port of the Prometheus metrics; 0: none.")
    max_prompt_tokens: Annotated[int, Range(at_least=1, at_most=32_767, also=-1)] = setting(
        -1, "Longest prompt; 'auto' (-1): the context, or what fits into memory.", auto=-1
    )
    max_response_tokens: Annotated[int, Range(above=0, also=-1)] = setting(
        -1, "Largest max_tokens of a request. 'auto' (-1): the remaining context.", auto=-1
    )
    default_max_tokens: Annotated[int, Range(above=0, also=-1)] = setting(
        1024, "max_tokens of a request without it; 'auto' (-1): the largest.", auto=-1
    )
    slots: Count = setting(32, "Responses decoded in parallel.")
    waiting: Count = setting(128, "Responses that wait for a slot; more are rejected.")
    temperature: Temperature = setting(1.0, "Softmax temperature; 0: greedy. Requests may set it.")
    top_p: Share = setting(1.0, "Nucleus fraction. Requests may set it.")
    top_k: CountOr0 = setting(0, "Keep the k likeliest tokens; 0: all. Requests may set it.")
    seed: Seed = setting(0, "Random seed; samples also depend on the order of requests.")
    dtype: Dtype = setting("float32", "Type of the weights, 'float32' or 'bfloat16'.")
    weights_dtype: Literal["auto", "int8"] = setting(
        "auto", "Type of matrices but the embedding: 'auto' (dtype), or 'int8' scaled per channel."
    )
    cache: Cache = setting("auto", "Cache layout: 'auto' (paged on TPU), 'slots' or 'paged'.")
    api_key_file: str = setting("", "File with the clients' key; empty: DAPO_API_KEY, if set.")
    allowed_hosts: str = setting("", "Other names of this server, comma-separated; '*': any.")
    max_body_mb: Positive = setting(1.0, "Largest body of a request, in 10^6 bytes.")
    max_connections: Count = setting(1000, "Connections; more are rejected.")
    request_seconds: Positive = setting(10.0, "Seconds for a request's body to arrive.")
    idle_seconds: Positive = setting(5.0, "Seconds that an idle HTTP connection is kept.")
    shutdown_seconds: PositiveOr0 = setting(20.0, "Time for running requests after SIGTERM.")
    log_requests: bool = setting(True, "Print a line when a request ends.")
    tinker: bool = setting(
        False, "Serve Tinker's training API on http_port, and its weights under /v1."
    )
    tinker_dir: str = setting(
        "runs/tinker", "Folder of its models, checkpoints and requests.", read=IF_TINKER
    )
    tinker_stable_reinforce: Literal["", "cispo", "importance_sampling", "ppo"] = setting(
        "", "Loss to compute for 'stable_reinforce'; 'cispo' is the nearest.", read=IF_TINKER
    )
    tinker_models: Count = setting(
        8, "Its trained models in memory; more wait on disk.", read=IF_TINKER
    )
    mesh: OneMesh = part(OneMesh, may_change=True)
