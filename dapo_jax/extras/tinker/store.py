"""Everything that a server of Tinker's API must not lose: requests, results, models, checkpoints.

A request is stored before it is acknowledged. A model's state is its last written file and the
requests after it, which give the same bits when they are run again.
"""

import enum
import json
import pathlib
import shutil
import sqlite3
import threading
import time
from typing import Any, NamedTuple

SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, owner TEXT, number INTEGER, kind TEXT, arrived REAL, body BLOB,
    state INTEGER, result BLOB, finished REAL);
CREATE INDEX IF NOT EXISTS by_owner ON requests (owner, number);
CREATE INDEX IF NOT EXISTS by_state ON requests (state, finished);
CREATE TABLE IF NOT EXISTS entries (
    kind TEXT, id TEXT, parent TEXT, created REAL, fields TEXT, PRIMARY KEY (kind, id));
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;  -- an acknowledged request is on the disk
"""
RESULT_SECONDS = 24 * 3600.0  # that a result is kept
CHANGES = ("forward_backward", "optim_step", "load_weights", "create_model")  # kinds that replay
REQUESTS = "SELECT id, owner, number, kind, arrived FROM requests WHERE"


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
    arrived: float = 0.0


class Entry(NamedTuple):
    """A session, model, sampling session or checkpoint."""

    id: str
    created: float
    fields: dict[str, Any]


class Store:
    """Database and files in a folder that only this process writes; all threads may call it."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._lock = threading.Lock()
        path = folder / "requests.sqlite"
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.executescript(SCHEMA)
        self.close = self._database.close

    def _run(self, query: str, *values: Any) -> list[tuple]:
        """Run one statement, which is durable when this returns; return its rows."""
        with self._lock:
            return self._database.execute(query, values).fetchall()

    # --- requests ---------------------------------------------------------------------------------

    def accept(self, request: Request, body: bytes) -> None:
        """Store a request durably, unless its id is known: then it is a retry."""
        values = (*request[:4], time.time(), body, State.PENDING)
        insert = "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL)"
        self._run(insert, *values)

    def finish(self, request: Request, state: State, result: bytes) -> None:
        """Store a result; the request is not run again."""
        keep = state != State.FAILED and request.kind in CHANGES
        body = "body" if keep else "NULL"
        query = f"UPDATE requests SET state = ?, result = ?, finished = ?, body = {body}"
        self._run(f"{query} WHERE id = ?", state, result, time.time(), request.id)

    def result(self, request_id: str) -> tuple[State, bytes | None] | None:
        """Return state and result of a request; None: it is unknown."""
        rows = self._run("SELECT state, result FROM requests WHERE id = ?", request_id)
        return (State(rows[0][0]), rows[0][1]) if rows else None

    def body(self, request: Request) -> bytes:
        return self._run("SELECT body FROM requests WHERE id = ?", request.id)[0][0]

    def pending(self) -> list[Request]:
        """Return the requests without a result in order of arrival."""
        return [Request(*row) for row in self._run(f"{REQUESTS} state = 0 ORDER BY rowid")]

    def last_number(self, owner: str) -> int:
        """Return the number of an owner's last request with a result, -1 without any."""
        query = "SELECT COALESCE(MAX(number), -1) FROM requests WHERE owner = ? AND state != 0"
        return self._run(query, owner)[0][0]

    def changes(self, owner: str, after: int) -> list[Request]:
        """Return the requests that changed a model after the request with this number."""
        query = f"{REQUESTS} owner = ? AND number > ? AND state != 0 AND body IS NOT NULL"
        return [Request(*row) for row in self._run(f"{query} ORDER BY number", owner, after)]

    def forget_bodies(self, owner: str, up_to: int) -> None:
        """Remove the bodies of requests that the model's file already includes."""
        query = "UPDATE requests SET body = NULL WHERE owner = ? AND number <= ? AND state != 0"
        self._run(query, owner, up_to)

    def tidy(self) -> None:
        """Remove old results and expired checkpoints."""
        query = "UPDATE requests SET result = NULL WHERE state != 0 AND finished < ?"
        self._run(f"{query} AND result IS NOT NULL", time.time() - RESULT_SECONDS)
        for entry in self.entries("checkpoint"):
            if (entry.fields.get("expires") or float("inf")) < time.time():
                self.remove_checkpoint(entry.id)

    # --- sessions, models, sampling sessions, checkpoints -----------------------------------------

    def put(self, kind: str, name: str, fields: dict[str, Any], parent: str = "") -> None:
        """Store an entry; an entry of the same name keeps its time of creation."""
        query = "INSERT INTO entries VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, id)"
        query = f"{query} DO UPDATE SET fields = excluded.fields"
        self._run(query, kind, name, parent, time.time(), json.dumps(fields))

    def get(self, kind: str, name: str) -> Entry | None:
        return next(iter(self.entries(kind, name=name)), None)

    def entries(self, kind: str, parent: str | None = None, name: str | None = None) -> list[Entry]:
        """Return the entries of a kind, all or those of a parent or name, the newest first."""
        query = "SELECT id, created, fields FROM entries WHERE kind = ?1"
        query += " AND (?2 IS NULL OR parent = ?2) AND (?3 IS NULL OR id = ?3)"
        rows = self._run(f"{query} ORDER BY created DESC, id DESC", kind, parent, name)
        return [Entry(name, created, json.loads(fields)) for name, created, fields in rows]

    def remove_checkpoint(self, path: str) -> None:
        """Remove a checkpoint and its files."""
        self._run("DELETE FROM entries WHERE kind = 'checkpoint' AND id = ?", path)
        shutil.rmtree(self.checkpoint_folder(path), ignore_errors=True)

    # --- files ------------------------------------------------------------------------------------

    def model_file(self, model_id: str, number: int) -> pathlib.Path:
        """Return the file of a model's state after its request with this number."""
        folder = self._folder / "models" / model_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{number}.safetensors"

    def checkpoint_folder(self, path: str) -> pathlib.Path:
        """Return the folder of a checkpoint `tinker://MODEL/KIND/NAME`."""
        return self._folder / "checkpoints" / path.removeprefix("tinker://")
