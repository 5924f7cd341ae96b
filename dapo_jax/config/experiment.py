"""Experiments of the commands and their sections of settings.

A file in `configs/` returns an experiment; the command line overrides its settings.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.settings import AUTO, Section, open_extras, part, setting
from dapo_jax.runtime import registry
from dapo_jax.types.errors import require
from dapo_jax.types.rules import (
    AutoCount,
    Below1,
    Count,
    CountOr0,
    Dtype,
    Positive,
    PositiveOr0,
    Range,
    Seed,
    Share,
    Temperature,
    Unit,
)

DEFAULT_HELDOUT = 256
ANSWER_PARTS = ("rule", "gym")  # reward parts that compare with the gold answer
# Reward parts without a verdict.
SHAPING = ("format", "think_format", "repetition", "overlong", "length")
SYSTEM_PROMPT = "System message for rows without one, if the template shows it; empty: none."

Schedule = Literal["constant", "linear", "cosine"]
Rate = Annotated[float, Range(above=0, at_most=1.0)]
Heat = Annotated[float, Range(at_least=0.001, at_most=100.0)]
Norm = Annotated[float, Range(above=0, at_most=1e15)]
AutoRate = Annotated[float, Range(above=0, at_most=1.0, also=AUTO)]
SizeOrRest = Annotated[int, Range(above=0, also=AUTO)]  # -1: the devices that are left
AtLeast2 = Annotated[int, Range(at_least=2)]
Cache = Literal["auto", "slots", "paged"]
Overlong = Literal["truncate_left", "drop"]
Carry = Literal["none", "unfinished", "all"]


def is_on_policy(settings: Mapping[str, Any]) -> bool:
    """Return True unless sampling decides which responses the next step gets."""
    return settings["rollout.carry_over"] == "none"


def has_constant_rates(settings: Mapping[str, Any]) -> bool:
    """Return True if no rate of a step depends on total_steps."""
    names = ["optimizer.schedule"] + ["critic.optimizer.schedule"] * settings["algorithm.critic"]
    return all(settings[name] == "constant" for name in names)


class Model(Section):
    """The policy to train, and its reference."""

    folder: str = setting("", "Folder in Hugging Face layout, or dapo_jax:arithmetic_base.")
    reference_folder: str = setting("", "Reference policy; empty: `folder`.")
    freeze_layers: Below1 = setting(0.0, "Fraction of first layers that are not trained.")


class Lora(Section):
    """Low-rank adapters instead of all parameters."""

    combinations: ClassVar = """
        lora.folder!= -> lora.rank>0: r of its adapter_config.json
        lora.rank>0 -> optimizer.name=adamw: adapters are trained by AdamW alone
        lora.rank=0 -> lora.alpha lora.rslora lora.targets
    """
    rank: CountOr0 = setting(0, "Rank of the adapters; only they are trained; 0: no adapters.")
    alpha: Positive = setting(32.0, "Adapters add x A B times alpha / rank.")
    rslora: bool = setting(False, "Divide alpha by the square root of the rank.")
    targets: str = setting("query,key,value,out,gate,up,down", "Adapted matrices, comma-separated.")
    folder: str = setting("", "Adapters to start from, in PEFT's format; empty: new ones.")


class Compute(Section):
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


class Packing(Section):
    """Rows of packed prompts and responses."""

    may_change: ClassVar = True
    row_tokens: SizeOrRest = setting(256, "Tokens per row; 'auto' (-1): 1 to 4 longest responses.")
    rows_per_microbatch: Count = setting(
        16, "Rows per gradient, all devices; fewer if 'auto' makes the rows longer."
    )
    share_prompts: bool = setting(
        True, "Pack a prompt once for several responses if that is less work; not in sft and dpo."
    )
    single_responses: bool = setting(False, "A row per response; sampler.engine=exact needs it.")


class OneMesh(Section):
    """Device mesh. Batch is split over data x fsdp x expert, weights over fsdp x expert x context x
    tensor."""

    may_change: ClassVar = True
    combinations: ClassVar = "mesh.data=-1 -> mesh.fsdp>0: only one is the rest"
    data: SizeOrRest = setting(1, "Replicas of the weights; -1: all devices that are left.")
    fsdp: SizeOrRest = setting(-1, "Shards of weights and optimizer; -1: all that are left.")
    tensor: Count = setting(1, "Shards along heads, mlp and vocabulary.")
    expert: Count = setting(1, "Shards of the experts; other layers treat this axis like fsdp.")
    context: Count = setting(1, "Shards of a row; row_tokens must be a multiple of twice that.")
    decode_tensor: Count = setting(1, "More tensor shards in decoding; as fsdp in training.")


class Mesh(OneMesh):
    """Device mesh, or one to learn and one to sample. Batch is split over data x fsdp, weights over
    fsdp x tensor."""

    sampler_share: Below1 = setting(0.0, "Fraction of each host's devices reserved for sampling.")


class Examples(Section):
    """Worked examples of the embedded tasks."""

    combinations: ClassVar = "-> examples.min_terms<=examples.max_terms"
    errors: bool = setting(True, "Make some errors, if `direct_share` is 0.")
    direct_share: Below1 = setting(0.0, "Fraction answering at once; others ramble or use tools.")
    min_terms: AtLeast2 = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")


class Data(Section):
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
    user_template: str = setting("", "With 'chat', the user's turn; written as `template`.")
    few_shot: Count = setting(4, "Worked examples before the problem.")
    system_prompt: str = setting("", SYSTEM_PROMPT)
    difficulty: str = setting("", "LOW..HIGH: pass rates to train on, as 0.1..0.9; empty: all.")
    difficulty_file: str = setting("", "Pass rates of `evaluate --write_difficulty`.")
    train_problems: Count = setting(20_000, "Generated problems per pass.")
    heldout_problems: AutoCount = setting(
        -1, "Problems for evaluation, never trained on; 0: none; -1: 256, at most 1 in 5 of a file."
    )
    min_terms: AtLeast2 = setting(3, "Fewest operands of a sum.")
    max_terms: int = setting(9, "Most operands of a sum.")
    max_prompt_tokens: Count = setting(32, "Longest prompt, in tokens.")
    overlong_prompts: Overlong = setting(
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


class Rollout(Section):
    """Responses that a step collects and trains on."""

    prompts_per_step: Count = setting(32, "Prompts of a step, each with a group of responses.")
    samples_per_prompt: Count = setting(16, "Responses per prompt: the size of a group (G).")
    updates_per_rollout: Count = setting(4, "Optimizer steps per rollout batch (U), in data order.")
    max_sample_rounds: Count = setting(10, "Limit of asked prompts, in units of prompts_per_step.")
    staleness: CountOr0 = setting(
        0, "Updates that each step's policy is behind: sampling overlaps; needs a correction."
    )
    carry_over: Carry = setting(
        "none", "Surplus responses that the next step resumes; needs algorithm.importance_cap."
    )
    carry_over_max_age: Count = setting(2, "Most steps that a group is carried.")
    when_starved: Literal["partial", "stop"] = setting(
        "partial", "If the last round leaves too few groups: 'partial' trains on them, 'stop' ends."
    )
    curriculum: Literal["none", "pools"] = setting(
        "none", "'pools': a problem whose group was all right or all wrong is asked more rarely."
    )
    resting_rate: Rate = setting(
        0.25, "Fraction of turns in which such a problem is requested until its group has a signal."
    )
    when_broken: Literal["drop", "resample"] = setting(
        "drop",
        "If the rewards of over half of a group, or of all but one response, failed: 'drop' it, "
        "or 'resample' it once.",
    )
    reward_bursts: AutoCount = setting(
        AUTO, "Bursts until decoding waits for rewards; 0: never.", may_change=is_on_policy
    )


class Environment(Section):
    """The environment that answers the policy between its turns; none: responses of one turn."""

    name: str = setting(
        "", "calculator, guessing, second_try, openenv:module:Class, verifiers:ID, module:Class."
    )
    tools: str = setting("", "Tools of the policy: module:function, comma-separated.")
    max_turns: Count = setting(8, "Limit of turns of a trajectory.")
    max_sampled_tokens: CountOr0 = setting(
        0, "Limit of sampled tokens of a trajectory; 0: max_response_tokens (with observations)."
    )
    max_observation_tokens: Count = setting(256, "Limit of an observation; a longer one is cut.")
    rewards: Literal["sum", "last", "steps"] = setting(
        "sum", "Reward of a trajectory: 'sum' or 'last' of its steps, or per turn ('steps')."
    )
    step_seconds: Positive = setting(5.0, "A longer step is killed and reported.", may_change=True)
    workers: Count = setting(4, "Processes that run steps in parallel.", may_change=True)
    wait_bursts: Count = setting(1, "Bursts decoded before a reply.", may_change=is_on_policy)

    @property
    def used(self) -> bool:
        """True if trajectories have turns."""
        return bool(self.name or self.tools)


class Sampler(Section):
    """The decoding engine."""

    slots: Count = setting(128, "Responses decoded in parallel.", may_change=is_on_policy)
    keep_turns: bool = setting(False, "Keep slot and cache between turns.")
    burst_tokens: Count = setting(8, "Decode steps per call.", may_change=is_on_policy)
    speculate: CountOr0 = setting(
        0, "Tokens proposed per decode step; they change no response.", may_change=is_on_policy
    )
    first_window_tokens: Count = setting(
        64, "First cache length; it doubles as responses outgrow it.", may_change=True
    )
    load_layers: CountOr0 = setting(0, "Layers copied at once; 0: all.", may_change=True)
    max_response_tokens: Count = setting(96, "Limit of a response; a longer one is truncated.")
    temperature: Heat = setting(1.0, "Softmax temperature.")
    top_p: Share = setting(1.0, "Nucleus sampling; training renormalises over the same tokens.")
    top_k: CountOr0 = setting(0, "Keep the k likeliest tokens, also in training; 0 keeps all.")
    cache: Cache = setting("auto", "Cache layout; 'auto': paged on TPU.", may_change=is_on_policy)
    page_tokens: Count = setting(
        128, "Tokens per cache page; a multiple of 8 on TPU.", may_change=is_on_policy
    )
    pages: CountOr0 = setting(0, "Cache pages; 0: as needed.", may_change=is_on_policy)
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
        "own", "'own', 'samplers', 'vllm', 'exact', or a package's.", may_change=True
    )

    @property
    def truncates(self) -> bool:
        """True if training samples from the likeliest tokens only."""
        return self.top_p < 1 or self.top_k > 0


class Reward(Section):
    """Rewards of a response, and the processes that compute them."""

    verifier: str = setting(
        "final_number",
        "How answers are read and compared: final_number, math, math_box, math_label, dapo, code "
        "(run with the row's tests), or your module:function.",
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
    threshold: float = setting(0.5, "Smallest raw reward of a correct response.")
    min_spread: PositiveOr0 = setting(1e-6, "Spread that a group must exceed.")
    workers: Count = setting(1, "Threads that compute rewards, with processes.", may_change=True)
    timeout_seconds: Positive = setting(
        5.0, "Limit per response or group; a retry has four times that.", may_change=True
    )
    concurrency: Count = setting(64, "Calls of an async function at a time.", may_change=True)

    def needs_answer(self) -> bool:
        """Return True if responses are compared with the gold answer."""
        decides = self.correct == "verifier" or not set(ANSWER_PARTS).isdisjoint(self.weights())
        plugin = registry.find("verifiers", self.verifier)
        return decides and getattr(plugin, "reads_answers", True)

    def reads_verdicts(self) -> bool:
        """Return True if a reward or the choice of groups depends on the verifier."""
        read = {*ANSWER_PARTS, "tests", "format"}
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


class Optimizer(Section):
    """AdamW or Muon; warm-up and schedule count rollout steps."""

    combinations: ClassVar = (
        "optimizer.schedule!=constant total_steps>0 -> optimizer.warmup_steps<=total_steps: "
        "it never reaches the peak rate"
    )
    learning_rate: AutoRate = setting(
        -1.0, "Peak rate; 'auto' (-1): by the number of parameters, more for adapters."
    )
    schedule: Schedule = setting("constant", "Learning rate after the warm-up.")
    warmup_steps: AutoCount = setting(AUTO, "Steps of rising rate; 'auto' (-1): a tenth, up to 20.")
    beta1: Below1 = setting(0.9, "Decay of the first moment.")
    beta2: Below1 = setting(0.999, "Decay of the second moment.")
    eps: Positive = setting(1e-8, "Added to the root of the second moment.")
    weight_decay: PositiveOr0 = setting(0.1, "Weight decay, on matrices only.")
    max_grad_norm: Norm = setting(1.0, "Gradients are scaled down to this global norm.")
    max_skipped_steps: int = setting(
        3, "Steps in a row without finite updates before exit code 4; 0: never.", may_change=True
    )
    name: Literal["adamw", "muon"] = setting(
        "adamw", "'muon': Muon for the matrices of layers, 'adamw' for everything else."
    )


class Critic(Section):
    """The value model of an algorithm with a critic."""

    combinations: ClassVar = (
        "critic.optimizer.schedule!=constant -> critic.optimizer.warmup_steps<=total_steps: "
        "it never reaches the peak rate"
    )
    folder: str = setting("", "Start model; empty: model.folder.")
    pretrain_steps: AutoCount = setting(
        -1, "First rollout steps that train only the critic; -1: algorithm.critic_pretrain_steps."
    )
    optimizer: Optimizer = part(Optimizer)


class Checkpoint(Section):
    """Orbax checkpoints in run_dir/checkpoints."""

    may_change: ClassVar = True
    every_steps: CountOr0 = setting(10, "Rollout steps between saves; 0 saves only at the end.")
    keep: Count = setting(2, "Number of newest checkpoints to keep.")
    keep_groups: bool = setting(False, "Save scored groups at once: a kill loses no response.")
    leave_seconds: PositiveOr0 = setting(30.0, "Wait for a checkpoint after SIGTERM; 0: no limit.")


class Evaluation(Section):
    """Sampled accuracy on held-out problems."""

    may_change: ClassVar = True
    every_steps: CountOr0 = setting(10, "Steps between evaluations; 0: only before and after.")
    samples_per_problem: Count = setting(4, "Responses per problem (k of avg@k).")
    temperature: Temperature = setting(1.0, "Softmax temperature while evaluating; 0: greedy.")
    top_p: Share = setting(0.7, "Nucleus fraction while evaluating; the default is DAPO's.")
    out: str = setting("", "Output of dapo-jax evaluate; empty: a folder in run_dir/evaluations.")
    write_difficulty: str = setting("", "File for each problem's pass rate; empty: none.")


class Log(Section):
    """Console, metric writers and recorded rollouts."""

    may_change: ClassVar = True
    show_group_every_steps: CountOr0 = setting(10, "Show one group as a table; 0: never.")
    console: bool = setting(True, "Print to the console; false: nothing, not even warnings.")
    tensorboard: bool = setting(False, "Write TensorBoard event files (needs its package).")
    wandb: str = setting("", "Weights & Biases project (needs its package); empty: none.")
    sinks: str = setting(
        "", "Further receivers, comma-separated: of installed packages, or your module:Class."
    )
    rollouts: bool = setting(True, "Write every scored response to rollouts/ and evaluations/.")
    rollouts_keep: CountOr0 = setting(0, "Newest files of rollouts/ to keep; 0: all.")
    token_groups: CountOr0 = setting(1, "Groups per step with tokens in rollouts/.")
    token_ratios: bool = setting(False, "Ratios and clips of those tokens.")
    report: bool = setting(True, "Write report.html at the end.")


class Watch(Section):
    """Limits of metrics: beyond them a step prints a warning, or the run stops. 0: not watched."""

    may_change: ClassVar = True
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


class Config(Section):
    """A reinforcement-learning run (`dapo-jax train`, `dapo-jax evaluate`)."""

    needs_file: ClassVar = True  # a config file has to return it
    usual_rate: ClassVar = 1e-6  # learning rate for 1e9 parameters and more
    run_dir: str = setting("runs/dapo", "Output folder; resumed if it exists.", may_change=True)
    seed: Seed = setting(0, "Random seed.")
    total_steps: Count = setting(20, "Rollout steps.", may_change=has_constant_rates)
    algorithm: Algorithm = part(Algorithm)
    model: Model = part(Model)
    lora: Lora = part(Lora)
    compute: Compute = part(Compute)
    data: Data = part(Data)
    rollout: Rollout = part(Rollout)
    environment: Environment = part(Environment)
    sampler: Sampler = part(Sampler)
    reward: Reward = part(Reward)
    optimizer: Optimizer = part(Optimizer)
    critic: Critic = part(Critic)
    packing: Packing = part(Packing)
    mesh: Mesh = part(Mesh)
    checkpoint: Checkpoint = part(Checkpoint)
    evaluation: Evaluation = part(Evaluation)
    log: Log = part(Log)
    watch: Watch = part(Watch)
    extras: Section = part(open_extras)

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

    def sampled_budget(self) -> int:
        """Return the largest number of sampled tokens of a response or a trajectory."""
        limit = self.sampler.max_response_tokens
        return min(self.environment.max_sampled_tokens or limit, limit)

    def reward_bursts(self) -> int:
        """Return after how many bursts rewards are read; 0: as soon as they are there."""
        counts = self.rollout.carry_over != "none" or self.environment.used
        return int(counts) if self.rollout.reward_bursts < 0 else self.rollout.reward_bursts

    def critic_pretrain_steps(self) -> int:
        """Return the number of first steps that train only the critic."""
        steps = self.critic.pretrain_steps
        return self.algorithm.critic_pretrain_steps if steps < 0 else steps


class ExportConfig(Section):
    """Export of a checkpoint as a model folder (`dapo-jax export`)."""

    combinations: ClassVar = "weights=adapter -> dtype max_shard_gb"
    run: str = setting("", "The run_dir with the policy, or a folder of PEFT's adapters.")
    out: str = setting("", "Model folder to write; new, empty, or an earlier export.")
    step: CountOr0 = setting(0, "Step of the checkpoint; 0: the newest.")
    model: str = setting("", "Folder with its config and tokenizer; empty: the run's model.folder.")
    weights: Literal["merged", "adapter"] = setting(
        "merged", "For runs with adapters: 'merged' weights and OUT.adapter, or only the 'adapter'."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Type of weights; 'auto': the model folder's."
    )
    max_shard_gb: Positive = setting(5.0, "Largest weight file, in 10^9 bytes.")
    base_model: str = setting("", "OWNER/NAME of the start model on the hub, for the model card.")
    datasets: str = setting("", "Data sets on the hub, comma-separated, for the model card.")
    license: str = setting("", "Licence for the model card, as apache-2.0; empty: no entry.")
