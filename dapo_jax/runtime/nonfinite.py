"""Checks for NaN and infinity in parameters, moments and updates."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAX_SHOWN = 3  # arrays that an error names
# Causes of a skipped update, by metric.
REASONS = {
    "skipped_for_gradient": "the gradient",
    "skipped_for_moments": "an optimizer moment",
    "skipped_for_parameters": "a new parameter",
}
SKIPPED = "skipped_updates"
PREFIXES = ("", "value_")  # of the metrics of the policy and of the critic


class NotFinite(RuntimeError):
    """Raised for parameters or moments that hold NaN or infinity, and updates that would."""

    exit_code = 4  # of a command that it ends


@jax.jit
def _is_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()


def path_name(path: tuple) -> str:
    """Return the name of an array by its path in a tree, as `mu/layers/query/kernel`."""
    parts = (getattr(part, "key", getattr(part, "name", "")) for part in path)
    return "/".join(str(part) for part in parts if part != "")


def describe(tree: Any) -> str:
    """List the arrays with NaN or infinity and their counts; "" if there are none.

    A collective call.
    """
    broken = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _is_finite(leaf):  # on CPUs a sum needs a float32 copy of the leaf
            count = float(jnp.sum(~jnp.isfinite(leaf), dtype=jnp.float32))  # int32 is too small
            broken.append(f"{path_name(path)} ({count:.0f} of {np.size(leaf)})")
    rest = len(broken) - MAX_SHOWN
    return ", ".join(broken[:MAX_SHOWN]) + f" and {rest} more" * (rest > 0)


def check_state(states: Mapping[str, Any], what: str) -> None:
    """Raise `NotFinite` if parameters or moments have NaN or infinity."""
    for name, state in states.items():
        params, moments = getattr(state, "params", state), getattr(state, "opt_state", {})
        for kind, tree in ("parameters", params), ("optimizer moments", moments):
            if arrays := describe(tree):
                owner = "the policy" if name == "state" else f"the {name}"
                raise NotFinite(f"{what}: {kind} of {owner} are not finite: {arrays}")


def count_skipped(before: dict[str, int], values: dict[str, float]) -> dict[str, int]:
    """Count consecutive steps without a taken update, by prefix of policy and critic."""
    now = {prefix: values.get(f"{prefix}{SKIPPED}") for prefix in PREFIXES}
    return {
        prefix: before.get(prefix, 0) + (share == 1) if share in (None, 1) else 0
        for prefix, share in now.items()
    }


def reasons(values: dict[str, float], prefix: str = "") -> str:
    """Describe why a step skipped updates."""
    return " and ".join(text for name, text in REASONS.items() if values.get(prefix + name))


def is_reason(name: str) -> bool:
    """Return True if a metric counts a reason of skipped updates."""
    return name.removeprefix("value_") in REASONS


def check_skipped(count: int, limit: int, values: dict[str, float], prefix: str = "") -> None:
    """Raise `NotFinite` if `limit` consecutive steps (0: no limit) took no update."""
    if 0 < limit <= count:
        critic = prefix != ""
        raise NotFinite(
            f"{count} steps in a row took no update{' of the critic' * critic}: "
            f"{reasons(values, prefix)} was not finite "
            f"(config.{'critic.' * critic}optimizer.max_skipped_steps = {limit})"
        )
