"""Half-open connections against a served policy: how soon each is gone, and what they cost.

    cd tests/commands
    python rude_connections.py       the table of docs/reliability.md: minutes

Beside them one client asks all the time and must be answered rightly. At the end all kinds are held
at once, and the server gets SIGTERM.
"""

import argparse
import contextlib
import math
import os
import pathlib
import resource
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from soak_server import Held, server  # isort: skip: it finds the others

from served import make_byte_folder
from soak_clients import JSON, Case, Web

HALF_HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: applica"
BODY_BYTES, ANNOUNCED_BYTES = 900_000, 1_000_000
HALF_BODY = (
    f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {JSON['Content-Type']}\r\n"
    f"Content-Length: {ANNOUNCED_BYTES}\r\n\r\n"
).encode() + b"x" * BODY_BYTES
HALF_GRPC = b"PRI * HTTP/2.0\r\n\r\n"
ASKED = Case("3+4=", 4)


class Flood:
    """Sockets that all send the same bytes and then nothing.

    Attributes:
        gone: seconds from the end of its sending until each was seen closed.
    """

    def __init__(self, port: int, count: int, sent: bytes):
        self._selector, self._open, self.gone = selectors.DefaultSelector(), {}, list[float]()
        for _ in range(count):
            held = socket.create_connection(("127.0.0.1", port), timeout=60)
            with contextlib.suppress(OSError):  # it may be closed while it sends
                held.sendall(sent)
            self._open[held] = time.monotonic()
            held.setblocking(False)
            self._selector.register(held, selectors.EVENT_READ)
            self.look(0)

    def look(self, seconds: float) -> None:
        """Notes which sockets the server has closed, for at most so long."""
        for key, _ in self._selector.select(seconds):
            with contextlib.suppress(BlockingIOError):
                try:
                    closed = not key.fileobj.recv(65536)
                except ConnectionError:
                    closed = True
                if closed:
                    self.gone.append(time.monotonic() - self._open.pop(key.fileobj))
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()

    def wait(self, seconds: float, most: float = math.inf) -> None:
        """Waits until all or `most` sockets are gone, for at most so long."""
        until = time.monotonic() + seconds
        while self._open and len(self.gone) < most and time.monotonic() < until:
            self.look(0.1)

    def close(self) -> None:
        for held in self._open:
            held.close()


class Neighbour(threading.Thread):
    """Client that asks all the time, by a new connection each.

    Attributes:
        seconds: what each answer took.
        wrong: answers that were wrong, and errors.
        most_memory: largest memory of the server seen meanwhile, in bytes.
    """

    def __init__(self, port: int, process: int):
        super().__init__(daemon=True)
        self._port, self._process, self._ended = port, process, threading.Event()
        self.seconds, self.wrong, self.most_memory = list[float](), list[str](), 0
        self._right = Web(port).whole(ASKED)

    def run(self) -> None:
        while not self._ended.wait(0.05):
            began, web = time.monotonic(), Web(self._port)
            try:
                if (text := web.whole(ASKED)) != self._right:
                    self.wrong.append(repr(text))
            except Exception as error:
                self.wrong.append(repr(error))
            web.drop()
            self.seconds.append(time.monotonic() - began)
            self.most_memory = max(self.most_memory, Held.by(self._process).memory)

    def stop(self) -> None:
        self._ended.set()
        self.join()


class Outcome(NamedTuple):
    """What a flood did.

    Attributes:
        gone: of so many sockets; last: seconds until the last of them was.
        memory: bytes that the server grew by at most; lines: that it wrote.
        answered, wrong: of the neighbour's requests; slowest: seconds.
    """

    sockets: int
    gone: int
    last: float
    memory: int
    lines: int
    answered: int
    wrong: int
    slowest: float

    def __str__(self) -> str:
        return (
            f"{self.gone} of {self.sockets} gone, the last after {self.last:.1f} s; "
            f"memory +{self.memory / 1e6:.0f} MB; {self.lines} lines; "
            f"beside them {self.answered} asked, {self.wrong} wrong, {self.slowest:.2f} s at most"
        )


def flood(
    process: int, ports: tuple[int, int], log: pathlib.Path, *, sent: bytes, count: int, wait: float
) -> Outcome:
    """Floods the port of HTTP, with a client beside, and waits until the server has closed all."""
    lines, memory = len(log.read_text().splitlines()), Held.by(process).memory
    neighbour = Neighbour(ports[1], process)
    neighbour.start()
    rude = Flood(ports[1], count, sent)
    rude.wait(wait)
    neighbour.stop()
    rude.close()
    return Outcome(
        sockets=count,
        gone=len(rude.gone),
        last=max(rude.gone, default=0),
        memory=neighbour.most_memory - memory,
        lines=len(log.read_text().splitlines()) - lines,
        answered=len(neighbour.seconds),
        wrong=len(neighbour.wrong),
        slowest=max(neighbour.seconds),
    )


class Server(NamedTuple):
    """Served policy: its process, ports of gRPC and HTTP, and its standard error."""

    process: int
    ports: tuple[int, int]
    log: pathlib.Path


@contextlib.contextmanager
def serving(folder: str, files: int = 0) -> Iterator[Server]:
    """Server of a model folder; `files`: most files that it may open, 0 as here."""

    log = pathlib.Path(folder) / "server.log"
    with log.open("w") as errors:
        with server(folder, 0.0, [], files=files, errors=errors) as (process, ports):
            yield Server(process, ports, log)


def leave(served: Server, counts: dict[bytes, int], grpc: int) -> tuple[float, int, int]:
    """SIGTERM to a server under all kinds of half requests: seconds, lines written, tracebacks."""
    rude = [Flood(served.ports[1], count, sent) for sent, count in counts.items()]
    rude.append(Flood(served.ports[0], grpc, HALF_GRPC))
    before, began = len(served.log.read_text().splitlines()), time.monotonic()
    os.kill(served.process, signal.SIGTERM)
    while os.path.exists(f"/proc/{served.process}/fd") and not _is_dead(served.process):
        time.sleep(0.05)
    seconds = time.monotonic() - began
    for each in rude:
        each.close()
    text = served.log.read_text()
    return seconds, len(text.splitlines()) - before, text.count("Traceback")


def _is_dead(process: int) -> bool:
    """True for a process that has ended and is not waited for yet."""
    return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--headers", type=int, default=3000, help="requests with half a header")
    parser.add_argument("--bodies", type=int, default=500, help="requests with most of a body")
    parser.add_argument("--files", type=int, default=256, help="limit of open files")
    parser.add_argument("--sockets", type=int, default=300, help="at that limit, without a byte")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds for them to be closed")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        make_byte_folder(pathlib.Path(folder))
        with serving(folder) as served:
            for name, sent, count in (
                ("half headers", HALF_HEADERS, args.headers),
                ("half bodies", HALF_BODY, args.bodies),
            ):
                print(
                    f"{name}: {flood(*served, sent=sent, count=count, wait=args.wait)}", flush=True
                )
        with serving(folder, args.files) as served:
            outcome = flood(*served, sent=b"", count=args.sockets, wait=args.wait)
            print(f"sockets at {args.files} files: {outcome}", flush=True)
        with serving(folder) as served:
            counts = {HALF_HEADERS: args.headers, HALF_BODY: args.bodies, b"": args.sockets}
            seconds, lines, tracebacks = leave(served, counts, grpc=args.sockets)
            print(f"SIGTERM: {seconds:.1f} s, {lines} lines, {tracebacks} tracebacks", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
