"""Format of groups in checkpoints and messages: JSON without prompts, arrays in base64."""

import base64
import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.rollout.source import Rollout
from dapo_jax.types.structs import (
    CollectedGroups,
    Completion,
    FailedResponse,
    Failure,
    Group,
    PartialGroup,
    Prompt,
    SamplerCounts,
    Turn,
    TurnCounts,
    Verdict,
)

ReadPrompt = Callable[[int], Prompt]  # returns the prompt at a position in the data
# Fields of `CollectedGroups` that are lists of groups.
GROUP_LISTS = ("groups", "judged", "surplus", "broken", "resampled")


def _encode_array(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": array.shape, "data": data}


def _decode(fields: dict[str, Any]) -> Any:
    if fields.keys() != {"dtype", "shape", "data"}:
        return fields
    data = bytearray(base64.b64decode(fields["data"]))
    return np.frombuffer(data, fields["dtype"]).reshape(fields["shape"])


def _fields(value: Any) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Group | PartialGroup):
        fields["prompt"] = value.prompt.index
    return fields


def _encode(value: Any) -> Any:
    return _encode_array(value) if isinstance(value, np.ndarray) else _fields(value)


def to_text(value: Any) -> str:
    """Return lists, dictionaries and dataclasses of these as JSON."""
    return json.dumps(value, default=_encode)


def from_text(text: str | bytes) -> Any:
    """Invert `to_text`, except that dataclasses stay dictionaries of their fields."""
    return json.loads(text, object_hook=_decode)


def dump(value: Any) -> bytes:
    """Return `to_text` of a value, compressed."""
    return zlib.compress(to_text(value).encode())


def load(content: bytes, max_bytes: int = 0) -> Any:
    """Invert `dump`, as `from_text` does.

    Raises ValueError if the content is no such text, or longer than `max_bytes` (0: any length).
    """
    try:
        decompressor = zlib.decompressobj()
        text = decompressor.decompress(content, max_bytes)
        if not decompressor.eof:
            raise ValueError("it is too long, or incomplete")
        return from_text(text)
    except (zlib.error, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from None


def completion_from(fields: dict[str, Any]) -> Completion:
    """Return a response from its fields."""
    fields["earlier"] = tuple(map(tuple, fields["earlier"]))
    fields["turns"] = tuple(Turn(*turn) for turn in fields["turns"])
    fields["rewards"] = tuple(fields["rewards"])
    fields["failures"] = tuple(fields["failures"])
    return Completion(**fields)


def read_counts(fields: dict[str, Any]) -> SamplerCounts:
    """Return counts from their fields."""
    turns: Any = fields["turns"] and TurnCounts(**fields["turns"])
    return SamplerCounts(**fields | {"turns": turns})


def _group_from(fields: dict[str, Any], prompt: Prompt) -> Group:
    fields["completions"] = tuple(map(completion_from, fields["completions"]))
    fields["verdicts"] = tuple(map(Verdict.from_json, fields["verdicts"]))
    failed = [(completion_from(done), Failure.from_json(why)) for done, why in fields["failed"]]
    fields["failed"] = tuple(FailedResponse(done, why) for done, why in failed if why)
    fields["prompt"] = prompt
    return Group(**fields)


def pack_partial(groups: Sequence[PartialGroup]) -> np.ndarray:
    """Return groups as [n] uint8; instead of a prompt, only its position in the data."""
    return np.frombuffer(dump(groups), np.uint8)


def unpack_partial(content: np.ndarray, read_prompt: ReadPrompt) -> tuple[PartialGroup, ...]:
    """Invert `pack_partial`."""
    groups = []
    for fields in load(content.tobytes()):
        prompt, judged = read_prompt(fields["prompt"]), fields["judged"]
        if judged:
            judged = _group_from(judged, prompt)
        finished, begun = (tuple(map(completion_from, fields[n])) for n in ("finished", "begun"))
        groups.append(PartialGroup(prompt, fields["step"], finished, begun, judged))
    return tuple(groups)


def pack_rollouts(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Return rollouts without carried groups as [n] uint8; each group is stored once."""
    packed = []
    for rollout in rollouts:
        groups: dict[int, Group] = {}
        batch = _fields(rollout.batch) | {"carried": (), "reused": [], "traces": {}}
        for name in GROUP_LISTS:
            groups |= {id(group): group for group in batch[name]}
        places = {key: place for place, key in enumerate(groups)}
        for name in GROUP_LISTS:
            batch[name] = [places[id(group)] for group in batch[name]]
        stored = {"groups": list(groups.values()), "batch": batch}
        rest = {name: getattr(rollout, name) for name in ("counts", "seconds", "passed_over")}
        packed.append(stored | rest)
    return np.frombuffer(dump(packed), np.uint8)


def unpack_rollouts(content: np.ndarray, read_prompt: ReadPrompt) -> tuple[Rollout, ...]:
    """Invert `pack_rollouts`."""
    rollouts = []
    for fields in load(content.tobytes()):
        groups = [_group_from(group, read_prompt(group["prompt"])) for group in fields["groups"]]
        batch = fields["batch"]
        for name in GROUP_LISTS:
            batch[name] = [groups[i] for i in batch[name]]
        batch |= {"carried": (), "reused": frozenset(), "resampled": tuple(batch["resampled"])}
        rest = read_counts(fields["counts"]), fields["seconds"], fields["passed_over"]
        rollouts.append(Rollout(CollectedGroups(**batch), *rest))
    return tuple(rollouts)
