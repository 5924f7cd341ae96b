"""Errors of settings: each names the field, its value and what is allowed."""

import collections
import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

# Settings and sections of earlier versions that have another name.
OF_MATH, OF_SAMPLERS = ("percent", "unfinished"), ("host", "key_file", "lease_seconds", "port")
MOVED = {"reward.judge": "extras.judge", "teacher": "extras.teacher"}
MOVED |= {"extras.teacher.weights_dtype": "extras.teacher.dtype"}
MOVED |= {"rollout.lag": "rollout.staleness", "rollout.remote": "sampler.engine"}
MOVED |= {"environment.max_drawn_tokens": "environment.max_sampled_tokens"}
MOVED |= {f"reward.{name}": f"extras.math.{name}" for name in OF_MATH}
MOVED |= {f"sampler.{name}": f"extras.samplers.{name}" for name in OF_SAMPLERS}
HUB_ADDRESS = re.compile(
    r"(?:hf://|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(datasets/)?([\w.-]+/[\w.-]+)", re.I
)


class ConfigError(ValueError):
    """An invalid setting (`field` is its dotted name) or combination of settings."""

    exit_code = 2  # of a command that it ends

    def __init__(self, message: str, field: str = ""):
        super().__init__(message)
        self.field = field


class JudgeUnavailable(ConnectionError):
    """Raise this in a reward function when an external service is unavailable."""

    counts: dict[str, float] = {}  # of requests, for metrics


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raise `ConfigError` with the field, its value and what is allowed, unless `condition`."""
    if not condition:
        raise ConfigError(f"config.{field} = {value!r}: must be {allowed}", field)


@contextlib.contextmanager
def naming(field: str, value: Any) -> Iterator[None]:
    """Add the setting that names a file to errors about the file inside the context."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith("config."):
            raise
        raise ConfigError(f"config.{field} = {value!r}: {error}", field) from None


def nearest(name: str, names: Iterable[str], cutoff: float = 0.4) -> str:
    """Return the suggestion `; did you mean ...?`, or "" if no name is similar."""
    names = list(names)
    last = {full: full.rpartition(".")[2] for full in (name, *names)}
    initials = [n for n in names if "".join(w[:1] for w in last[n].split("_")) == last[name]]
    similar = initials or difflib.get_close_matches(name, names, n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def present_name(name: str) -> str:
    """Return the present name of a setting or section, which may be that of an earlier version."""
    for old, new in MOVED.items():
        if f"{name}.".startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def check_unique(names: Iterable[Any], what: str) -> None:
    """Raise ValueError if a name occurs twice: one of the values would be lost."""
    name, count = max(collections.Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ValueError(f"the {what} {name!r} occurs twice")


def check_place(field: str, value: str) -> None:
    """Raise `ConfigError` for an address of anything but a bucket: it would not be downloaded."""
    if not re.match(r"(?!gs://)[a-z][\w+.-]*://[^\s{]*$", value, re.IGNORECASE):
        return
    allowed = "a local path or a gs:// path: nothing else is downloaded"
    if found := HUB_ADDRESS.match(value):
        is_data, name = found.groups()
        folder = f"{'data' if is_data else 'models'}/{name.rpartition('/')[2]}"
        kind = "--repo-type dataset " * bool(is_data)
        allowed += f" unasked. First: hf download {name} {kind}--local-dir {folder}"
    require(False, field, value, allowed)


@contextlib.contextmanager
def memory_error_as_config_error(what: str) -> Iterator[None]:
    """Turn a MemoryError inside the context into a `ConfigError` about `what`."""
    try:
        yield
    except MemoryError:
        raise ConfigError(f"{what}: needs more memory than is available") from None
