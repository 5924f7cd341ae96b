"""A bucket of Google Cloud Storage in this process, for programs that don't know it is none.

TensorStore and gcsfs ask the address that a variable names.
"""

import contextlib
import dataclasses
import datetime
import http.server
import json
import random
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

RESET = struct.pack("ii", 1, 0)  # closes a connection by a reset
PAGE = 1000  # names in an answer to a listing
FAILURES = (503, 429, 500, "reset", "lost")  # "lost": a reset once the work is done
Answer = tuple[int, bytes, dict[str, str]]


@dataclasses.dataclass
class Faults:
    """What goes wrong from now on; a test changes it while requests come.

    Attributes:
        latency: seconds before every answer.
        share: of requests that fail, in the ways of `FAILURES`, by the number of the request.
        away: nothing answers: connections are closed at once.
        forbidden: methods that are answered by 403; GET, PUT, POST and DELETE are all.
    """

    latency: float = 0.0
    share: float = 0.0
    away: bool = False
    forbidden: tuple[str, ...] = ()


@dataclasses.dataclass
class Object:
    content: bytes
    generation: int
    updated: str


class Refused(Exception):
    """Answered by a status and no content."""


class FakeStore:
    """The objects of all buckets.

    Attributes:
        asked: (method, name, bytes sent or received) of every request that succeeded.
        failed: the failures of the others.
        before: called with method and name of every request; may change what goes wrong.
        environment: variables of a process that takes the store for Google's. It gives up soon.
    """

    def __init__(self, *buckets: str):
        self.objects: dict[str, dict[str, Object]] = {bucket: {} for bucket in buckets}
        self.faults, self.lock = Faults(), threading.RLock()
        self.asked: list[tuple[str, str, int]] = []
        self.failed: list[int | str] = []
        self.before: Callable[[str, str], object] = lambda method, name: None
        self.environment: dict[str, str] = {}
        self.uploads: dict[str, tuple[str, str, bytearray]] = {}  # resumable ones, by number
        self._generation, self._requests = 1_700_000_000_000_000, 0

    def fate(self) -> int | str | None:
        with self.lock:
            self._requests += 1
            rng = random.Random(f"0 {self._requests}")
            fails = self.faults.away or rng.random() < self.faults.share
            fate = "reset" if self.faults.away else rng.choice(FAILURES) if fails else None
            self.failed += [fate] if fate else []
            return fate

    def bucket(self, name: str) -> dict[str, Object]:
        if name not in self.objects:
            raise Refused(404)
        return self.objects[name]

    def read(self, bucket: str, name: str, query: dict[str, str]) -> Object:
        found = self.bucket(bucket).get(name)
        if found is None:
            raise Refused(404)
        if int(query.get("ifGenerationNotMatch", -1)) == found.generation:
            raise Refused(304)
        return found

    def write(self, bucket: str, name: str, content: bytes, query: dict | None = None) -> bytes:
        with self.lock:
            objects = self.bucket(bucket)
            generation = objects[name].generation if name in objects else 0
            if int((query or {}).get("ifGenerationMatch", generation)) != generation:
                raise Refused(412)
            self._generation += 1
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
            objects[name] = Object(bytes(content), self._generation, now)
            return json.dumps(self.describe(bucket, name)).encode()

    def describe(self, bucket: str, name: str) -> dict[str, str]:
        found = self.objects[bucket][name]
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(found.content)),
            "generation": str(found.generation),
            "metageneration": "1",
            "updated": found.updated,
            "timeCreated": found.updated,
        }

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, object]:
        """Return a page of names and, with a delimiter, of what precedes it after the prefix."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        with self.lock:
            names = [name for name in self.bucket(bucket) if name.startswith(prefix)]
            entries = {}
            for name in names:
                rest, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
                entries[prefix + rest + cut] = not cut
            left = sorted(name for name in entries if name > query.get("pageToken", ""))
            shown = left[: min(PAGE, int(query.get("maxResults", PAGE)))]
            answer: dict[str, object] = {
                "kind": "storage#objects",
                "items": [self.describe(bucket, name) for name in shown if entries[name]],
                "prefixes": [name for name in shown if not entries[name]],
            }
        return answer | ({"nextPageToken": shown[-1]} if len(left) > len(shown) else {})


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection; `server.store` is set."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        store: FakeStore = self.server.store
        body = self._body()
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        parts = [urllib.parse.unquote(part) for part in address.path.split("/")[1:]]
        name = query.get("name") or parts[-1]
        store.before(self.command, name)
        fate = store.fate()
        time.sleep(store.faults.latency)
        if fate == "reset":
            return self._reset()
        if isinstance(fate, int):
            return self._answer(fate, b'{"error": {"message": "so it was asked for"}}')
        if self.command in store.faults.forbidden:
            return self._answer(403, b'{"error": {"message": "the account lacks that right"}}')
        try:
            status, content, headers = self._work(parts, query, body)
        except Refused as refused:
            status, content, headers = refused.args[0], b"", {}
        if fate == "lost":
            return self._reset()
        store.asked.append((self.command, name, len(body) + len(content)))
        self._answer(status, content, headers)

    do_GET = do_PUT = do_POST = do_DELETE = _handle

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _work(self, parts: list[str], query: dict[str, str], body: bytes) -> Answer:
        store: FakeStore = self.server.store
        match parts:
            case ["upload", "storage", "v1", "b", bucket, "o"]:
                return self._upload(bucket, query, body)
            case ["storage", "v1", "b", bucket]:
                store.bucket(bucket)
                about = {"kind": "storage#bucket", "name": bucket, "location": "HERE"}
                return 200, json.dumps(about).encode(), {}
            case ["storage", "v1", "b", bucket, "o"]:
                return 200, json.dumps(store.list(bucket, query)).encode(), {}
            case ["download", "storage", "v1", "b", bucket, "o", name]:
                return self._media(store.read(bucket, name, query))
            case ["storage", "v1", "b", bucket, "o", name]:
                found = store.read(bucket, name, query)
                if self.command == "DELETE":
                    del store.objects[bucket][name]
                    return 204, b"", {}
                if query.get("alt") == "media":
                    return self._media(found)
                return 200, json.dumps(store.describe(bucket, name)).encode(), {}
        raise Refused(400)

    def _media(self, found: Object) -> Answer:
        size, content, status = len(found.content), found.content, 200
        headers = {
            "Content-Type": "application/octet-stream",
            "x-goog-generation": str(found.generation),
            "x-goog-metageneration": "1",
            "x-goog-stored-content-length": str(size),
            "x-goog-stored-content-encoding": "identity",
        }
        if asked := self.headers.get("Range", "").removeprefix("bytes="):
            first, _, last = asked.partition("-")
            begin = int(first) if first else max(0, size - int(last))
            end = min(size, int(last) + 1) if first and last else size
            if begin >= size:
                return 416, b"", {"Content-Range": f"bytes */{size}"}
            status, content = 206, content[begin:end]
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        return status, content, headers

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> Answer:
        store: FakeStore = self.server.store
        if query.get("upload_id"):
            return self._resume(query["upload_id"], body)
        if query["uploadType"] == "media":
            return 200, store.write(bucket, query["name"], body, query), {}
        store.bucket(bucket)
        with store.lock:
            number = str(len(store.uploads))
            store.uploads[number] = bucket, query["name"], bytearray()
        path = f"upload/storage/v1/b/{bucket}/o?upload_id={number}"
        return 200, b"", {"Location": f"http://{self.headers['Host']}/{path}"}

    def _resume(self, number: str, body: bytes) -> Answer:
        """Take a piece of an upload, or answer how much of it has come."""
        store: FakeStore = self.server.store
        if number not in store.uploads:
            raise Refused(404)
        bucket, name, content = store.uploads[number]
        span, _, size = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        if span != "*":
            content[int(span.partition("-")[0]) :] = body
        if size == "*" or len(content) < int(size):
            return 308, b"", {"Range": f"bytes=0-{len(content) - 1}"} if content else {}
        return 200, store.write(bucket, name, content), {}

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if status not in (204, 304):
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.connection.close()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Ignore who leaves in the middle, such as a program that was killed."""


@contextlib.contextmanager
def serve(*buckets: str) -> Iterator[FakeStore]:
    store = FakeStore(*buckets)
    server = Server(("127.0.0.1", 0), Handler)
    server.store = store
    here = f"http://127.0.0.1:{server.server_address[1]}"
    addresses = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
    store.environment = dict.fromkeys(addresses, here) | {
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "not a secret",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks Google what kind the bucket is
        "FSSPEC_GCS_TOKEN": "anon",
    }
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
