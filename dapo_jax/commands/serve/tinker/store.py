"""Everything that a server of Tinker's API must not lose: requests, results, models, checkpoints.

A request is stored before it is acknowledged. A model's state is its last written file and the
requests after it, which give the same bits when they are run again.
"""

import contextlib
import enum
import json
import pathlib
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, owner TEXT, number INTEGER, kind TEXT, arrived REAL, body BLOB,
    state INTEGER, result BLOB, read_at REAL);
CREATE INDEX IF NOT EXISTS by_owner ON requests (owner, number);
CREATE INDEX IF NOT EXISTS by_state ON requests (state);
CREATE TABLE IF NOT EXISTS entries (
    kind TEXT, id TEXT, parent TEXT, created REAL, fields TEXT, PRIMARY KEY (kind, id));
CREATE INDEX IF NOT EXISTS by_parent ON entries (kind, parent);
"""
RESULT_SECONDS = 3600.0  # that a result is kept after a client has read it
CHANGES = ("forward_backward", "optim_step", "load_weights", "create_model")  # kinds that replay


class State(enum.IntEnum):
    """State of a request."""

    PENDING = 0
    DONE = 1  # the result is binary
    ANSWERED = 2  # the result is JSON
    FAILED = 3  # the result is the error, as JSON


class Request(NamedTuple):
    """A stored request; `number` orders those of an owner: a model or a sampling session."""

    id: str
    owner: str
    number: int
    kind: str


class Waiting(NamedTuple):
    """A request of a model that waits, its time, and the number that the model runs next."""

    request: Request
    arrived: float
    expected: int


class Entry(NamedTuple):
    """A session, model, sampling session or checkpoint."""

    id: str
    parent: str
    created: float
    fields: dict[str, Any]


class Store:
    """Database and files in a folder that only this process writes; all threads may call it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._lock = threading.RLock()
        path = folder / "requests.sqlite"
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")  # an acknowledged request is on the disk
        self._database.executescript(SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all that the block does, or nothing; a nested block is part of the outer one."""
        with self._lock:
            if self._database.in_transaction:
                yield self._database
                return
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _rows(self, query: str, *values: Any) -> list[tuple]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    # --- requests ---------------------------------------------------------------------------------

    def accept(self, request: Request, body: bytes) -> None:
        """Store a request durably, unless its id is known, which a retry has."""
        with self.transaction() as database:
            database.execute(
                "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL)",
                (*request, time.time(), body, State.PENDING),
            )

    def finish(self, request: Request, state: State, result: bytes) -> None:
        """Store a result; the request is not run again."""
        keep = state != State.FAILED and request.kind in CHANGES
        body = "body" if keep else "NULL"
        with self.transaction() as database:
            database.execute(
                f"UPDATE requests SET state = ?, result = ?, body = {body} WHERE id = ?",
                (state, result, request.id),
            )

    def read_result(self, request_id: str) -> tuple[State, bytes | None] | None:
        """Return state and result of a request, None if it is unknown; it is removed later."""
        rows = self._rows("SELECT state, result FROM requests WHERE id = ?", request_id)
        if not rows:
            return None
        if rows[0][0] != State.PENDING:
            with self.transaction() as database:
                query = "UPDATE requests SET read_at = ? WHERE id = ? AND read_at IS NULL"
                database.execute(query, (time.time(), request_id))
        return State(rows[0][0]), rows[0][1]

    def body(self, request_id: str) -> bytes:
        return self._rows("SELECT body FROM requests WHERE id = ?", request_id)[0][0]

    def pending(self, kind: str) -> list[Request]:
        """Return the requests of a kind without a result, in order of arrival."""
        query = "SELECT id, owner, number, kind FROM requests WHERE state = 0 AND kind = ?"
        return [Request(*row) for row in self._rows(f"{query} ORDER BY rowid", kind)]

    def count_pending(self) -> int:
        return self._rows("SELECT COUNT(*) FROM requests WHERE state = 0")[0][0]

    def first_pending(self, other_kind: str) -> list[Waiting]:
        """Return the first request without a result of each owner, but of another kind."""
        query = (
            "SELECT id, owner, MIN(number), kind, arrived FROM requests "
            "WHERE state = 0 AND kind != ? GROUP BY owner"
        )
        rows = self._rows(query, other_kind)
        return [Waiting(Request(*row[:4]), row[4], self.last_number(row[1]) + 1) for row in rows]

    def last_number(self, owner: str) -> int:
        """Return the number of an owner's last request with a result, -1 without any."""
        query = "SELECT number FROM requests WHERE owner = ? AND state != 0"
        rows = self._rows(f"{query} ORDER BY number DESC LIMIT 1", owner)
        return rows[0][0] if rows else -1

    def changes(self, owner: str, after: int) -> list[Request]:
        """Return the requests that changed a model after the one with this number."""
        query = (
            "SELECT id, owner, number, kind FROM requests WHERE owner = ? AND number > ? "
            "AND state IN (1, 2) AND body IS NOT NULL ORDER BY number"
        )
        return [Request(*row) for row in self._rows(query, owner, after)]

    def forget_bodies(self, owner: str, up_to: int) -> None:
        """Remove the bodies of requests whose effect is in the model's file."""
        with self.transaction() as database:
            query = "UPDATE requests SET body = NULL WHERE owner = ? AND number <= ? AND state != 0"
            database.execute(query, (owner, up_to))

    def tidy(self) -> None:
        """Remove results that were read long ago, and expired checkpoints."""
        with self.transaction() as database:
            query = "UPDATE requests SET result = NULL WHERE read_at < ? AND result IS NOT NULL"
            database.execute(query, (time.time() - RESULT_SECONDS,))
        for entry in self.entries("checkpoint"):
            if (entry.fields.get("expires") or float("inf")) < time.time():
                self.remove_checkpoint(entry.id)

    # --- sessions, models, sampling sessions, checkpoints -----------------------------------------

    def put(self, kind: str, name: str, parent: str, fields: dict[str, Any]) -> None:
        """Store an entry; one of the same name keeps its time of creation."""
        with self.transaction() as database:
            database.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, id) DO UPDATE SET "
                "parent = excluded.parent, fields = excluded.fields",
                (kind, name, parent, time.time(), json.dumps(fields)),
            )

    def get(self, kind: str, name: str) -> Entry | None:
        return next(iter(self.entries(kind, name=name)), None)

    def entries(self, kind: str, parent: str | None = None, name: str | None = None) -> list[Entry]:
        """Return the entries of a kind, all or those of a parent or name, the newest first."""
        query = "SELECT id, parent, created, fields FROM entries WHERE kind = ?1"
        query += " AND (?2 IS NULL OR parent = ?2) AND (?3 IS NULL OR id = ?3)"
        rows = self._rows(f"{query} ORDER BY created DESC, id DESC", kind, parent, name)
        return [Entry(row[0], row[1], row[2], json.loads(row[3])) for row in rows]

    def remove_checkpoint(self, path: str) -> None:
        """Remove a checkpoint and its files."""
        with self.transaction() as database:
            database.execute("DELETE FROM entries WHERE kind = 'checkpoint' AND id = ?", (path,))
        shutil.rmtree(self.checkpoint_folder(path), ignore_errors=True)

    # --- files ------------------------------------------------------------------------------------

    def model_file(self, model_id: str, number: int) -> pathlib.Path:
        """Return the file of a model's state after its request with this number."""
        folder = self.folder / "models" / model_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{number}.safetensors"

    def checkpoint_folder(self, path: str) -> pathlib.Path:
        """Return the folder of a checkpoint `tinker://MODEL/KIND/NAME`."""
        return self.folder / "checkpoints" / path.removeprefix("tinker://")
