"""Response file: judged responses as JSON lines, so that none has to be drawn twice."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from dapo_jax.reporting.scores import REFLECTION, Response
from dapo_jax.reporting.sinks import trajectory_fields
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.jsonl import AppendFile, read_object, spell
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import Storage, reason, replacing, write_text
from dapo_jax.structs import Group, repetition

FIELDS = {field.name for field in dataclasses.fields(Response)}
NEEDED = {
    field.name for field in dataclasses.fields(Response) if field.default is dataclasses.MISSING
}


def responses_of(group: Group) -> Iterator[Response]:
    """Yields the responses of a judged group."""
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
            repetition=repetition(completion.drawn_tokens),
            failure=verdict.broken or verdict.failure,
            subject=prompt.subject,
            level=prompt.level,
            turns=trajectory_fields(completion).get("turns", ()),
        )


def write_responses(path: Folder, responses: Iterable[Response], stamp: dict[str, Any]) -> None:
    """Writes a whole file or nothing, sorted by problem and sample; `stamp` goes on every line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for response in sorted(responses, key=lambda response: (response.index, response.sample)):
            file.write(_line(response, stamp))


def _line(response: Response, stamp: dict[str, Any]) -> bytes:
    fields = dataclasses.asdict(response)
    if not response.turns:
        del fields["turns"]
    return json.dumps(fields | stamp).encode() + b"\n"


def _read(path: Folder) -> tuple[list[Response], list[int]]:
    """Responses of a file, and numbers of broken lines but one that a kill cut off."""
    responses, broken = [], []
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, 1):
        values = read_object(line)
        if values is not None and values.keys() >= NEEDED:
            responses.append(Response(**{name: values[name] for name in FIELDS & set(values)}))
        else:
            broken.append(number)
    return responses, broken


class ResponseFile:
    """Response file of an evaluation, with the settings that it was begun with.

    Args:
        folder: None on a process beside the first, which keeps new responses in memory only.
        settings: values, by name, that decide the responses.
        stamp: fields of every line.
        storage: warns of lines that can't be read and of writes that fail.

    Attributes:
        responses: old and new ones by (place in the problem file, sample).

    Raises `ConfigError` that names every setting that differs from those of the folder.
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
        settings_path = folder / "settings.json"
        try:
            if settings_path.exists():
                check_same_evaluation(folder, settings, json.loads(settings_path.read_text()))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                write_text(settings_path, json.dumps(settings, indent=2))
            responses, broken = _read(path)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the evaluation in {str(folder)!r} can't go on: {reason(error)}; choose another "
                "folder by --out, or remove that one"
            ) from None
        if broken:
            text = f"lines {spell(broken)} of {path} are no responses: those are drawn again"
            self._storage.warn(text)
        # A response whose verdict failed is drawn and judged again.
        self.responses = {(r.index, r.sample): r for r in responses if r.failure is None}
        self._growing = AppendFile(path)
        self.tidy()

    def append(self, response: Response) -> None:
        """Adds a line: on disk when this returns, on an object store soon."""
        self.responses[response.index, response.sample] = response
        if self.path is not None:
            self._growing.add(_line(response, self._stamp))
            write = functools.partial(self._growing.write, rarely=True)
            self._storage.attempt(self.path.name, write)

    def tidy(self) -> None:
        """Sorts the lines, which were written as responses finished."""
        if self.path is not None:
            content = self.path, self.responses.values(), self._stamp
            self._storage.attempt(self.path.name, lambda: write_responses(*content))


def check_same_evaluation(folder: Folder, settings: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises `ConfigError` that names every setting that differs from those in `folder`."""
    changed = [
        f"{name}: {settings.get(name)!r}, but it was begun with {saved.get(name)!r}"
        for name in sorted(settings | saved)
        if settings.get(name) != saved.get(name)
    ]
    if changed:
        raise ConfigError(
            f"the evaluation in {str(folder)!r} can't go on with other settings; choose another "
            "folder by --out:\n  " + "\n  ".join(changed)
        )
