"""Components of a run, built from its config; training and evaluation share them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from rich.markup import escape

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import leaves
from dapo_jax.data.prompt_stream import Lengths, PromptStream
from dapo_jax.data.prompts.templates import check_chat, open_template, open_text
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.sources import Source
from dapo_jax.environments.registry import tool_schemas, with_reward_settings
from dapo_jax.environments.sessions import Environments
from dapo_jax.learner.batches import REFERENCE, TEACHER
from dapo_jax.learner.critic import RewardModel, scalar_config
from dapo_jax.learner.learners import POLICY, LearnerPrograms, Model
from dapo_jax.learner.minibatches import TokenWeights, row_choice
from dapo_jax.model import load_huggingface, peft_adapters, trainable
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.correctness import reward_leads, settings_of
from dapo_jax.rewards.functions import find_functions, wanted_columns
from dapo_jax.rewards.judge import Judge
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.verifying import open_verifier
from dapo_jax.rollout.source import RolloutSource
from dapo_jax.run import compute
from dapo_jax.run.notices import MAX_CUT, fitting
from dapo_jax.runtime import processes, registry
from dapo_jax.runtime.registry import feature
from dapo_jax.runtime.sharding import shards
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.user_code import resolve
from dapo_jax.step import Trainer
from dapo_jax.types.contracts import Sampler, do_nothing
from dapo_jax.types.errors import ConfigError, require

# Settings that name a model folder.
MODEL_FOLDERS = (
    "model.folder model.reference_folder extras.teacher.folder reward.model_folder critic.folder "
    "start reference"
).split()


def check_processes(config: Any) -> None:
    """Raise `ConfigError` if processes have different settings, models or code."""
    digests: dict[str, Callable[[str], str]] = {
        **dict.fromkeys(MODEL_FOLDERS, load_huggingface.fingerprint),
        "lora.folder": peft_adapters.fingerprint,
        "data.template": lambda name: open_template(name).digest,
        "data.user_template": lambda name: open_text(name).digest,
    }

    def values() -> dict[str, Any]:
        settings = {name: value for name, _, value in leaves(config)}
        compared = {f"config.{name}": value for name, value in settings.items()}
        for name, digest in digests.items():
            if settings.get(name):
                try:
                    content = digest(settings[name])
                except (ConfigError, OSError) as error:
                    content = str(error)
                compared[f"the content of config.{name}"] = content
        compared["dapo_jax's code"] = processes.code_digest()
        compared["jax's version"] = jax.__version__
        return compared

    processes.check_same(values)


def check_data(sources: Sequence[Source]) -> None:
    """Raise `ConfigError` if processes read different problems under the same names."""
    processes.check_same(lambda: {f"the data of {s.name}": s.digests() for s in sources})


def check_lengths(config: Config, lengths: Sequence[Lengths]) -> None:
    """Raise `ConfigError` if too many prompts would be truncated."""
    if config.data.overlong_prompts != "truncate_left":
        return
    for source in lengths:
        allowed = (
            f"larger, such as {fitting(config, lengths)}: too many prompts would lose their "
            f"beginning ({source.describe()}); data.overlong_prompts = 'drop' skips them instead"
        )
        fits = source.over <= MAX_CUT * source.looked_at
        require(fits, "data.max_prompt_tokens", config.data.max_prompt_tokens, allowed)


class SamplerParts(NamedTuple):
    """What a plug-in of the kind `samplers` makes a sampler from.

    It returns the sampler, a function that closes what the sampler serves or uses, and whether
    `local` samples too, so that its decoding weights stay in memory.
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
    decoding_copy: Callable[[], Any]  # of `frozen`; the first call makes it
    close_sampler: Callable[[], None] = do_nothing

    def trainer(self, **options: Any) -> Trainer:
        """Return the trainer of a run; `options` are other fields of `RolloutSource`."""
        copy = self.learners.policy.copy if self.config.rollout.staleness else None
        source = RolloutSource(self.config, self.prompts, self.sampler, self.judge, copy, **options)
        rows = row_choice(self.config, self.decoder, shards(self.learners.policy.mesh, "batch"))
        return Trainer(source, self.learners, rows, self.token_weights)

    def first_params(self, model: str = POLICY) -> Any:
        """Return the parameters of a trained model before the first step, on the mesh.

        The critic's are those of the folder of a policy or a reward model.
        """
        folder, mesh = self.config.model.folder, self.learners.policy.mesh
        if model == POLICY:
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


def load_reference(
    config: Config, decoder: DecoderConfig, mesh: jax.sharding.Mesh, frozen: Any
) -> Any:
    """Return the reference policy, sharded like the policy.

    A reference of the same folder shares `frozen` with the policy.
    """
    folder, policy = config.model.reference_folder, config.model.folder
    if folder and folder != policy:
        field = "model.reference_folder"
        check_same_model(field, folder, policy, lambda shape: shape)
        return load_whole(folder, decoder, mesh, config.seed, field)
    trained = load_trained(policy, decoder, mesh, config.seed, config.lora.folder, cast=True)
    return trainable.join(frozen, trained)


def load_whole(
    folder: str, decoder: DecoderConfig, mesh: jax.sharding.Mesh, seed: int, field: str
) -> Any:
    """Return all parameters of another model of the policy's shape, for a forward pass.

    If the policy has adapters, those of this model have no effect.
    """
    frozen = load_frozen(folder, decoder, mesh, field)
    return trainable.join(frozen, load_trained(folder, decoder, mesh, seed, field=field, cast=True))


def load_reward_model(config: Config, mesh: jax.sharding.Mesh) -> RewardModel | None:
    """Return the learned reward model, or None if the config has none."""
    folder = config.reward.model_folder
    if not folder:
        return None
    field = "reward.model_folder"
    check_same_model(field, folder, config.model.folder)
    numbers = compute.numerics(config.compute, mesh, config.rows().row_tokens)
    decoder = load_huggingface.read_config(folder, field=field, **numbers)
    compute.check_divisible(decoder, mesh)
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
    mesh, sampling_mesh = compute.open_meshes(
        config.mesh, config.packing.rows_per_microbatch, training
    )
    processes.exchange_on(sampling_mesh.devices.flat)  # updates keep the others busy
    folder = config.model.folder
    numbers = compute.numerics(config.compute, mesh, config.rows().row_tokens)
    decoder = load_huggingface.read_config(folder, **numbers)
    decoder = trainable.choose_trained(decoder, config.model.freeze_layers, config.lora)
    decoder = compute.choose_recording(config.algorithm, decoder, training)
    compute.check_divisible(decoder, mesh)
    if training and config.algorithm.distils:
        teacher = config.extras.teacher.folder
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


def build(
    config: Config, *, training: bool = True, should_abort: Callable[[], bool] = lambda: False
) -> Components:
    """Build the components of a run; compile nothing yet. Raises `ConfigError`."""
    progress = Progress(config.log.console, reward_leads(settings_of(config)))
    with progress.working(f"loading {config.model.folder}"):
        hook = config.algorithm.token_weights
        token_weights = resolve("algorithm.token_weights", hook) if hook else None
        decoder, mesh, sampling_mesh = open_decoder(config, training)
        tokenizer = open_tokenizer(config, decoder)
        environments = open_environments(config, tokenizer, should_abort)
        prompts = open_prompts(config, tokenizer, environments, training)
        check_lengths(config, prompts.lengths)
        frozen = load_frozen(config.model.folder, decoder, mesh)
        engine = compute.open_engine(
            config, decoder, mesh, sampling_mesh, tokenizer.end_ids, frozen
        )
        if config.critic.folder:
            check_same_model(
                "critic.folder", config.critic.folder, config.model.folder, scalar_config
            )
        others: dict[str, Model] = {}
        if training and config.algorithm.distils:
            others[TEACHER] = feature("teacher").load_teacher(config, decoder, mesh)
        if training and config.algorithm.reference:
            reference = load_reference(config, decoder, mesh, frozen)
            others[REFERENCE] = Model(decoder, reference)
        learners = compute.open_learners(config, decoder, mesh, frozen, others)
        pool = RewardPool(config.reward, tokenizer.split, config.extras)
        model = load_reward_model(config, mesh)
        sampler = compute.open_sampler(engine, tokenizer, config.seed, environments)
        close_sampler, decoding_copy = do_nothing, engine.programs.weights.frozen
        if training and config.sampler.engine != "own":

            def warn(text: str) -> None:
                progress.warn(escape(text))

            load = engine.programs.weights.load_trained
            parts = SamplerParts(config, decoder, mesh, tokenizer, sampler, load, warn)
            opened = registry.find("samplers", config.sampler.engine)(parts)
            sampler, close_sampler, is_local_used = opened
            decoding_copy = decoding_copy if is_local_used else do_nothing
        return Components(
            config=config,
            tokenizer=tokenizer,
            prompts=prompts,
            sampler=sampler,
            decoding_copy=decoding_copy,
            environments=environments,
            judge=Judge(config, pool, model and model.score, should_abort, tokenizer.decode_all),
            learners=learners,
            progress=progress,
            frozen=frozen,
            token_weights=token_weights,
            decoder=decoder,
            close_sampler=close_sampler,
        )
