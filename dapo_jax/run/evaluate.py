"""The evaluate command's work: responses that are saved as they finish, and the report."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from etils import epath
from rich.markup import escape

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import changed, fields, leaves, with_values
from dapo_jax.data.prompts.templates import open_template, open_text
from dapo_jax.model import load_huggingface, peft_adapters
from dapo_jax.run.build import Components, build, open_console
from dapo_jax.run.console import Progress
from dapo_jax.run.evaluation_report import print_report
from dapo_jax.run.export import check_frozen, newest_export
from dapo_jax.run.heldout import sample_missing, score_responses
from dapo_jax.run.identity import Record, check_data, check_processes, describe_changes, meaning
from dapo_jax.run.notices import announce_data
from dapo_jax.run.scores import Report, Response, wilson
from dapo_jax.run.sinks import response_line, stamp, write_responses
from dapo_jax.run.store import Checkpoints
from dapo_jax.runtime import processes
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.files import (
    AppendFile,
    Folder,
    Storage,
    folder_at,
    is_remote,
    read_object,
    reason,
    write_text,
)
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.storage.output_folder import EVALUATION, RUN, claim
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import Interrupted, Prompt, digest_json

FIELDS = {field.name: field.default for field in dataclasses.fields(Response)}
REQUIRED_FIELDS = {name for name, default in FIELDS.items() if default is dataclasses.MISSING}


class ResponseFile:
    """Response file of an evaluation: JSON lines, so that no response is sampled twice.

    `responses` are old and new ones by (position in the problem file, sample); they stay in memory
    without a `path`.

    Raises `ConfigError` that names every setting that differs from those of the folder.
    """

    def __init__(
        self,
        folder: Folder | None,  # None: nothing is read or written
        settings: dict[str, Any],  # values, by name, that determine the responses
        stamp: dict[str, Any],  # fields of every line
        storage: Storage | None = None,
        is_writable: bool = True,  # else old responses are read
    ):
        self._stamp = stamp
        self._storage = storage or Storage()
        self.responses: dict[tuple[int, int], Response] = {}
        self.path = None
        if folder is None:
            return
        try:
            self._read(folder, settings, is_writable)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the evaluation in {str(folder)!r} can't resume: {reason(error)}; choose another "
                "folder by --out, or remove that one"
            ) from None
        if is_writable:
            self.path = folder / "responses.jsonl"
            self._lines = AppendFile(self.path, self._storage, rarely=True)
            self.tidy()

    def _read(self, folder: Folder, settings: dict[str, Any], is_writable: bool) -> None:
        settings_path, path = folder / "settings.json", folder / "responses.jsonl"
        if settings_path.exists():
            saved = json.loads(settings_path.read_text())
            changed = [
                f"{name}: {settings.get(name)!r}, but it was begun with {saved.get(name)!r}"
                for name in sorted(settings | saved)
                if meaning(name, settings.get(name)) != meaning(name, saved.get(name))
            ]
            if changed:
                raise ConfigError(
                    f"the evaluation in {str(folder)!r} can't resume with other settings; choose "
                    "another folder by --out:\n  " + "\n  ".join(changed)
                )
        elif is_writable:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(settings_path, json.dumps(settings, indent=2))
        broken = 0
        *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
        for line in lines:
            values = read_object(line)
            if values is None or not values.keys() >= REQUIRED_FIELDS:
                broken += 1
            elif values.get("failure") is None:  # a failed verdict is sampled and scored again
                response = Response(**{name: values[name] for name in FIELDS.keys() & values})
                self.responses[response.index, response.sample] = response
        if broken:
            self._storage.warn(
                f"{broken} lines of {path} are not responses: they are sampled again"
            )

    def append(self, response: Response) -> None:
        """Add a line: on disk when this returns, on an object store soon."""
        if self.path is not None:
            self._lines.append(response_line(response, self._stamp))

    def tidy(self) -> None:
        """Sort the lines by problem and sample."""
        if (path := self.path) is not None:
            responses = self.responses.values()
            self._storage.attempt(path.name, lambda: write_responses(path, responses, self._stamp))


# Settings that determine responses and verdicts, in addition to policy and problems.
DECIDING = (
    "seed data.template sampler.max_response_tokens evaluation.temperature evaluation.top_p "
    "compute.dtype sampler.cache_dtype sampler.weights_dtype environment.name environment.tools "
    "environment.max_turns environment.max_sampled_tokens environment.max_observation_tokens "
    "environment.rewards reward.verifier reward.correct reward.threshold reward.parts "
    "reward.model_folder algorithm.reward_correct algorithm.reward_wrong "
    "algorithm.overlong_punishment algorithm.overlong_buffer_share"
).split()


def deciding_settings(
    config: Config, checkpoints: Checkpoints | None, prompts: list[Prompt]
) -> dict[str, Any]:
    """Return the values, by name, that must not change when an evaluation resumes."""
    if checkpoints is not None:
        policy = checkpoints.digest()
    else:
        policy = load_huggingface.fingerprint(config.model.folder)
        if config.lora.folder:
            policy += f" {peft_adapters.fingerprint(config.lora.folder)}"
    known = fields(Config)
    extras = {n: v for n, v in changed(config).items() if n.startswith("extras.")}
    problems = [(p.digest, p.tokens.tolist(), p.answer, p.columns) for p in prompts]
    return {
        "policy_digest": policy,
        "problems": len(problems),
        "problems_digest": digest_json(problems),
        "extras": {n: v for n, v in extras.items() if not known[n].metadata["may_change"]},
    } | {name: value for name, _, value in leaves(config) if name in DECIDING}


def warn_about_heldout(
    config: Config, saved: Record, digests: dict[str, Any], warn: Callable[[str], None]
) -> None:
    """Warn if the held-out problems of a run have changed since it was trained."""
    asked = {name: value for name, _, value in leaves(config)}
    names = ("data.source", "data.heldout_source", "seed")
    if all(asked[name] == saved.settings[name] for name in names):
        for change in describe_changes(digests, saved.inputs.get("data", {})):
            warn(f"{change}: the run may have been trained on problems of this evaluation")


def open_checkpoints(
    config: Config, from_folder: bool, stack: contextlib.ExitStack
) -> Checkpoints | None:
    """Return the checkpoints of run_dir, or None if the model folder is evaluated."""
    if from_folder:
        return None
    warn = Progress(config.log.console).warn
    storage = Storage(lambda text: warn(escape(text)))
    checkpoints = stack.enter_context(Checkpoints(config.run_dir, storage=storage))
    if checkpoints.latest_step() is None:
        raise ConfigError(
            f"config.run_dir = {config.run_dir!r}: holds no checkpoint to evaluate; --model=FOLDER "
            "evaluates a model folder"
        )
    return checkpoints


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
    abstract = components.learners.policy.abstract_state
    params = checkpoints.newest(lambda _: checkpoints.state(abstract)).params
    return f"{config.run_dir} step {checkpoints.latest_step()}", params


def claim_folder(
    config: Config,
    checkpoints: Checkpoints | None,
    stack: contextlib.ExitStack,
    warn: Callable[[str], None],
) -> tuple[Folder, bool]:
    """Return the folder of responses and report, locked until the stack is closed.

    Below run_dir its name contains the settings that are varied most often; a run may be writing
    there. If run_dir is read-only, the folder may not exist; the second value is then False, after
    a warning. Raises `ConfigError` if the folder must not be written.
    """
    data, evaluation = config.data, config.evaluation
    if evaluation.out:
        return stack.enter_context(claim("evaluation.out", evaluation.out, EVALUATION)), True
    model = model_path(config.model.folder).absolute().name
    name = [f"step_{checkpoints.latest_step()}" if checkpoints else model]
    name += [pathlib.Path(data.heldout_source or data.source).stem]
    own = (
        open_text(data.user_template) if data.user_template else open_template(data.template)
    ).digest
    name += [f"template-{own}" if own else data.template] if data.template != "none" else []
    name += [f"T{evaluation.temperature:g}", f"p{evaluation.top_p:g}"]
    below = f"evaluations/{'_'.join(name)}"
    if checkpoints and not is_remote(config.run_dir) and not os.access(config.run_dir, os.W_OK):
        warn(
            f"config.run_dir = {config.run_dir!r} is read-only: the responses and the report are "
            "not written; --out=FOLDER keeps them"
        )
        return folder_at(config.run_dir, below), False
    stack.enter_context(claim("run_dir", config.run_dir, RUN, exclusive=False))
    return stack.enter_context(claim("run_dir", config.run_dir, EVALUATION, below)), True


def evaluate(
    config: Config, *, from_folder: bool = False, signals: Signals | None = None
) -> dict[str, Any] | None:
    """Evaluate the latest checkpoint in run_dir, or the model folder or run if `from_folder`.

    Prints the report and writes it beside the responses. Returns its main scores, or None if a
    signal stopped the evaluation; the same call then resumes it. Raises `ConfigError` if run_dir
    has no checkpoint, or settings, model folder and earlier responses don't fit together, and
    `Starved` if every reward failed.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(signals or Signals(config.checkpoint.leave_seconds))
        check_processes(config)
        if from_folder:
            folder = newest_export(config.model.folder, "model.folder")
            config = with_values(config, "model", folder=folder)
        checkpoints = open_checkpoints(config, from_folder, stack)
        progress = open_console(config)
        storage = Storage(lambda text: progress.warn(escape(text)))
        folder, is_writable = claim_folder(config, checkpoints, stack, storage.warn)
        components = build(config, progress, training=False, should_abort=signals.received_locally)
        stack.callback(components.close)
        stack.enter_context(progress.compilation())
        with progress.working("loading the policy"):
            policy, params = open_policy(config, components, checkpoints)
        prompts = components.prompts.heldout_prompts()
        allowed = "more, or with shorter prompts: no problem is left to evaluate on"
        require(bool(prompts), "data.heldout_problems", config.data.heldout_problems, allowed)
        check_data(components.prompts.heldout)
        announce_data(config, components.prompts, progress)
        if config.evaluation.temperature == 0 and config.evaluation.samples_per_problem > 1:
            progress.warn("temperature 0 samples the same response k times; --k=1 is enough")
        fields = stamp(config, policy)
        deciding = deciding_settings(config, checkpoints, prompts)
        if checkpoints is not None:
            digests = components.prompts.digests
            warn_about_heldout(config, checkpoints.record(), digests, storage.warn)
        own_folder = folder if processes.is_first() else None
        file = ResponseFile(own_folder, deciding, fields, storage, is_writable)
        try:
            work = components, params, prompts, signals, file.responses
            responses = sample_missing(*work, file.append)
        except Interrupted:
            signals()  # each process learns which signal another one received
            count, place = len(file.responses), escape(str(folder))
            saved = f"in {place}. The same command resumes from there"
            told = saved if is_writable else "that were not written"
            progress.say(f"stopped by {signals.received} with {count} responses {told}")
            return None
        file.tidy()

        def publish(report: Report) -> dict[str, Any]:
            return write_report(report, responses, fields, components, storage, file.path)

        return score_responses(responses, config, publish)


def rate_problems(responses: Iterable[Response]) -> str:
    """Return a JSON line for each problem: its pass rate, with Wilson's 95 % interval."""
    scores: dict[str, list[bool]] = {}
    ids: dict[str, str] = {}
    for response in responses:
        if response.failure is None:
            ids.setdefault(response.digest, response.problem)
            scores.setdefault(response.digest, []).append(response.correct)
    lines = []
    for digest, correct in scores.items():
        rate, count = sum(correct) / len(correct), len(correct)
        low, high = wilson(rate, count)
        row = {"problem": ids[digest], "identity": digest, "samples": count}
        lines.append(json.dumps(row | {"pass_rate": rate, "low": low, "high": high}) + "\n")
    return "".join(lines)


def write_report(
    report: Report,
    responses: list[Response],
    fields: dict[str, Any],
    components: Components,
    storage: Storage,
    path: Folder | None,
) -> dict[str, Any]:
    """Print the report and write it beside `path`, the responses; return what it is of."""
    config = components.config
    fields = fields | {"data": config.data.heldout_source or config.data.source}
    if own := config.evaluation.write_difficulty:
        storage.attempt(own, lambda: write_text(epath.Path(own), rate_problems(responses)))
    print_report(components.progress, report, fields)
    if path is not None:
        place = path.parent / "report.json"
        text = json.dumps(fields | dataclasses.asdict(report), indent=2)
        storage.attempt(place.name, lambda: write_text(place, text))
        say = components.progress.say
        say(f"responses.jsonl and report.json are in {escape(str(path.parent))}")
    return {
        "policy": fields["policy"],
        "problems": report.problems,
        "samples_per_problem": report.samples_per_problem,
    }
