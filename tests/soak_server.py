"""Soaks a served policy in short requests, rude clients among them, and measures it under load.

    python tests/soak_server.py --requests 100000              for hours; the same command goes on
    python tests/soak_server.py --requests 20000 --switch 1e-6 threads of the server change places
    python tests/soak_server.py --requests 0 --load 1,8,32,128 latencies and tokens per second

A tenth of the requests are given up half-way, some are read slowly, some never end. Every other
answer must be the one that the same request got alone. Exit code 1 where one is not, where the
server exits or fails, or where threads, open files or memory grow.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc
from served import BUDGET, END, PROMPTS, TOKENIZER, Client, free_port, make_byte_folder

MODEL = "policy"
RUDE = 0.1
SLOW = 0.03
SLOT_FLAGS = ["--slots=8", "--max_prompt_tokens=20", f"--max_response_tokens={BUDGET}"]

SETTLING_SECONDS = 3.0  # for connections that were dropped to be seen as such
MOST_GROWTH = 32 << 20  # bytes of memory, from the first quarter of the requests to their end


class Wrong(Exception):
    """An answer that is not the one it must be."""


class Case(NamedTuple):
    """A request whose answer is known beforehand.

    Attributes:
        drawn: fields of HTTP that say how; gRPC takes the likeliest.
    """

    prompt: str
    budget: int
    drawn: tuple[tuple[str, float], ...] = ()

    def body(self, **fields: object) -> dict:
        asked = {"model": MODEL, "prompt": self.prompt, "max_tokens": self.budget}
        return asked | dict(self.drawn) | fields


CASES = [Case(prompt, budget) for prompt in PROMPTS for budget in (1, 5, BUDGET)] + [
    Case(prompt, 8, (("temperature", 1.0), ("seed", seed))) for seed, prompt in enumerate(PROMPTS)
]


class Web:
    """One client of HTTP, on a connection that it keeps."""

    def __init__(self, port: int):
        self._port, self._kept = port, None

    def post(self, fields: dict) -> http.client.HTTPResponse:
        """The answer to a completion, its body still to be read."""
        for fresh in (False, True):  # one that was idle for long may be closed
            if self._kept is None or fresh:
                self.drop()
                self._kept = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            try:
                self._kept.request("POST", "/v1/completions", json.dumps(fields))
                answer = self._kept.getresponse()
            except (http.client.RemoteDisconnected, ConnectionError):
                if fresh:
                    raise
                continue
            if answer.status != 200:
                raise Wrong(f"{answer.status}: {answer.read().decode()}")
            return answer
        raise AssertionError

    def drop(self) -> None:
        """Leaves, whatever is still to come."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def whole(self, case: Case, n: int = 1) -> list[str]:
        answer = json.load(self.post(case.body(n=n)))
        return [choice["text"] for choice in answer["choices"]]

    def events(self, fields: dict) -> Iterator[dict]:
        """Chunks of a stream, as they come."""
        for line in self.post(fields | {"stream": True}):
            said = line.decode().strip().removeprefix("data: ")
            if said == "[DONE]":
                continue
            if said:
                chunk = json.loads(said)
                if "error" in chunk:
                    raise Wrong(chunk["error"]["message"])
                yield chunk

    def streamed(self, case: Case, pause: float = 0.0) -> str:
        text = ""
        for chunk in self.events(case.body()):
            text += chunk["choices"][0]["text"]
            time.sleep(pause)
        return text

    def begin(self, case: Case) -> None:
        """Half a request, and then nothing."""
        self.drop()
        half = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        half.putrequest("POST", "/v1/completions")
        half.putheader("Content-Length", "1000")
        half.endheaders(json.dumps(case.body()).encode())
        half.close()


class Clients:
    """Of one thread each: what they ask is a function of the request's number.

    Args:
        ports: of gRPC and HTTP.
    """

    def __init__(self, ports: tuple[int, int], seed: int):
        self._local, self._ports, self._seed = threading.local(), ports, seed
        self._every: list[tuple[Client, Web]] = []
        self.answers = {case: self._alone(case) for case in CASES}
        self.said: Counter[str] = Counter()

    def _mine(self) -> tuple[Client, Web]:
        if not hasattr(self._local, "pair"):
            self._local.pair = Client(self._ports[0]), Web(self._ports[1])
            self._every.append(self._local.pair)
        return self._local.pair

    def leave(self) -> None:
        """Closes the connections of all threads."""
        for rpc, web in self._every:
            rpc.close()
            web.drop()
        self._every, self._local = [], threading.local()

    def _alone(self, case: Case) -> str:
        _, web = self._mine()
        found = web.whole(case)[0]
        if web.whole(case)[0] != found:
            raise Wrong(f"{case}: asked twice alone, two answers")
        return found

    def ask(self, number: int) -> None:
        """One request. Raises `Wrong`, or what the connection does."""
        rng = random.Random(f"{self._seed} {number}")
        case, chance = rng.choice(CASES), rng.random()
        if chance < RUDE:
            self.said["rude"] += 1
            self._leave(case, rng.randrange(5))
            return
        grpc_too = [self._grpc_text, self._grpc_ids] * (not case.drawn)
        way = rng.choice([self._whole, self._several, self._stream, *grpc_too])
        if chance < RUDE + SLOW:
            way = self._slow
        if (found := way(case)) != self.answers[case]:
            raise Wrong(f"{case} by {way.__name__}: {found!r}, alone {self.answers[case]!r}")
        self.said[way.__name__.strip("_")] += 1

    def _grpc_text(self, case: Case) -> str:
        return self._mine()[0].ask(case.prompt, case.budget)[0]

    def _grpc_ids(self, case: Case) -> str:
        ids = self._mine()[0].ask(TOKENIZER.encode(case.prompt), case.budget)[1]
        return TOKENIZER.decode([i for i in ids if i != END])

    def _whole(self, case: Case) -> str:
        return self._mine()[1].whole(case)[0]

    def _several(self, case: Case) -> str:
        first, *others = self._mine()[1].whole(case, n=3)
        if not case.drawn and set(others) != {first}:
            raise Wrong(f"{case}: {[first, *others]}")
        return first

    def _stream(self, case: Case) -> str:
        return self._mine()[1].streamed(case)

    def _slow(self, case: Case) -> str:
        return self._mine()[1].streamed(case, pause=0.02)

    def _leave(self, case: Case, how: int) -> None:
        rpc, web = self._mine()
        if how < 2:
            call = rpc.stream(case.prompt, case.budget)
            if how:
                next(call, None)
            call.cancel()
        elif how == 2:
            web.begin(case)
        else:
            answer = web.post(case.body(stream=True))
            if how == 4:
                answer.readline()
            answer.close()
            web.drop()


# --- the server -----------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a process holds: threads, open files, bytes of memory."""

    threads: int
    files: int
    memory: int

    @classmethod
    def by(cls, process: int) -> "Held":
        place = pathlib.Path(f"/proc/{process}")
        pages = int((place / "statm").read_text().split()[1])
        count = [sum(1 for _ in (place / name).iterdir()) for name in ("task", "fd")]
        return cls(*count, pages * 4096)


@contextlib.contextmanager
def served(folder: str, switch: float, flags: list[str]) -> Iterator[tuple[int, tuple[int, int]]]:
    """`dapo_jax.serve` in a process of its own: its id, and its ports of gRPC and HTTP."""
    port, http_port = free_port(), free_port()
    command = [sys.executable, __file__, "--serve", str(switch), f"--model={folder}", *SLOT_FLAGS]
    command += [f"--port={port}", f"--http_port={http_port}", f"--served_name={MODEL}"]
    command += ["--temperature=0", *flags]
    alone = os.environ | {"XLA_FLAGS": ""}  # those of the tests make eight devices
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=alone)
    try:
        assert process.stdout is not None and "serving" in process.stdout.readline()
        yield process.pid, (port, http_port)
        process.terminate()
        if code := process.wait(60):
            raise Wrong(f"the server left with exit code {code}")
    finally:
        process.kill()
        process.wait()


def serve(switch: str, arguments: list[str]) -> int:
    """The command, with threads that change places so often."""
    from dapo_jax import serve

    if float(switch):
        sys.setswitchinterval(float(switch))
    sys.argv = ["serve", *arguments]
    return serve.main()


# --- soaking --------------------------------------------------------------------------------------


class Progress:
    """How many of the requests were answered rightly, also by earlier calls of the same command."""

    def __init__(self, path: pathlib.Path, asked: list[int]):
        self._path, self._asked = path, asked
        found = json.loads(path.read_text()) if path.exists() else {}
        self.done = found["done"] if found.get("asked") == asked else 0

    def note(self, done: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"asked": self._asked, "done": done}))


def soak(
    process: int,
    clients: Clients,
    numbers: range,
    *,
    threads: int,
    note: Callable[[int], object] = lambda done: None,
    every: int = 1000,
) -> None:
    """Asks all of them. Raises at the first that goes wrong, or where the server holds more."""
    first, began = None, time.monotonic()
    for start in range(numbers.start, numbers.stop, every):
        some = range(start, min(start + every, numbers.stop))
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(clients.ask, some):
                pass
        clients.leave()
        note(some.stop)
        done, seconds = some.stop - numbers.start, time.monotonic() - began
        if 4 * done >= len(numbers) and (first is None or some.stop == numbers.stop):
            time.sleep(SETTLING_SECONDS)
        held = Held.by(process)
        if 4 * done >= len(numbers):
            first = first or held
        print(f"{some.stop} requests, {done / seconds:.0f}/s, the server: {held}", flush=True)
    assert first is not None
    if held.threads > first.threads or held.files > first.files:
        raise Wrong(f"the server holds more and more: {first}, then {held}")
    if held.memory > first.memory + MOST_GROWTH:
        raise Wrong(f"the server's memory grows: {first}, then {held}")
    print(f"right: {dict(clients.said)}")


def load(ports: tuple[int, int], counts: list[int], seconds: float) -> None:
    """Prints latencies and tokens per second where so many clients ask at once."""
    print("clients  requests/s  tokens/s  first token p50, p99 ms  whole p50, p99 ms")
    body = Case("3+4=", BUDGET).body(stream_options={"include_usage": True})

    def client(until: float) -> list[tuple[float, float, int]]:
        web, found = Web(ports[1]), []
        while (began := time.monotonic()) < until:
            first, tokens = 0.0, 0
            for chunk in web.events(body):
                first = first or time.monotonic() - began
                tokens = (chunk["usage"] or {}).get("completion_tokens", 0)
            found.append((first, time.monotonic() - began, tokens))
        web.drop()
        return found

    for count in counts:
        with ThreadPoolExecutor(count) as pool:
            began = time.monotonic()
            each = pool.map(client, [began + seconds] * count)
            found = [one for some in each for one in some]
            took = time.monotonic() - began
        firsts, wholes, tokens = zip(*found, strict=True)
        cuts = [statistics.quantiles(x, n=100, method="inclusive") for x in (firsts, wholes)]
        p = [1000 * cut[place] for cut in cuts for place in (49, 98)]
        print(
            f"{count:7}  {len(found) / took:10.1f}  {sum(tokens) / took:8.0f}  "
            f"{p[0]:15.0f} {p[1]:7.0f}  {p[2]:9.0f} {p[3]:7.0f}",
            flush=True,
        )


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--switch", type=float, default=0.0, help="seconds; 0: Python's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", default="", help="numbers of clients, as 1,8,32,128")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of clients")
    parser.add_argument("--state", type=pathlib.Path, default="build/soak_server.json")
    parser.add_argument("flags", nargs="*", help="of dapo_jax.serve, after --")
    args = parser.parse_args()
    progress = Progress(args.state, [args.requests, args.seed])
    with tempfile.TemporaryDirectory() as folder:
        make_byte_folder(pathlib.Path(folder))
        try:
            with served(folder, args.switch, args.flags) as (process, ports):
                if numbers := range(progress.done, args.requests):
                    clients = Clients(ports, args.seed)
                    soak(process, clients, numbers, threads=args.clients, note=progress.note)
                if args.load:
                    load(ports, [int(count) for count in args.load.split(",")], args.seconds)
        except (Wrong, OSError, grpc.RpcError, http.client.HTTPException) as error:
            print(f"failed: {type(error).__name__}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
