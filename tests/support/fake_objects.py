"""The objects of a fake bucket, and what goes wrong when they are asked for (fake_gcs.py)."""

import dataclasses
import datetime
import random
import threading
from collections.abc import Callable

PAGE = 1000  # names in an answer to a listing


@dataclasses.dataclass
class Faults:
    """What goes wrong from now on; a test changes it while requests come.

    Attributes:
        latency: seconds before every answer.
        share: of requests that fail, in the ways of `kinds` in turn. Which ones is decided by
            `seed` and the number of the request.
        kinds: statuses; "reset" closes the connection, "lost" does so once the work is done.
        away: nothing answers: connections are closed at once.
        forbidden: methods that are answered by 403; GET, PUT, POST and DELETE are all.
    """

    latency: float = 0.0
    share: float = 0.0
    kinds: tuple[int | str, ...] = (503, 429, 500, "reset", "lost")
    seed: int = 0
    away: bool = False
    forbidden: tuple[str, ...] = ()

    def of(self, number: int) -> int | str | None:
        """What happens to the request of that number."""
        if self.away:
            return "reset"
        rng = random.Random(f"{self.seed} {number}")
        return rng.choice(self.kinds) if rng.random() < self.share else None


@dataclasses.dataclass
class Object:
    content: bytes
    generation: int
    updated: str

    def said(self, bucket: str, name: str) -> dict[str, str]:
        """As the JSON API tells it."""
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(self.content)),
            "generation": str(self.generation),
            "metageneration": "1",
            "updated": self.updated,
            "timeCreated": self.updated,
        }


class Refused(Exception):
    """Answered by a status and no content."""


class Store:
    """The objects of all buckets, and what was asked for.

    Attributes:
        asked: (method, name, bytes sent or received) of every request that was answered well.
        failed: how many were not, by what happened to them.
        before: is told method and name of every request, and may change what goes wrong.
    """

    def __init__(self, *buckets: str):
        self.objects: dict[str, dict[str, Object]] = {bucket: {} for bucket in buckets}
        self.faults, self.lock = Faults(), threading.RLock()
        self.asked: list[tuple[str, str, int]] = []
        self.failed: dict[int | str, int] = {}
        self.before: Callable[[str, str], object] = lambda method, name: None
        self._generation, self._requests = 1_700_000_000_000_000, 0
        self.uploads: dict[str, tuple[str, str, bytearray]] = {}  # resumable ones, by number

    def fate(self) -> int | str | None:
        """What happens to the next request."""
        with self.lock:
            self._requests += 1
            found = self.faults.of(self._requests)
            if found is not None:
                self.failed[found] = self.failed.get(found, 0) + 1
            return found

    def bucket(self, name: str) -> dict[str, Object]:
        if name not in self.objects:
            raise Refused(404)
        return self.objects[name]

    def read(self, bucket: str, name: str, conditions: dict[str, str] | None = None) -> Object:
        found = self.bucket(bucket).get(name)
        self._check(found, conditions or {})
        if found is None:
            raise Refused(404)
        return found

    def write(
        self, bucket: str, name: str, content: bytes, conditions: dict[str, str] | None = None
    ) -> Object:
        with self.lock:
            self._check(self.bucket(bucket).get(name), conditions or {})
            self._generation += 1
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
            self.objects[bucket][name] = Object(bytes(content), self._generation, now)
            return self.objects[bucket][name]

    def delete(self, bucket: str, name: str, conditions: dict[str, str] | None = None) -> None:
        with self.lock:
            self.read(bucket, name, conditions)
            del self.objects[bucket][name]

    @staticmethod
    def _check(found: Object | None, conditions: dict[str, str]) -> None:
        generation = found.generation if found else 0
        if int(conditions.get("ifGenerationMatch", generation)) != generation:
            raise Refused(412)
        if found and int(conditions.get("ifGenerationNotMatch", -1)) == generation:
            raise Refused(304)

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, object]:
        """Names and, with a delimiter, what stands before it behind the prefix; by pages."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("pageToken", "")
        with self.lock:
            there = dict(self.bucket(bucket))
        found: dict[str, Object | None] = {}
        for name in sorted(there):
            if not name.startswith(prefix) or name < query.get("startOffset", ""):
                continue
            if "endOffset" in query and name >= query["endOffset"]:
                continue
            rest, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            found[prefix + rest + cut if cut else name] = None if cut else there[name]
        names = [name for name in sorted(found) if name > after]
        most = min(PAGE, int(query.get("maxResults", PAGE)))
        shown = {name: found[name] for name in names[:most]}
        answer: dict[str, object] = {
            "kind": "storage#objects",
            "items": [one.said(bucket, name) for name, one in shown.items() if one],
            "prefixes": [name for name, one in shown.items() if not one],
        }
        return answer | ({"nextPageToken": names[most - 1]} if len(names) > most else {})
