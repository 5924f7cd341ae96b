"""Evaluation of a policy: parameters, output folder, resumption, report."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.markup import escape

from dapo_jax.config.experiment import Config
from dapo_jax.data.policies import model_path
from dapo_jax.data.prompts.templates import open_template
from dapo_jax.model.trainable import join
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.notices import announce_data
from dapo_jax.reporting.scores import Response
from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.run.checkpointing.same_run import check_frozen, warn_about_heldout
from dapo_jax.run.components import Components, build, check_data, check_processes
from dapo_jax.run.evaluation.heldout import (
    ResponseFile,
    evaluation_rule,
    heldout_metrics,
    report_on,
    sample_responses,
    stamp,
)
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError, leaves, require
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.output_folder import EVALUATION, RUN, claim
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import Storage, write_text
from dapo_jax.structs import Interrupted, Prompt

# Settings that determine responses and verdicts, in addition to policy and problems.
DECIDING = (
    "seed data.template sampler.max_response_tokens evaluation.temperature evaluation.top_p "
    "compute.dtype sampler.cache_dtype sampler.weights_dtype reward.verifier reward.unfinished "
    "reward.percent reward.correct reward.threshold reward.components"
).split()


@jax.jit
def _checksums(params: Any) -> Any:
    """Return the sum modulo 2^32 of each leaf's float32 bits, times an odd factor per position."""

    def checksum(leaf: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
        position = jnp.zeros(leaf.shape, jnp.uint32)
        for axis in range(leaf.ndim):
            position = position * 65_599 + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    return jax.tree.map(checksum, params)


def digest(value: Any) -> str:
    """Return the hash of a JSON value, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def params_digest(params: Any) -> str:
    """Return a hash of parameter values that is independent of devices and sharding."""
    sums = jax.tree_util.tree_leaves_with_path(jax.device_get(_checksums(params)))
    return digest([(jax.tree_util.keystr(path), int(value)) for path, value in sums])


def deciding_settings(config: Config, params: Any, prompts: list[Prompt]) -> dict[str, Any]:
    """Return the values, by name, that must not change when an evaluation resumes."""
    problems = [(p.index, p.id, p.tokens.tolist(), p.answer) for p in prompts]
    return {
        "policy_digest": params_digest(params),
        "problems": len(problems),
        "problems_digest": digest(problems),
    } | {name: value for name, _, value in leaves(config) if name in DECIDING}


def open_checkpoints(
    config: Config, from_folder: bool, stack: contextlib.ExitStack
) -> Checkpoints | None:
    """Return the checkpoints of run_dir, or None if the model folder is evaluated.

    Raises `ConfigError` if run_dir has no checkpoint.
    """
    if from_folder:
        return None
    if Checkpoints.exist(config.run_dir):
        warn = Progress(config.log.console).warn
        checkpoints = stack.enter_context(
            Checkpoints(config.run_dir, storage=Storage(lambda text: warn(escape(text))))
        )
        if checkpoints.latest_step() is not None:
            return checkpoints
    raise ConfigError(
        f"config.run_dir = {config.run_dir!r}: holds no checkpoint to evaluate; --model=FOLDER "
        "evaluates a model folder"
    )


def open_policy(
    config: Config, components: Components, checkpoints: Checkpoints | None
) -> tuple[str, Any]:
    """Return the policy's description and trained parameters. Raises `ConfigError`."""
    if checkpoints is None:
        return config.model.folder, components.first_params()
    settings = checkpoints.record().settings
    for name, _, value in leaves(config):
        if name == "model.freeze_layers" or name.startswith("lora."):
            saved = settings[name]
            require(value == saved, name, value, f"{saved!r}, as in the run")
    check_frozen(settings, config.model.folder, "model.folder")
    params = checkpoints.state(components.learners.policy.abstract_state).params
    return f"{config.run_dir} step {checkpoints.latest_step()}", params


def claim_folder(
    config: Config, checkpoints: Checkpoints | None, stack: contextlib.ExitStack
) -> Folder:
    """Return the folder of responses and report, locked until the stack is closed.

    Below run_dir its name contains the settings that are varied most often; a run may be writing
    there. Raises `ConfigError` if it must not be written.
    """
    data, evaluation = config.data, config.evaluation
    if evaluation.out:
        return stack.enter_context(claim("evaluation.out", evaluation.out, EVALUATION))
    model = model_path(config.model.folder).absolute().name
    name = [f"step_{checkpoints.latest_step()}" if checkpoints else model]
    name += [pathlib.Path(data.heldout_source or data.source).stem]
    own = open_template(data.template).digest
    name += [f"template-{own}" if own else data.template] if data.template != "none" else []
    name += [f"T{evaluation.temperature:g}", f"p{evaluation.top_p:g}"]
    below = f"evaluations/{'_'.join(name)}"
    stack.enter_context(claim("run_dir", config.run_dir, RUN, exclusive=False))
    return stack.enter_context(claim("run_dir", config.run_dir, EVALUATION, below))


def sample_missing(
    file: ResponseFile,
    params: Any,
    prompts: list[Prompt],
    components: Components,
    interrupted: Callable[[], bool],
) -> list[Response]:
    """Return k responses to each prompt: those in `file`, and new ones that are added to it.

    Only the first process returns responses of an earlier start. Raises `Interrupted`.
    """
    progress, rule = components.progress, evaluation_rule(components.config)
    saved = processes.broadcast_from_host0(lambda: list(file.responses), "saved responses")
    known = {tuple(key) for key in saved}
    numbers = range(components.config.evaluation.samples_per_problem)
    keys = [(prompt.index, j) for prompt in prompts for j in numbers]
    missing = [(p, [j for j in numbers if (p.index, j) not in known]) for p in prompts]
    wanted = [(prompt, samples) for prompt, samples in missing if samples]
    if done := sum(key in known for key in keys):
        path = escape(str(file.path))
        progress.say(f"{done} of {len(keys)} responses are there already, in {path}")
    with progress.evaluating(done, len(keys)) as show:
        for response in sample_responses(
            params, wanted, components.sampler, components.judge, rule, interrupted
        ):
            file.append(response)
            show(response)
    file.tidy()
    return [file.responses[key] for key in keys if key in file.responses]


def evaluate(config: Config, *, from_folder: bool = False) -> dict[str, Any] | None:
    """Evaluate the latest checkpoint in run_dir, or the model folder if `from_folder`.

    Prints the report and writes it beside the responses. Returns its main scores, or None if a
    signal stopped the evaluation; the same call then resumes it.

    Raises:
        ConfigError: run_dir has no checkpoint, or settings, model folder and earlier responses
            don't fit together.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals(config.checkpoint.leave_seconds))
        check_processes(config)
        checkpoints = open_checkpoints(config, from_folder, stack)
        folder = claim_folder(config, checkpoints, stack)
        components = build(config, training=False, should_abort=signals.received_locally)
        stack.callback(components.close)
        stack.enter_context(components.progress.compilation())
        with components.progress.working("loading the policy"):
            policy, params = open_policy(config, components, checkpoints)
        prompts = components.prompts.heldout_prompts()
        require(
            bool(prompts),
            "data.heldout_problems",
            config.data.heldout_problems,
            "more, or with shorter prompts: no problem is left to evaluate on",
        )
        check_data(components.prompts.heldout)
        announce_data(config, components.prompts, components.progress)
        if config.evaluation.temperature == 0 and config.evaluation.samples_per_problem > 1:
            components.progress.warn(
                "temperature 0 samples the same response k times; --k=1 is enough"
            )
        fields = stamp(config, policy)
        deciding = deciding_settings(config, join(components.frozen, params), prompts)
        storage = Storage(lambda text: components.progress.warn(escape(text)))
        if checkpoints is not None:
            warn_about_heldout(
                config, checkpoints.record(), components.prompts.digests, storage.warn
            )
        own_folder = folder if processes.is_first() else None
        file = ResponseFile(own_folder, deciding, fields, storage)
        try:
            responses = sample_missing(file, params, prompts, components, signals)
        except Interrupted:
            components.progress.say(
                f"stopped by {signals.received} with {len(file.responses)} responses in "
                f"{escape(str(folder))}. The same command resumes from there"
            )
            return None
        return processes.broadcast_from_host0(
            lambda: write_report(responses, fields, folder, components, storage), "the report"
        )


def write_report(
    responses: list[Response],
    fields: dict[str, Any],
    folder: Folder,
    components: Components,
    storage: Storage,
) -> dict[str, Any]:
    """Write and print the report; return its main scores by name."""
    config = components.config
    report = report_on(responses, config)
    fields = fields | {"data": config.data.heldout_source or config.data.source}
    path = folder / "report.json"
    text = json.dumps(fields | dataclasses.asdict(report), indent=2)
    storage.attempt(path.name, lambda: write_text(path, text))
    components.progress.report(report, fields)
    components.progress.say(f"responses.jsonl and report.json are in {escape(str(folder))}")
    return {
        "policy": fields["policy"],
        "problems": report.problems,
        "samples_per_problem": report.samples_per_problem,
    } | heldout_metrics(report)
