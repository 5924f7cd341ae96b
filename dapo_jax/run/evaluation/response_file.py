"""Judged responses on disk: a JSON line each, so that nothing has to be sampled twice."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from dapo_jax.reporting.scores import REFLECTION, Response
from dapo_jax.rewards.group_rewards import repetition
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.jsonl import AppendFile, read_object, spell
from dapo_jax.runtime.storage.ownership import Folder
from dapo_jax.runtime.storage.retries import Storage, reason, replacing, write_text
from dapo_jax.structs import Group

FIELDS = {field.name for field in dataclasses.fields(Response)}
NEEDED = {
    field.name for field in dataclasses.fields(Response) if field.default is dataclasses.MISSING
}


def responses_of(group: Group) -> Iterator[Response]:
    """What is kept of a judged group."""
    prompt = group.prompt
    judged = zip(group.completions, group.verdicts, group.correct, strict=True)
    for completion, verdict, correct in judged:
        yield Response(
            problem=prompt.id,
            index=prompt.index,
            sample=completion.sample,
            question=prompt.text,
            answer=prompt.answer,
            response=completion.text,
            extracted=verdict.extracted,
            correct=bool(correct),
            truncated=completion.truncated,
            tokens=len(completion),
            logprob=round(float(completion.sampler_logprobs.sum(dtype=float)), 4),
            reflection=bool(REFLECTION.search(completion.text)),
            repetition=repetition(completion.tokens),
            failure=verdict.broken or verdict.failure,
            subject=prompt.subject,
            level=prompt.level,
        )


def write_responses(path: Folder, responses: Iterable[Response], stamp: dict[str, Any]) -> None:
    """The whole file, in file order, complete or absent; every line also says `stamp`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for one in sorted(responses, key=lambda one: (one.index, one.sample)):
            file.write(_line(one, stamp))


def _line(response: Response, stamp: dict[str, Any]) -> bytes:
    return json.dumps(dataclasses.asdict(response) | stamp).encode() + b"\n"


def _read(path: Folder) -> tuple[list[Response], list[int]]:
    """The responses of a file, and the numbers of the lines that are none.

    Not those of a line that a kill cut off.
    """
    found, broken = [], []
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, 1):
        values = read_object(line)
        if values is not None and values.keys() >= NEEDED:
            found.append(Response(**{name: values[name] for name in FIELDS & set(values)}))
        else:
            broken.append(number)
    return found, broken


class ResponseFile:
    """The growing file of an evaluation, with the settings it was begun with.

    Args:
        folder: None on a process beside the first, which keeps what is new in memory only.
        settings: what decides the responses, by name; a folder that was begun with others is not
            gone on with.
        stamp: said on every line.
        storage: is told of lines that can't be read, and what can't be written.

    Attributes:
        responses: those on disk and new ones, by (place in the file, sample).

    Raises `ConfigError` naming every setting that differs.
    """

    def __init__(
        self,
        folder: Folder | None,
        settings: dict[str, Any],
        stamp: dict[str, Any],
        storage: Storage | None = None,
    ):
        self._stamp, self.responses, self._storage = stamp, {}, storage or Storage()
        self.path = None if folder is None else folder / "responses.jsonl"
        if folder is not None:
            self._open(folder, folder / "responses.jsonl", settings)

    def _open(self, folder: Folder, path: Folder, settings: dict[str, Any]) -> None:
        begun = folder / "settings.json"
        try:
            if begun.exists():
                check_same_evaluation(folder, settings, json.loads(begun.read_text()))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                write_text(begun, json.dumps(settings, indent=2))
            found, broken = _read(path)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the evaluation in {str(folder)!r} can't go on: {reason(error)}; choose another "
                "folder by --out, or remove that one"
            ) from None
        if broken:
            said = f"lines {spell(broken)} of {path} are no responses: those are drawn again"
            self._storage.warn(said)
        # A verdict that a worker could not finish is asked for again.
        finished = (one for one in found if one.failure is None)
        self.responses = {(one.index, one.sample): one for one in finished}
        self._growing = AppendFile(path)
        self.tidy()

    def append(self, response: Response) -> None:
        """One line, on disk when this returns, or soon where that is an object store."""
        self.responses[response.index, response.sample] = response
        if self.path is not None:
            self._growing.add(_line(response, self._stamp))
            write = functools.partial(self._growing.write, rarely=True)
            self._storage.attempt(self.path.name, write)

    def tidy(self) -> None:
        """Brings the lines into file order: they were written as responses finished."""
        if self.path is not None:
            told = self.path, self.responses.values(), self._stamp
            self._storage.attempt(self.path.name, lambda: write_responses(*told))


def check_same_evaluation(folder: Folder, settings: dict[str, Any], begun: dict[str, Any]) -> None:
    """Raises `ConfigError` where the responses in `folder` answer to other settings."""
    names = sorted(set(settings) | set(begun))
    changed = [
        f"{name}: {settings.get(name)!r}, but it was begun with {begun.get(name)!r}"
        for name in names
        if settings.get(name) != begun.get(name)
    ]
    if changed:
        raise ConfigError(
            f"the evaluation in {str(folder)!r} can't go on with other settings; choose another "
            "folder by --out:\n  " + "\n  ".join(changed)
        )
