"""Supervised training (`sft`, `dpo`): a source of given groups before the step of every run.

Each prompt of an example, with the answers after it, is a group of one response; a pair is a group
of two. DPO (arXiv 2305.18290) computes the log-probs of the reference once, before the first step,
and then frees it: memory holds one policy. `OUT.halfway` is the folder of the run until OUT, the
model folder, is complete.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.markup import escape

from dapo_jax.config.algorithms import preset
from dapo_jax.config.experiment import (
    Checkpoint,
    Config,
    Evaluation,
    Log,
    Mesh,
    Model,
    Rollout,
    Watch,
)
from dapo_jax.config.rates import choose_rates
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.arithmetic import END, PAD, arithmetic_tokenizer
from dapo_jax.extras.sft.rows import (
    EXAMPLES,
    PAIRS,
    Example,
    Examples,
    generated_example,
    read_examples,
)
from dapo_jax.extras.sft.settings import GENERATED, DpoConfig, SftConfig, Supervised
from dapo_jax.learner.minibatches import split_groups
from dapo_jax.learner.packing import pack, take_tokens
from dapo_jax.learner.update import POLICY, Learner
from dapo_jax.model import load_huggingface, peft_adapters, save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.model.trainable import choose_trained, parameter_count
from dapo_jax.rollout import source
from dapo_jax.rollout.source import SourceState
from dapo_jax.run.build import (
    Components,
    check_divisible,
    check_same_model,
    load_frozen,
    load_trained,
    load_whole,
    numerics,
    open_learners,
    open_mesh,
)
from dapo_jax.run.console import Progress
from dapo_jax.run.export import adapter_folder, policy_layers
from dapo_jax.run.identity import OtherRun, check_processes
from dapo_jax.run.metrics import preference_metrics
from dapo_jax.run.run import open_run
from dapo_jax.run.sinks import Callbacks
from dapo_jax.runtime import processes
from dapo_jax.runtime.sharding import flatten, to_host, unbox
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.storage.output_folder import PREFERRING, TRAINED, replace
from dapo_jax.types.contracts import do_nothing
from dapo_jax.types.errors import require
from dapo_jax.types.structs import CollectedGroups, Interrupted, digest_json

EVALUATIONS = 10  # of a run, on held-out examples
METRICS = "metrics.jsonl"
# Sections of the settings that decide generated examples and a new model.
OWN = ("architecture", "examples", "max_response_tokens")
# Other libraries would otherwise take the end and pad tokens of the family.
TOKENIZER_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": PAD,
}
NOT_WATCHED = Watch(**{field.name: 0.0 for field in dataclasses.fields(Watch)})


class Start(NamedTuple):
    """Policy to train: shape, tokenizer, mesh, and initial parameters."""

    decoder: DecoderConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    load: Callable[[], Any]  # loads or makes the parameters to train
    frozen: Any  # parameters under adapters, which are never trained; empty without adapters


def open_start(settings: Supervised) -> Start:
    """Return the policy of `start`, or a new one of `architecture`."""
    mesh = open_mesh(settings.mesh, settings.packing.rows_per_microbatch)
    numbers = numerics(settings.compute, mesh, settings.packing.row_tokens)
    if isinstance(settings, SftConfig) and not settings.start:
        tokenizer = arithmetic_tokenizer()
        shape = dataclasses.asdict(settings.architecture) | numbers
        decoder = DecoderConfig(vocab=tokenizer.padded_vocab, **shape)
        check_divisible(decoder, mesh)
        key = jax.random.key(settings.seed)
        return Start(decoder, tokenizer, mesh, lambda: unbox(init_params(decoder, key)), {})
    folder, adapters = settings.start, settings.lora.folder
    decoder = load_huggingface.read_config(folder, field="start", **numbers)
    decoder = choose_trained(decoder, 0.0, settings.lora)
    check_divisible(decoder, mesh)
    tokenizer = Tokenizer.from_folder(folder, "start")
    tokenizer.check_fits(decoder.vocab, "start", folder)

    def load() -> Any:
        return load_trained(folder, decoder, mesh, settings.seed, adapters, field="start")

    if adapters:
        peft_adapters.read_adapters(adapters, decoder)  # raises before the base is loaded
    frozen = load_frozen(folder, decoder, mesh, "start")
    return Start(decoder, tokenizer, mesh, load, frozen)


def step_size(settings: Supervised) -> tuple[str, int]:
    """Return the setting with the number of examples or pairs of a step, and its value."""
    if isinstance(settings, DpoConfig):
        return "pairs_per_step", settings.pairs_per_step
    assert isinstance(settings, SftConfig)  # there is no third kind
    return "examples_per_step", settings.examples_per_step


def open_examples(settings: Supervised, tokenizer: Tokenizer) -> Examples:
    """Return the examples or pairs of the files; none of a source that is generated by position."""
    data, (name, size) = settings.data, step_size(settings)
    if data.source in GENERATED:
        make = functools.partial(generated_example, settings, tokenizer)
        return Examples(make, [], [], f"{size} generated examples of {data.source} a step", [])
    forms = PAIRS if isinstance(settings, DpoConfig) else EXAMPLES
    examples = read_examples(data, tokenizer, settings.packing.row_tokens, forms, settings.seed)
    processes.check_same(lambda: {f"the data of {data.source}": examples.digest()})
    count = len(examples.training)
    require(size <= count, name, size, f"at most {count}, the number of training examples")
    return examples


def as_run(settings: Supervised, steps: int) -> Config:
    """Return the settings of the run that trains on the given groups."""
    algorithm, reference, (_, size) = preset("sft"), "", step_size(settings)
    if isinstance(settings, DpoConfig):
        algorithm = dataclasses.replace(preset("dpo"), preference_beta=settings.beta)
        reference = settings.reference
    return Config(
        run_dir=f"{pathlib.Path(settings.out)}.halfway",
        seed=settings.seed,
        total_steps=steps,
        algorithm=algorithm,
        model=Model(folder=settings.start, reference_folder=reference),
        lora=settings.lora,
        compute=settings.compute,
        rollout=Rollout(prompts_per_step=size, updates_per_rollout=1),
        optimizer=settings.optimizer,
        packing=dataclasses.replace(settings.packing, share_prompts=False),
        mesh=Mesh(**dataclasses.asdict(settings.mesh)),
        checkpoint=Checkpoint(every_steps=settings.save_every_steps, keep=1),
        evaluation=Evaluation(every_steps=max(1, steps // EVALUATIONS)),
        log=Log(show_group_every_steps=0, rollouts=False, report=False),
        watch=NOT_WATCHED,
    )


@dataclasses.dataclass(frozen=True)
class GivenGroups:
    """Examples of a run, in the place of its prompts and of the source of its groups."""

    config: Config
    examples: Examples
    digests: dict[str, dict[str, int | str]]
    interrupted: Callable[[], bool]
    sources = heldout = lengths = ()  # of problems

    def heldout_prompts(self) -> list[Example]:
        return self.examples.heldout

    def describe(self) -> str:
        return self.examples.notes

    def warnings(self) -> list[str]:
        return self.examples.warnings

    def collect(
        self, state: SourceState, params: Any, step: int
    ) -> tuple[SourceState, source.Rollout]:
        """Return the groups of a step; raises `Interrupted`."""
        if self.interrupted():
            raise Interrupted
        size = self.config.rollout.prompts_per_step
        end = (step + 1) * size
        groups = [g for i in range(end - size, end) for g in self.examples.at(i).groups(i)]
        batch = CollectedGroups(groups, groups, [], len(groups), [], size, 1.0, end, 0, 0, False)
        return dataclasses.replace(state, position=end), source.Rollout(batch, None, 0.0)

    def prefetch(self, state: SourceState, step: int) -> SourceState:
        return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenComponents(Components):
    """Components of a run on given groups: nothing is sampled, and there are no rewards."""

    load: Callable[[], Any]  # parameters before the first step
    prompts: Any  # `GivenGroups`
    sampler: Any = None
    judge: Any = None
    environments: Any = None
    token_weights: Any = None
    decoding_copy: Callable[[], Any] = do_nothing

    def source(self, **options: Any) -> GivenGroups:
        return self.prompts

    def first_params(self, model: str = POLICY) -> Any:
        return self.load()

    def close(self) -> None: ...


def score_examples(
    learner: Learner, config: Config, signals: Signals, params: Any, examples: Sequence[Example]
) -> Iterator[np.ndarray]:
    """Yield the log-probs of the tokens of each response.

    Raises `Interrupted` on every process if one received a signal.
    """
    packing, at_once = config.packing, config.rollout.prompts_per_step
    for start in range(0, len(examples), at_once):
        if signals():
            raise Interrupted
        part = enumerate(examples[start : start + at_once])
        (segments,) = split_groups(config, [g for i, example in part for g in example.groups(i)])
        rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
        scores = to_host(learner.score(params, rollouts, used).values)
        yield from take_tokens(scores, np.asarray(rollouts.response_index))


def build_given(
    settings: Supervised,
    start: Start,
    examples: Examples,
    signals: Signals,
    config: Config,
    console: Progress,
    **_: Any,
) -> GivenComponents:
    """Build the components of a run on examples or pairs, with the reference's log-probs."""
    decoder, mesh = start.decoder, start.mesh
    learners = open_learners(config, decoder, mesh, start.frozen)
    score = functools.partial(score_examples, learners.policy, config, signals)
    if isinstance(settings, DpoConfig):
        if folder := settings.reference:
            check_same_model("reference", folder, settings.start, lambda shape: shape)
            reference = load_whole(folder, decoder, mesh, settings.seed, "reference")
        else:
            reference = start.load()
        for part in (examples.training, examples.heldout):
            logprobs = score(reference, part)
            part[:] = [pair._replace(logprobs=(next(logprobs), next(logprobs))) for pair in part]

    def measure(heldout: list[Example], params: Any) -> dict[str, float]:
        logprobs = list(score(params, heldout))
        if not isinstance(settings, DpoConfig):
            return {"heldout_nll": -float(np.concatenate(logprobs).mean(dtype=float))}
        before = [own for example in heldout for own in example.logprobs]
        gains = [np.sum(np.float64(p) - q) for p, q in zip(logprobs, before, strict=True)]
        margins = np.subtract(gains[0::2], gains[1::2])
        values = preference_metrics(margins, settings.beta)
        return {f"heldout_{name}": value for name, value in values.items()}

    model = settings.start and load_huggingface.fingerprint(settings.start)
    own = digest_json(
        [dataclasses.asdict(settings)[name] for name in OWN if hasattr(settings, name)]
    )
    digest = f"{examples.digest()}, {model}, {own}"
    digests = {settings.data.source: {"problems": len(examples.training), "digest": digest}}
    return GivenComponents(
        config=config,
        tokenizer=start.tokenizer,
        prompts=GivenGroups(config, examples, digests, signals),
        learners=learners,
        progress=console,
        frozen=start.frozen,
        decoder=decoder,
        load=start.load,
        measure=measure,
    )


def train_supervised(settings: Supervised, signals: Signals | None = None) -> pathlib.Path | None:
    """Train a policy on examples or pairs, write its model folder, and return the folder's path.

    Returns None if a signal ended the training early: the folder is as it was, and the state is
    saved beside it.

    Raises:
        ConfigError: settings, files and folders don't fit together.
        NotFinite: too many updates in a row were skipped.
    """
    check_processes(settings)
    kind = PREFERRING if isinstance(settings, DpoConfig) else TRAINED
    with signals or Signals() as signals:
        try:
            with replace("out", settings.out, kind) as folder:
                halfway = _train(settings, signals, kind, folder)
        except Interrupted:
            processes.print_error(f"stopped by {signals.received}: {settings.out} is as it was")
            return None
    if processes.is_first():
        shutil.rmtree(halfway, ignore_errors=True)
    Progress().say(f"policy written to {escape(settings.out)}")
    return pathlib.Path(settings.out)


def _train(settings: Supervised, signals: Signals, kind: str, folder: pathlib.Path | None) -> str:
    """Train, write the model folder, and return the folder of the run."""
    start = open_start(settings)
    examples = open_examples(settings, start.tokenizer)
    passes = settings.data.passes * len(examples.training) / step_size(settings)[1]
    steps = settings.total_steps or math.ceil(passes)
    settings, lines, warnings = choose_rates(settings, parameter_count(start.decoder), steps)
    for text in [*lines, *warnings]:
        Progress().say(escape(text))
    config = as_run(settings, steps)
    make = functools.partial(build_given, settings, start, examples, signals)
    with contextlib.ExitStack() as stack:
        try:
            run = open_run(config, Callbacks(signals), stack, build=make)
        except OtherRun:
            reason = "has other settings or data: training starts from scratch"
            Progress().warn(f"{escape(config.run_dir)} {reason}")
            stack.close()
            remove = functools.partial(shutil.rmtree, config.run_dir)
            processes.broadcast_from_host0(remove, "removal of another run")
            run = open_run(config, Callbacks(signals), stack, build=make)
        if run.complete() is None:
            raise Interrupted
        write_policy(settings, start, kind, folder, run.state.learners.policy.params)
        if folder is not None:
            shutil.copyfile(run.files.folder / METRICS, folder / METRICS)
    return config.run_dir


def write_policy(
    settings: Supervised,
    start: Start,
    kind: str,
    folder: pathlib.Path | None,  # None on processes that only help to gather the weights
    params: Any,
) -> None:
    """Write weights, settings and tokenizer into `folder`; adapters are also written beside it."""
    decoder, tokenizer, flat = start.decoder, start.tokenizer, flatten(params)

    def read(path: str) -> Any:
        return to_host(flat[path])

    if decoder.adapters:
        base = model_path(settings.start).absolute().name
        with replace("out", adapter_folder(settings.out), kind) as beside:
            save_huggingface.save_adapters(beside, flat, read, decoder, base)
        layers = policy_layers(flat, read, decoder, settings.start)
        save_huggingface.save_weights(folder, layers, decoder)
    else:
        save_huggingface.save_folder(folder, params, decoder, tokenizer.end_ids)
    if folder is not None and settings.start:
        save_huggingface.save_settings_of(settings.start, folder, "float32")
    elif folder is not None:
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_SETTINGS, indent=2))
