"""Checks of a run: settings, user functions, folders; and the exit codes of commands."""

import contextlib
import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Any

from dapo_jax.config.algorithm import OWN_FUNCTIONS
from dapo_jax.config.checks import validate
from dapo_jax.config.experiment import Config, Data
from dapo_jax.config.files import config_for_folder
from dapo_jax.config.settings import leaves
from dapo_jax.data.prompts.templates import VERIFIERS_OF, check_system, open_text
from dapo_jax.data.row_formats import FIELDS, parse_fields
from dapo_jax.data.sources import check_sources, is_generated, parse_sources
from dapo_jax.rewards.functions import find_functions
from dapo_jax.rewards.verifying import find_verifier
from dapo_jax.run.console import Progress
from dapo_jax.run.sinks import find_sinks
from dapo_jax.runtime import limits, processes
from dapo_jax.runtime.registry import feature
from dapo_jax.runtime.storage.files import (
    UNSAVED,
    folder_at,
    is_bucket_error,
    is_refusal,
    is_remote,
    reason,
    suppress_storage_errors,
)
from dapo_jax.runtime.storage.output_folder import RUN, check_free
from dapo_jax.runtime.user_code import choose
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.rules import is_own

WORKERS_PER_CORE = 64  # each has its own processes, most of which wait for other machines
FOLDERS = (
    "model.folder",
    "model.reference_folder",
    "extras.teacher.folder",
    "reward.model_folder",
    "critic.folder",
)


def loading(shown: bool = True) -> contextlib.AbstractContextManager:
    """Show that the libraries are loaded, for the time that the context is open."""
    return Progress(shown).working("loading the libraries")


def check(config: Any) -> None:
    """Raise `ConfigError` for every mistake that needs no file or folder to be found."""
    validate(config)
    if isinstance(config, Config):
        limit = WORKERS_PER_CORE * (os.cpu_count() or 1)
        workers = config.reward.workers
        require(workers <= limit, "reward.workers", workers, f"at most {limit} on this machine")
        find_functions(list(config.reward.weights()), extras=config.extras)
        for name, arguments in {"token_weights": "group, sample", **OWN_FUNCTIONS}.items():
            function = getattr(config.algorithm, name)
            if is_own(function) or function and name == "token_weights":
                _check_call(f"algorithm.{name}", function, arguments)
        if config.log.wandb or config.log.tensorboard:
            feature("trackers").check_trackers(config.log)
        find_sinks(config.log.sinks)
        _check_data(config.data)
        template, verifier = config.data.template, config.reward.verifier
        find_verifier(verifier)
        readers = VERIFIERS_OF.get(template, (verifier,))
        allowed = f"{' or '.join(readers)}: what data.template = {template!r} asks for"
        require(verifier in readers, "reward.verifier", verifier, allowed)


def _check_call(field: str, name: str, arguments: str) -> None:
    """Raise `ConfigError` if a user function does not accept the arguments."""
    function = choose({}, field, name)
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        raise ConfigError(
            f"config.{field} = {name!r}: {error}; it is called as ({arguments})", field
        ) from None
    except ValueError:  # functions of compiled libraries have no signature
        return


def _check_data(data: Data) -> None:
    names = [*parse_sources("data.source", data.source)]
    if data.heldout_source:
        names += parse_sources("data.heldout_source", data.heldout_source)
    fields = parse_fields("data.fields", data.fields, FIELDS)
    allowed = "empty if all problems are generated: nothing reads it"
    is_read = not fields or not all(map(is_generated, names))
    require(is_read, "data.fields", data.fields, allowed)
    check_system(data.template, data.system_prompt, data.fields if "system" in fields else "")
    if data.user_template:
        open_text(data.user_template, "data.user_template")


def check_run(config: Config, make_base: Callable[[Config], None] = lambda config: None) -> None:
    """Raise `ConfigError` if run_dir must not be written, or data or models are missing.

    `make_base` may make a missing model, once everything else is checked.
    """
    check_free("run_dir", config.run_dir, RUN)
    check_sources(config.data)
    is_resumed = True  # also if its bucket does not answer: the run reports that itself
    with suppress_storage_errors():
        is_resumed = folder_at(config.run_dir, "checkpoints").exists()
    if not is_resumed:  # a resumed run keeps its models
        make_base(config)
        check_models(config)


def check_models(config: Any) -> None:
    """Raise `ConfigError` for a model folder without readable weights."""
    from dapo_jax.model.load_huggingface import check_weights

    for name, _, folder in leaves(config):
        allowed = "a model folder, as models/NAME; the embedded task's is dapo_jax:arithmetic_base"
        require(folder or name != "model.folder", name, folder, allowed)
        if name in FOLDERS and folder and not is_remote(folder):
            if not pathlib.Path(folder).exists():
                base = config_for_folder(feature("supervised").SftConfig, folder)
                allowed = f"a folder that exists; dapo-jax sft {base} makes it"
                require(not base, name, folder, allowed)
            check_weights(folder, name)
    if config.lora.folder:
        from dapo_jax.model import load_huggingface, peft_adapters
        from dapo_jax.model.trainable import choose_trained

        base = load_huggingface.read_config(config.model.folder)
        peft_adapters.read_adapters(config.lora.folder, choose_trained(base, 0.0, config.lora))


def guarded(work: Callable[[], int | None], config: Any = None) -> int:
    """Return the exit code of `work`, which returns one or None (0).

    Print as one line what has an exit code of its own, and errors of resource limits and of the
    buckets that `config` names.
    """
    try:
        return work() or 0
    except Exception as error:
        if code := getattr(error, "exit_code", 0):  # ConfigError, Starved, NotFinite
            processes.print_error(f"error: {error}")
            return code
        if line := limits.resource_error_message(error):
            processes.print_error(f"error: {line}")
            return os.EX_OSERR
        if isinstance(error, ImportError) and "gcsfs" in str(error):
            processes.print_error("error: gs:// needs a package: pip install gcsfs")
            return 2
        if not is_bucket_error(error):
            raise
        values = (str(value) for _, _, value in leaves(config)) if config else ()
        buckets = ", ".join(v for v in values if v.startswith("gs://")) or "the bucket"
        processes.print_error(f"error: {buckets} can't be read or written: {reason(error)}")
        return 2 if is_refusal(error) else UNSAVED
