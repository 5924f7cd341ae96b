"""Validation of a config, from its settings alone.

What depends on the model folder or the devices is checked where those are opened, before anything
is compiled.
"""

import itertools
from typing import Any

from dapo_jax.config.combinations import Check, check_combinations
from dapo_jax.config.experiment import Config, DpoConfig, ServeConfig, SftConfig
from dapo_jax.config.sections import GENERATED
from dapo_jax.runtime.settings import check_read, check_types, check_values, leaves, require


def _check_terms(section: str, terms: Any, check: Check) -> None:
    allowed = f"from 2 to {section}.max_terms = {terms.max_terms}"
    check(f"{section}.min_terms", 2 <= terms.min_terms <= terms.max_terms, allowed)


def _check_rows(config: Config | SftConfig, longest: int, check: Check) -> None:
    """Checks the rows against the longest prompt + response."""
    rows, has_auto = config.packing.row_tokens, isinstance(config, Config)
    check(
        "packing.row_tokens",
        rows >= longest or has_auto and rows == -1,
        f"at least the longest prompt + the response budget = {longest}"
        + ", or 'auto' (-1)" * has_auto,
    )


def _check_serving(config: ServeConfig, check: Check) -> None:
    check("model", config.model != "", "a model folder: --model=FOLDER")
    check("host", config.host != "", "an address of this machine; 0.0.0.0: all")
    for name, other in itertools.combinations(("port", "http_port", "metrics_port"), 2):
        port = getattr(config, other)
        check(other, port == 0 or port != getattr(config, name), f"another one than {name}")


def _check_heldout(config: Config, check: Check) -> None:
    check(
        "data.heldout_problems",
        not config.data.heldout_source or config.data.heldout_problems != 0,
        "not 0 with data.heldout_source, which is kept out of training and evaluated whole",
    )


def _check_generated_examples(config: SftConfig, check: Check) -> None:
    check("total_steps", config.total_steps > 0, "above 0")
    _check_terms("examples", config.examples, check)
    longest = 2 * config.examples.max_terms  # a digit and a sign each
    _check_rows(config, longest + config.max_response_tokens, check)
    shape = config.architecture
    check("architecture.head_dim", shape.head_dim % 2 == 0, "even")
    divides = shape.heads % shape.kv_heads == 0
    check("architecture.kv_heads", divides, f"a divisor of architecture.heads = {shape.heads}")


def _check_own_examples(config: SftConfig | DpoConfig, check: Check) -> None:
    source = config.data.source
    check("data.source", source != "", "a file, folder or glob of rows")
    check("start", config.start != "", f"a model folder with data.source = {source!r}")
    check(
        "data.template",
        config.data.template != "few_shot",
        "another one: examples are no problems to be shown before others",
    )
    check("packing.row_tokens", config.packing.row_tokens > 0, "above 0")


def check_warmup(config: Any) -> None:
    """Raises `ConfigError` for a chosen warm-up that never ends.

    A run with a constant rate may go on for longer, and is only warned.
    """
    values, defaults = (
        {name: value for name, _, value in leaves(each)} for each in (config, type(config)())
    )
    for name in values if config.total_steps else ():
        section, _, last = name.rpartition(".")
        ends = last != "warmup_steps" or values[f"{section}.schedule"] == "constant"
        if not ends and values[name] != defaults[name]:
            allowed = f"at most total_steps = {config.total_steps}, or the peak rate never comes"
            require(values[name] <= config.total_steps, name, values[name], allowed)


def validate(config: Any) -> None:
    """Raises `ConfigError` for the first setting or combination that makes no sense."""
    check_types(config)
    check_values(config)
    settings = {name: value for name, _, value in leaves(config)}

    def check(name: str, fits: bool, allowed: str) -> None:
        require(fits, name, settings[name], allowed)

    if isinstance(config, ServeConfig):
        _check_serving(config, check)
    elif isinstance(config, Config):
        _check_terms("data", config.data, check)
        _check_rows(config, config.longest_tokens(), check)
        _check_heldout(config, check)
        check_combinations(config, check)
    elif isinstance(config, SftConfig) and config.data.source in GENERATED:
        _check_generated_examples(config, check)
    elif isinstance(config, SftConfig | DpoConfig):
        _check_own_examples(config, check)
    if "lora.rank" in settings:
        of_folder = f"r of {settings['lora.folder']}/adapter_config.json, with lora.folder"
        check("lora.rank", settings["lora.rank"] != 0 or not settings["lora.folder"], of_folder)
    if isinstance(config, SftConfig):
        base = "0 without start: there is no base model to adapt"
        check("lora.rank", config.lora.rank == 0 or config.start != "", base)
    if "mesh.data" in settings:
        rest = "above 0, or -1 where mesh.data is not"
        check("mesh.fsdp", settings["mesh.fsdp"] > 0 or settings["mesh.data"] > 0, rest)
    check_read(config)
