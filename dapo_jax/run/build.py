"""Parts of a run, built from its config: a function for each, and `build` for all of them.

Training, evaluation and the dry run share them. Functions down to `open_learners` need the shapes
of the models, not their weights: `plan` compiles the programs for other devices.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.markup import escape

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import Compute, Config, Mesh, OneMesh
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.prompts.templates import check_chat
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.learner.batches import CRITIC, REFERENCE, TEACHER
from dapo_jax.learner.critic import RewardModel, critic_learner, scalar_config
from dapo_jax.learner.minibatches import TokenWeights, row_choice
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.learner.update import POLICY, AveragedLearner, LearnerPrograms, Model, TokenScorer
from dapo_jax.model import (
    cudnn_attention,
    load_huggingface,
    peft_adapters,
    trainable,
    training_attention,
)
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rewards.functions import find_functions, wanted_columns
from dapo_jax.rewards.group_rewards import Judge
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.verifying import open_verifier
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.environments.registry import tool_schemas, with_reward_settings
from dapo_jax.rollout.environments.sessions import Environments
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.rollout.source import GroupSource, RolloutSource
from dapo_jax.run.console import Progress
from dapo_jax.run.notices import check_lengths
from dapo_jax.run.scores import reward_leads, settings_of
from dapo_jax.runtime import processes, registry
from dapo_jax.runtime.kept_programs import keep
from dapo_jax.runtime.registry import feature
from dapo_jax.runtime.sampler_devices import open_sampling_mesh, split_devices
from dapo_jax.runtime.sharding import AXES, DECODING, TRAINING, make_mesh, shards
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.user_code import resolve
from dapo_jax.step import Trainer
from dapo_jax.types.contracts import Sampler, do_nothing
from dapo_jax.types.errors import require

HOST = "pinned_host"  # the kind of memory that layer inputs can be offloaded to
# Fields of the decoder that are also names of logical axes.
SHARDED_SIZES = ("embed", "heads", "kv_heads", "mlp", "vocab", "experts")


def mesh_sizes(settings: OneMesh) -> dict[str, int]:
    """Return the axis sizes of a config's mesh, as keywords of `make_mesh` and `mesh_shape`."""
    return {axis: getattr(settings, axis) for axis in AXES}


def open_mesh(
    settings: OneMesh, rows_per_microbatch: int, devices: Sequence | None = None
) -> jax.sharding.Mesh:
    """Return the learning mesh of all or the given devices. Raises `ConfigError`."""
    mesh = make_mesh(**mesh_sizes(settings), devices=devices)
    pieces = shards(mesh, "batch")
    allowed = (
        f"a multiple of data x fsdp x expert x decode_tensor = {pieces}, or take the config's "
        f"variant for {mesh.size} devices if it has one"
    )
    fits = rows_per_microbatch % pieces == 0
    require(fits, "packing.rows_per_microbatch", rows_per_microbatch, allowed)
    return mesh


def open_meshes(
    settings: Mesh,
    rows_per_microbatch: int,
    training: bool = True,
    devices: Sequence | None = None,
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    """Return the learning mesh and the sampling mesh.

    They are the same mesh without `sampler_share`, and if nothing is trained.
    """
    share = settings.sampler_share if training else 0
    block = settings.expert * settings.decode_tensor * settings.tensor
    learning, sampling = split_devices(devices or jax.devices(), share, block)
    mesh = open_mesh(settings, rows_per_microbatch, learning)
    if sampling is learning:
        return mesh, mesh
    return mesh, open_sampling_mesh(mesh, learning, sampling, share)


def numerics(
    compute: Compute, mesh: jax.sharding.Mesh, row_tokens: int | None = None
) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that the run chooses, not the model folder."""
    device = mesh.devices.flat[0]
    name, context = compute.attention, shards(mesh, "sequence")
    platform = device.platform
    shape = row_tokens or 1, compute.dtype, context
    chosen = training_attention.choose(name, device, *shape)
    fits = chosen != "splash" or platform == "tpu"
    require(fits, "compute.attention", name, f"'auto', 'plain' or 'blocked' on {platform}")
    if chosen == "cudnn":
        missing = cudnn_attention.missing(device, *shape)
        require(not missing, "compute.attention", name, f"'auto' or 'blocked' without {missing}")
    unit = training_attention.LANES if chosen == "splash" else 1
    unit *= training_attention.PIECES * context if context > 1 else 1
    fits = row_tokens is None or row_tokens % unit == 0
    allowed = f"a multiple of {unit} with mesh.context = {context} and attention by {chosen}"
    require(fits, "packing.row_tokens", row_tokens, allowed)
    fits = compute.remat != "offload" or any(m.kind == HOST for m in device.addressable_memories())
    allowed = f"another one on {platform}, which has no {HOST} memory"
    require(fits, "compute.remat", compute.remat, allowed)
    return {
        "dtype": jnp.dtype(compute.dtype),
        "remat": compute.remat,
        "scan_unroll": compute.scan_unroll,
        "attention": chosen,
    }


def attention_notice(
    compute: Compute, row_tokens: int, decoder: DecoderConfig, mesh: jax.sharding.Mesh
) -> str:
    """Return the attention of training on a GPU, and why it is not cuDNN's; else empty."""
    device, context = mesh.devices.flat[0], shards(mesh, "sequence")
    if device.platform != "gpu":
        return ""
    notice = f"attention: {decoder.attention}"
    missing = cudnn_attention.missing(device, row_tokens, decoder.dtype, context)
    if missing and compute.attention == "auto":
        return f"{notice}, since cudnn needs {missing}"
    layers = [layer for layer in decoder.each_layer if not layer.is_recurrent]
    fits = [cudnn_attention.supports(c.head_dim, c.dtype, c.sinks) for c in layers]
    if decoder.attention != "cudnn" or all(fits):
        return notice
    return f"{notice}, but blocked in {fits.count(False)} of {len(fits)} layers: sinks or width"


def check_divisible(decoder: Any, mesh: jax.sharding.Mesh) -> None:
    """Raise `ConfigError` if the mesh can't shard the model evenly for training or decoding."""
    fits = not decoder.recurrent or shards(mesh, "sequence") == 1
    require(fits, "mesh.context", mesh.shape["context"], "1 with delta-net layers")
    axes = dict(zip(SHARDED_SIZES, SHARDED_SIZES, strict=True)) | {"delta_key_heads": "heads"}
    for (name, axis), column in itertools.product(axes.items(), (TRAINING, DECODING)):
        pieces, sizes = shards(mesh, axis, column), {getattr(c, name) for c in decoder.each_layer}
        if name == "embed":  # the second embedding is sharded by this name too
            sizes.add(decoder.layers * decoder.layer_inputs)
        for size in sorted(sizes):
            allowed = f"one whose {pieces} shards divide the model's {name} = {size}"
            require(size % pieces == 0, "mesh", dict(mesh.shape), allowed)


def choose_recording(algorithm: Algorithm, decoder: DecoderConfig, training: bool) -> DecoderConfig:
    """Return the decoder; it records routes in the sampler if training replays them.

    Raises `ConfigError` if the algorithm has router settings and the policy has no routers.
    """
    for name, off in ("router_replay", "none"), ("router_balance_coefficient", 0):
        value = getattr(algorithm, name)
        fits = value == off or decoder.experts > 0
        require(fits, f"algorithm.{name}", value, f"{off!r}: the policy has no experts")
    records = training and algorithm.router_replay == "sampler"
    return dataclasses.replace(decoder, records_routes=records)


def open_engine(
    config: Config,
    decoder: DecoderConfig,
    mesh: jax.sharding.Mesh,
    sampling_mesh: jax.sharding.Mesh,
    end_ids: tuple[int, ...],
    frozen: Any = None,
) -> PolicyEngine:
    """Return the sampling engine of training and evaluation.

    If scored groups are saved, or sampled by other processes, each program is compiled for one
    shape only, so that a group rounds in the same way whatever is sampled beside it.
    """
    settings = config.sampler
    if config.checkpoint.keep_groups or config.sampler.engine != "own":
        longest = config.longest_tokens()
        settings = dataclasses.replace(settings, first_window_tokens=longest, prefill_prompts=1)
    return PolicyEngine(
        decoder,
        sampling_mesh,
        settings,
        max_prompt_tokens=config.data.max_prompt_tokens,
        insert_width=max(config.rollout.samples_per_prompt, config.evaluation.samples_per_problem),
        end_ids=end_ids,
        frozen=frozen,
        trained_on=mesh,
    )


def open_learners(
    config: Config,
    decoder: DecoderConfig,
    mesh: jax.sharding.Mesh,
    frozen: Any,
    others: Mapping[str, Model] = MappingProxyType({}),
    tell: Callable[..., Any] | None = None,
) -> LearnerPrograms:
    """Return the programs of the policy, and of the models that the algorithm has beside it.

    Args:
        tell: writes the prompts of the teacher; None: it reads those of the policy.
        others: frozen models by name: the reference, the teacher. For 'jsd', the policy's update
            reads the teacher itself.
    """
    algorithm, compute, optimizer = config.algorithm, config.compute, config.optimizer
    plain = PolicySettings(algorithm, compute, config.sampler.temperature)
    read = others.get(TEACHER) if algorithm.distillation == "jsd" else None
    settings = dataclasses.replace(plain, keep_logprobs=config.log.token_ratios)
    if read:
        settings = dataclasses.replace(settings, teacher=read.decoder)
        frozen = {**(frozen or {}), TEACHER: read.params}
    policy = keep(policy_learner, settings, optimizer, decoder, mesh, frozen=frozen)
    scorers = {}
    if REFERENCE in others:
        scorers[REFERENCE] = TokenScorer(policy, others[REFERENCE].params)
    if algorithm.critic:
        rates, shape = config.critic.optimizer, scalar_config(decoder)
        scorers[CRITIC] = TokenScorer(keep(critic_learner, algorithm, rates, shape, mesh))
    if teacher := others.get(TEACHER):
        own = config.extras.teacher
        learner: Any = None
        if own.average:
            averaged = AveragedLearner(policy, own.average)
            teacher, learner = teacher._replace(params=None), averaged
        elif not read:
            learner = keep(policy_learner, plain, optimizer, teacher.decoder, mesh)
        scorers[TEACHER] = TokenScorer(learner, teacher.params, tell)
    return LearnerPrograms(policy, scorers)


class SamplerParts(NamedTuple):
    """Arguments of a plug-in of the kind `samplers`.

    It returns the sampler, and a function that closes what the sampler serves or uses.
    """

    config: Config
    decoder: DecoderConfig
    mesh: jax.sharding.Mesh  # of the learner
    tokenizer: Tokenizer
    local: Sampler
    load: Callable[[Any], dict[str, Any]]  # decoding weights of the trainer's parameters
    warn: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Components:
    """Objects of a run that its config and model folder determine."""

    config: Config
    tokenizer: Tokenizer
    prompts: PromptStream
    sampler: Sampler
    judge: Judge
    learners: LearnerPrograms
    progress: Progress
    frozen: Any  # untrained parameters of the policy, in their forward dtype
    environments: Environments | None
    token_weights: TokenWeights | None  # user function
    decoder: DecoderConfig
    close_sampler: Callable[[], None] = do_nothing
    # Metrics of the policy's parameters on held-out examples; None: responses are sampled.
    measure: Callable[[list, Any], dict[str, float]] | None = None

    def source(self, **options: Any) -> GroupSource:
        """Return the source of the groups; `options` are other fields of `RolloutSource`."""
        copy = self.learners.policy.copy if self.config.rollout.staleness else None
        return RolloutSource(self.config, self.prompts, self.sampler, self.judge, copy, **options)

    def trainer(self, **options: Any) -> Trainer:
        """Return the trainer of a run; `options` are those of `source`."""
        rows = row_choice(self.config, self.decoder, shards(self.learners.policy.mesh, "batch"))
        return Trainer(self.source(**options), self.learners, rows, self.token_weights)

    def first_params(self, model: str = POLICY) -> Any:
        """Return the parameters of a trained model before the first step, on the mesh.

        The critic's are those of the folder of a policy or a reward model.
        """
        folder, mesh = self.config.model.folder, self.learners.policy.mesh
        if model in (POLICY, TEACHER):  # an averaged teacher
            adapters = self.config.lora.folder
            return load_trained(folder, self.decoder, mesh, self.config.seed, adapters)
        own = self.config.critic.folder
        field = "critic.folder" if own else "model.folder"
        shape = scalar_config(self.decoder)
        return load_huggingface.load_params(
            own or folder, shape, mesh, field=field, fresh_score=True
        )

    def close(self) -> None:
        """Stop the worker processes, and what the sampler serves."""
        self.judge.close()
        self.close_sampler()
        if self.environments:
            self.environments.close()


def load_trained(
    folder: str,
    decoder: DecoderConfig,
    mesh: jax.sharding.Mesh,
    seed: int,
    adapters: str = "",
    **options: Any,
) -> Any:
    """Return the trained float32 parameters of a folder: all, or adapters (loaded or fresh)."""
    if decoder.adapters and adapters:
        return peft_adapters.load_adapters(adapters, decoder, mesh)
    if decoder.adapters:
        return trainable.fresh_adapters(decoder, mesh, seed)
    options["wanted"] = lambda path: trainable.is_trained(path, decoder)
    return load_huggingface.load_params(folder, decoder, mesh, **options)


def load_frozen(
    folder: str, decoder: DecoderConfig, mesh: jax.sharding.Mesh, field: str = "model.folder"
) -> Any:
    """Return the untrained parameters of a folder; read nothing if all are trained."""
    if not decoder.adapters and not decoder.frozen_layers:
        return {}
    base = trainable.without_adapters(decoder)
    options: dict[str, Any] = {"wanted": lambda path: not trainable.is_trained(path, decoder)}
    return load_huggingface.load_params(folder, base, mesh, field=field, cast=True, **options)


def load_first(config: Config, decoder: DecoderConfig, mesh: jax.sharding.Mesh, frozen: Any) -> Any:
    """Return the policy before the first step, for a forward pass; it shares `frozen`."""
    folder, adapters = config.model.folder, config.lora.folder
    trained = load_trained(folder, decoder, mesh, config.seed, adapters, cast=True)
    return trainable.join(frozen, trained)


def load_reference(
    config: Config, decoder: DecoderConfig, mesh: jax.sharding.Mesh, frozen: Any
) -> Any:
    """Return the reference policy for a forward pass, sharded like the policy.

    A reference of the same folder shares `frozen` with the policy. If the policy has adapters,
    those of another model have no effect.
    """
    folder, policy = config.model.reference_folder, config.model.folder
    if not folder or folder == policy:
        return load_first(config, decoder, mesh, frozen)
    field = "model.reference_folder"
    check_same_model(field, folder, policy, lambda shape: shape)
    trained = load_trained(folder, decoder, mesh, config.seed, field=field, cast=True)
    return trainable.join(load_frozen(folder, decoder, mesh, field), trained)


def load_others(
    config: Config, decoder: DecoderConfig, mesh: jax.sharding.Mesh, frozen: Any
) -> dict[str, Model]:
    """Return the teacher and the reference that the algorithm has, by name."""
    others, teacher = {}, config.extras.teacher
    if config.algorithm.distils and teacher.folder:
        others[TEACHER] = feature("teacher").load_teacher(config, decoder, mesh)
    elif config.algorithm.distils:  # the state of an averaged one is the policy's at first
        params = None if teacher.average else load_first(config, decoder, mesh, frozen)
        others[TEACHER] = Model(decoder, params)
    if config.algorithm.reference:
        others[REFERENCE] = Model(decoder, load_reference(config, decoder, mesh, frozen))
    return others


def load_reward_model(config: Config, mesh: jax.sharding.Mesh) -> RewardModel | None:
    """Return the learned reward model, or None if the config has none."""
    folder = config.reward.model_folder
    if not folder:
        return None
    field = "reward.model_folder"
    check_same_model(field, folder, config.model.folder)
    numbers = numerics(config.compute, mesh, config.rows().row_tokens)
    decoder = load_huggingface.read_config(folder, field=field, **numbers)
    check_divisible(decoder, mesh)
    decoder = scalar_config(decoder)
    params = load_huggingface.load_params(folder, decoder, mesh, field=field, cast=True)
    rows = config.packing.rows_per_microbatch
    return RewardModel(params, decoder, mesh, config.rows().row_tokens, rows)


def check_same_model(
    field: str,
    folder: str,
    policy: str,
    shape: Callable[[DecoderConfig], Any] = lambda config: config.vocab,
) -> None:
    """Raise `ConfigError` if two folders differ in tokenizer or `shape`."""
    decoder = load_huggingface.read_config(folder, field=field)
    same_shape = shape(decoder) == shape(load_huggingface.read_config(policy))
    require(same_shape, field, folder, f"a folder with the shape of {policy}")
    own, other = (model_path(name) / "tokenizer.json" for name in (folder, policy))
    same = not own.is_file() or own.read_bytes() == other.read_bytes()
    require(same, field, folder, f"a folder with the tokenizer of {policy}")


def open_decoder(
    config: Config, training: bool
) -> tuple[DecoderConfig, jax.sharding.Mesh, jax.sharding.Mesh]:
    """Return the policy's shape, the learning mesh and the sampling mesh; load no weights.

    Raises `ConfigError` if they don't fit together.
    """
    mesh, sampling_mesh = open_meshes(config.mesh, config.packing.rows_per_microbatch, training)
    processes.exchange_on(sampling_mesh.devices.flat)  # updates keep the others busy
    folder = config.model.folder
    numbers = numerics(config.compute, mesh, config.rows().row_tokens)
    decoder = load_huggingface.read_config(folder, **numbers)
    decoder = trainable.choose_trained(decoder, config.model.freeze_layers, config.lora)
    decoder = choose_recording(config.algorithm, decoder, training)
    check_divisible(decoder, mesh)
    if training and config.algorithm.distils:
        if teacher := config.extras.teacher.folder:
            check_same_model("extras.teacher.folder", teacher, folder, lambda shape: None)
        feature("teacher").read_shape(config, decoder, mesh)
    return decoder, mesh, sampling_mesh


def open_tokenizer(config: Config, decoder: DecoderConfig) -> Tokenizer:
    """Return the tokenizer. Raises `ConfigError` if the policy lacks some of its ids."""
    tokenizer = Tokenizer.from_folder(config.model.folder)
    tokenizer.check_fits(decoder.vocab, "model.folder", config.model.folder)
    return tokenizer


def open_environments(
    config: Config, tokenizer: Tokenizer, should_abort: Callable[[], bool] = lambda: False
) -> Environments | None:
    """Return the environments of trajectories, or None if responses have one turn."""
    if not config.environment.used:
        return None
    chat = config.data.template == "chat"
    check_chat(config.data.template, tokenizer.chat)
    settings = with_reward_settings(config)
    return Environments(settings, tokenizer, chat, should_abort)


def open_prompts(
    config: Config,
    tokenizer: Tokenizer,
    environments: Environments | None,
    training: bool = True,
) -> PromptStream:
    """Return the prompts of the config's problems, as environments open them."""
    functions = find_functions(list(config.reward.weights()), extras=config.extras)
    verifier = open_verifier(config.reward, config.extras)
    columns = verifier.columns(wanted_columns(functions.values()))
    if training and config.extras.teacher.prompt:
        named = feature("teacher").columns_of(config)
        columns = columns._replace(required=columns.required | named)
    tools = tool_schemas(config.environment)
    template = config.data.template
    require(not tools or template == "chat", "data.template", template, "chat, which shows tools")
    return PromptStream(
        config.data,
        config.seed,
        tokenizer,
        needs_answer=config.reward.needs_answer(),
        columns=columns,
        training=training,
        opening=environments.open if environments else lambda problem: problem,
        tools=tools,
    )


def open_console(config: Config) -> Progress:
    """Return the console of a run; without correct responses it leads with the reward."""
    return Progress(config.log.console, reward_leads(settings_of(config)))


def build(
    config: Config,
    console: Progress | None = None,
    *,
    training: bool = True,
    should_abort: Callable[[], bool] = lambda: False,
) -> Components:
    """Build the components of a run; compile nothing yet. Raises `ConfigError`."""
    progress = console or open_console(config)
    with progress.working(f"loading {config.model.folder}"):
        hook = config.algorithm.token_weights
        token_weights = resolve("algorithm.token_weights", hook) if hook else None
        decoder, mesh, sampling_mesh = open_decoder(config, training)
        tokenizer = open_tokenizer(config, decoder)
        environments = open_environments(config, tokenizer, should_abort)
        prompts = open_prompts(config, tokenizer, environments, training)
        check_lengths(config, prompts.lengths)
        frozen = load_frozen(config.model.folder, decoder, mesh)
        engine = open_engine(config, decoder, mesh, sampling_mesh, tokenizer.end_ids, frozen)
        if config.critic.folder:
            check_same_model(
                "critic.folder", config.critic.folder, config.model.folder, scalar_config
            )
        others = load_others(config, decoder, mesh, frozen) if training else {}
        tell = None
        if training and config.extras.teacher.prompt:
            tell = feature("teacher").told_segments(config, prompts)
        learners = open_learners(config, decoder, mesh, frozen, others, tell)
        pool = RewardPool(config.reward, tokenizer.split, config.extras)
        model = load_reward_model(config, mesh)
        sampler = Scheduler(engine, tokenizer, config.seed, environments)
        close_sampler = do_nothing
        if training and config.sampler.engine != "own":

            def warn(text: str) -> None:
                progress.warn(escape(text))

            load = engine.programs.weights.load_trained
            parts = SamplerParts(config, decoder, mesh, tokenizer, sampler, load, warn)
            sampler, close_sampler = registry.find("samplers", config.sampler.engine)(parts)
        return Components(
            config=config,
            tokenizer=tokenizer,
            prompts=prompts,
            sampler=sampler,
            environments=environments,
            judge=Judge(config, pool, model and model.score, should_abort, tokenizer.decode_all),
            learners=learners,
            progress=progress,
            frozen=frozen,
            token_weights=token_weights,
            decoder=decoder,
            close_sampler=close_sampler,
        )
