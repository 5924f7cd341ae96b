"""A bucket of Google Cloud Storage in this process, for programs that don't know it is none.

TensorStore asks the address that its variable names. TensorFlow has Google's names written into it:
it gets here as by a proxy, which ends TLS with a certificate that the program is told to trust.
"""

import contextlib
import dataclasses
import datetime
import http.server
import json
import pathlib
import random
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

NAMES = ("www.googleapis.com", "storage.googleapis.com")
PAGE = 1000  # names in an answer to a listing
RESET = struct.pack("ii", 1, 0)  # closes a connection by a reset


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


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection; `server.store` and `server.tls` are set."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_CONNECT(self) -> None:
        if self.server.store.faults.away:
            return self._reset()
        self.send_response_only(200, "Connection established")
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb", -1)
        self.wfile = http.server.socketserver._SocketWriter(self.connection)
        self.close_connection = False

    def _any(self) -> None:
        store: Store = self.server.store
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

    do_GET = do_PUT = do_POST = do_DELETE = _any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _work(
        self, parts: list[str], query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        store: Store = self.server.store
        match parts:
            case ["upload", "storage", "v1", "b", bucket, "o"]:
                return self._upload(bucket, query, body)
            case ["storage", "v1", "b", bucket]:
                store.bucket(bucket)
                told = {"kind": "storage#bucket", "name": bucket, "location": "HERE"}
                return 200, json.dumps(told).encode(), {}
            case ["storage", "v1", "b", bucket, "storageLayout"]:
                return 200, b'{"hierarchicalNamespace": {"enabled": false}}', {}
            case ["storage", "v1", "b", bucket, "o"]:
                return 200, json.dumps(store.list(bucket, query)).encode(), {}
            case ["storage", "v1", "b", bucket, "o", name, "rewriteTo", "b", other, "o", new]:
                written = store.write(other, new, store.read(bucket, name).content)
                told = {"done": True, "resource": written.said(other, new)}
                return 200, json.dumps(told).encode(), {}
            case ["storage", "v1", "b", bucket, "o", name, "compose"]:
                sources = [one["name"] for one in json.loads(body)["sourceObjects"]]
                content = b"".join(store.read(bucket, one).content for one in sources)
                written = store.write(bucket, name, content, query)
                return 200, json.dumps(written.said(bucket, name)).encode(), {}
            case ["storage", "v1", "b", bucket, "o", name]:
                if self.command == "DELETE":
                    store.delete(bucket, name, query)
                    return 204, b"", {}
                if query.get("alt") == "media":
                    return self._media(store.read(bucket, name, query))
                found = store.read(bucket, name, query)
                return 200, json.dumps(found.said(bucket, name)).encode(), {}
            case [bucket, *names] if self.command == "GET":  # of the XML API, as TensorFlow reads
                return self._media(store.read(bucket, "/".join(names)))
        raise Refused(400)

    def _media(self, found: Object) -> tuple[int, bytes, dict[str, str]]:
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

    def _upload(
        self, bucket: str, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        store, name = self.server.store, query.get("name", "")
        if query.get("upload_id"):
            return self._resumed(query["upload_id"], body)
        if query["uploadType"] == "resumable":
            with store.lock:
                number = str(len(store.uploads))
                store.uploads[number] = bucket, name, bytearray()
            where = f"{self._base()}/upload/storage/v1/b/{bucket}/o?upload_id={number}"
            store.bucket(bucket)
            return 200, b"", {"Location": where}
        if query["uploadType"] == "multipart":
            mark = self.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
            first, second = [p.partition(b"\r\n\r\n")[2] for p in body.split(b"--" + mark)[1:3]]
            name, body = json.loads(first)["name"], second.removesuffix(b"\r\n")
        written = store.write(bucket, name, body, query)
        return 200, json.dumps(written.said(bucket, name)).encode(), {}

    def _resumed(self, number: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """A piece of an upload, or the question how much of it has come."""
        store = self.server.store
        bucket, name, content = store.uploads.get(number) or (None, None, None)
        if content is None:
            raise Refused(404)
        span, _, size = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        if span != "*":
            begin = int(span.partition("-")[0])
            content[begin:] = body
        if size == "*" or len(content) < int(size):
            return 308, b"", {"Range": f"bytes=0-{len(content) - 1}"} if content else {}
        written = store.write(bucket, name, content)
        return 200, json.dumps(written.said(bucket, name)).encode(), {}

    def _base(self) -> str:
        secure = isinstance(self.connection, ssl.SSLSocket)
        return f"{'https' if secure else 'http'}://{self.headers['Host']}"

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
        """Nobody reads it."""

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.connection.close()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Whoever leaves in the middle is nobody's concern: a program that was killed, say."""


def make_certificate(folder: pathlib.Path) -> pathlib.Path:
    """A key and the certificate that says it is Google's, in one file."""
    path = folder / "fake_gcs.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=fake"]
    command += ["-addext", "subjectAltName=" + ",".join(f"DNS:{name}" for name in NAMES)]
    subprocess.run([*command, "-keyout", path, "-out", path], check=True, capture_output=True)
    return path


class FakeStore(Store):
    """A store that is being served.

    Attributes:
        environment: of a process that takes it for Google's. It gives up soon.
    """

    environment: dict[str, str]


@contextlib.contextmanager
def serve(folder: pathlib.Path, *buckets: str) -> Iterator[FakeStore]:
    """A store with these buckets, empty. The certificate goes into the folder."""
    certificate, store = make_certificate(folder), FakeStore(*buckets)
    server = Server(("127.0.0.1", 0), Handler)
    server.store, server.tls = store, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(certificate)
    here = f"http://127.0.0.1:{server.server_address[1]}"
    store.environment = {
        "HTTPS_PROXY": here,
        "https_proxy": here,
        "CURL_CA_BUNDLE": str(certificate),
        "TENSORSTORE_GCS_HTTP_URL": here,
        "STORAGE_EMULATOR_HOST": here,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "not a secret",
        "NO_GCE_CHECK": "true",
        "GCE_METADATA_ROOT": "127.0.0.1:9",
        "GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "10000",
        "GCS_RETRY_CONFIG_MAX_DELAY_TIME_US": "100000",
        "GCS_REQUEST_CONNECTION_TIMEOUT_SECS": "10",
    }
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
