"""A bucket of Google Cloud Storage in this process, for programs that don't know it is none.

TensorStore asks the address that its variable names. TensorFlow has Google's names written into it:
it gets here as by a proxy, which ends TLS with a certificate that the program is told to trust.
"""

import contextlib
import http.server
import json
import pathlib
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator

from fake_objects import Faults, Object, Refused, Store

__all__ = ["FakeStore", "Faults", "serve"]
NAMES = ("www.googleapis.com", "storage.googleapis.com")
RESET = struct.pack("ii", 1, 0)  # closes a connection by a reset


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
