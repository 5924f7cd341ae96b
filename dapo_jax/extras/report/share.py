"""Facts of a run that a user may send to others: versions, chips, numbers; no user's words."""

import json
import math
import pathlib
import platform
from typing import Any

import jax

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import allowed_values, leaves
from dapo_jax.extras.plan.programs import PACKAGES, versions
from dapo_jax.extras.plan.published_shapes import NAMES
from dapo_jax.extras.report.page import charts
from dapo_jax.extras.report.recorded_run import RecordedRun
from dapo_jax.types.rules import Choices


def is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def share(run: RecordedRun) -> str:
    """Return the JSON of a run; all names and words in it are those of this package."""
    folder = pathlib.PurePath(str(run.settings.get("model.folder", ""))).name.lower()
    known = [name for name in NAMES if folder.startswith(name.lower())]
    settings = {}
    for name, field, default in leaves(Config()):
        value, allowed = run.settings.get(name, default), allowed_values(field)
        if value != default:
            is_ours = is_number(value) or (isinstance(allowed, Choices) and value in allowed)
            settings[name] = value if is_ours else "not shared"
    names = ["step", *(name for chart in charts() for name in chart["metrics"])]
    content = {
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
        "chips": {"kind": jax.devices()[0].device_kind, "count": jax.device_count()},
        "model": max(known, key=len, default=""),
        "settings": settings,
        "metrics": [{n: row[n] for n in names if is_number(row.get(n))} for row in run.rows],
    }
    return json.dumps(content, indent=1) + "\n"
