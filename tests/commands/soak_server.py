"""Soaks a served policy in short requests, rude clients among them, and measures it under load.

    cd tests/commands
    python soak_server.py --requests 100000              for hours; the same command goes on
    python soak_server.py --requests 20000 --switch 1e-6 threads of the server change places
    python soak_server.py --requests 0 --load 1,8,32,128 latencies and tokens per second

A tenth of the requests are given up half-way, some are read slowly. Every other answer must be the
one that the same request got alone. Exit code 1 where one is not, where the
server exits or fails, or where threads, open files or memory grow.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # where it is no test
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import numpy as np
import openai
import served
from served import BUDGET, PROMPTS

MODEL = "policy"
SLOT_FLAGS = ["--slots=8", "--max_prompt_tokens=20", f"--max_response_tokens={BUDGET}"]
RUDE = 0.1  # of the requests are given up, half-way or before
SLOW = 0.03  # are read with pauses
SETTLING_SECONDS = 3.0  # for connections that were dropped to be seen as such
MAX_GROWTH = 32 << 20  # bytes of memory, from the first quarter of the requests to their end


class Wrong(Exception):
    """Wrong answer of the server, or one that holds more and more."""


class Case(NamedTuple):
    """Request with a known answer. drawn: sampling fields."""

    prompt: str
    budget: int
    drawn: tuple[tuple[str, float], ...] = ()

    def fields(self, **more: object) -> dict:
        asked = {"model": MODEL, "prompt": self.prompt, "max_tokens": self.budget}
        return asked | dict(self.drawn) | more


CASES = [Case(prompt, budget) for prompt in PROMPTS for budget in (1, 5, BUDGET)] + [
    Case(prompt, 8, (("temperature", 1.0), ("seed", seed))) for seed, prompt in enumerate(PROMPTS)
]


class Clients:
    """Clients who know what they must be answered; some are rude.

    Attributes:
        answers: what each case is answered alone.
        said: a word for every request.
    """

    def __init__(self, port: int, seed: int):
        self.said: list[str] = []
        self._port, self._seed = port, seed
        self.connect()
        twice = [{case: self._whole(case)[0] for case in CASES} for _ in range(2)]
        self.answers = twice[0]
        if twice[0] != twice[1]:
            raise Wrong(f"asked twice alone, two answers: {twice}")
        self.leave()

    def connect(self) -> None:
        self._web = served.make_openai(self._port)

    def leave(self) -> None:
        self._web.close()

    def ask(self, number: int) -> None:
        """Sends the request of that number. Raises `Wrong`, or an error of the connection."""
        rng = random.Random(f"{self._seed} {number}")
        case, chance = rng.choice(CASES), rng.random()
        way = rng.choice(["whole", "several", "stream"])
        if chance < RUDE:
            way = "rude"
            self._give_up(case, rng.randrange(3))
        elif chance < RUDE + SLOW:
            way = "slow"
        if way != "rude" and (text := self._answer(case, way)) != self.answers[case]:
            raise Wrong(f"{case} by {way}: {text!r}, alone {self.answers[case]!r}")
        self.said.append(way)

    def _whole(self, case: Case, n: int = 1) -> list[str]:
        return [choice.text for choice in self._web.completions.create(**case.fields(n=n)).choices]

    def _answer(self, case: Case, way: str) -> str:
        match way:
            case "whole":
                return self._whole(case)[0]
            case "several":
                first, *others = self._whole(case, n=3)
                return first if case.drawn or set(others) == {first} else f"{[first, *others]}"
        text = ""
        for chunk in self._web.completions.create(**case.fields(stream=True)):
            text += chunk.choices[0].text
            time.sleep(0.02 * (way == "slow"))
        return text

    def _give_up(self, case: Case, how: int) -> None:
        if how == 0:
            with socket.create_connection(("127.0.0.1", self._port)) as half:
                half.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
        else:
            stream = self._web.completions.create(**case.fields(stream=True))
            if how == 2:
                next(iter(stream), None)
            stream.close()


# --- the server -----------------------------------------------------------------------------------


class Held(NamedTuple):
    """Resources of a process: threads, open files, bytes of memory."""

    threads: int
    files: int
    memory: int

    @classmethod
    def by(cls, process: int) -> "Held":
        folder = pathlib.Path(f"/proc/{process}")
        pages = int((folder / "statm").read_text().split()[1])
        count = [sum(1 for _ in (folder / name).iterdir()) for name in ("task", "fd")]
        return cls(*count, pages * 4096)


@contextlib.contextmanager
def server(folder: str, switch: float, flags: list[str]) -> Iterator[tuple[int, int]]:
    """`dapo-jax serve` in a process of its own: its id, and its port.

    Args:
        switch: interval of its threads in seconds; 0: Python's own.
    """
    port = served.free_port()
    command = [sys.executable, __file__, "--serve", str(switch), f"--model={folder}", *SLOT_FLAGS]
    command += [f"--http_port={port}", f"--served_name={MODEL}"]
    command += ["--temperature=0", *flags]
    alone = os.environ | {"XLA_FLAGS": ""}  # those of the tests make eight devices
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=alone)
    try:
        assert process.stdout is not None and "serving" in process.stdout.readline()
        yield process.pid, port
        if process.poll() is None:
            process.terminate()
        if code := process.wait(60):
            raise Wrong(f"the server left with exit code {code}")
    finally:
        process.kill()
        process.wait()


def serve(switch: str, arguments: list[str]) -> int:
    """Runs the command with a switch interval of threads, in seconds."""
    from dapo_jax.extras.serve import server as serve

    if float(switch):
        sys.setswitchinterval(float(switch))
    sys.argv = ["serve", *arguments]
    return serve.main()


# --- soaking --------------------------------------------------------------------------------------


class Progress:
    """Number of requests answered rightly, including earlier calls of the same command."""

    def __init__(self, path: pathlib.Path, asked: list[object]):
        self._path, self._asked = path, asked
        record = json.loads(path.read_text()) if path.exists() else {}
        self.done = record["done"] if record.get("asked") == asked else 0

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
        clients.connect()
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
    if held.threads > first.threads + threads or held.files > first.files:
        raise Wrong(f"the server holds more and more: {first}, then {held}")
    if held.memory > first.memory + MAX_GROWTH:
        raise Wrong(f"the server's memory grows: {first}, then {held}")
    print(f"right: {dict(Counter(clients.said))}")


def load(port: int, counts: list[int], seconds: float) -> None:
    """Prints latencies, tokens per second and refusals where so many clients ask at once.

    A client that is refused asks again after the second that `Retry-After` says.
    """
    print("clients  requests/s  tokens/s  first token p50, p99 ms  whole p50, p99 ms  refused")
    asked = Case("3+4=", BUDGET).fields(stream=True, stream_options={"include_usage": True})

    def client(until: float) -> tuple[list[tuple[float, float, int]], int]:
        times, refused = [], 0
        while (began := time.monotonic()) < until:
            first, tokens = 0.0, 0
            with contextlib.closing(served.connect(port, json.dumps(asked))) as kept:
                answer = kept.getresponse()
                if answer.status == 429:
                    refused += 1
                    time.sleep(1)
                    continue
                for line in answer:
                    first = first or time.monotonic() - began
                    if b'"usage"' in line:
                        usage = json.loads(line.removeprefix(b"data: "))["usage"] or {}
                        tokens = usage.get("completion_tokens", 0)
            times.append((first, time.monotonic() - began, tokens))
        return times, refused

    for count in counts:
        with ThreadPoolExecutor(count) as pool:
            began = time.monotonic()
            each = list(pool.map(client, [began + seconds] * count))
            times = [request for requests, _ in each for request in requests]
            took = time.monotonic() - began
        firsts, wholes, tokens = zip(*times, strict=True)
        p = [1000 * cut for x in (firsts, wholes) for cut in np.percentile(x, (50, 99))]
        print(
            f"{count:7}  {len(times) / took:10.1f}  {sum(tokens) / took:8.0f}  "
            f"{p[0]:15.0f} {p[1]:7.0f}  {p[2]:9.0f} {p[3]:7.0f}  "
            f"{sum(refused for _, refused in each):7}",
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
    parser.add_argument("flags", nargs="*", help="flags of dapo-jax serve, after --")
    args = parser.parse_args()
    progress = Progress(args.state, [args.requests, args.seed, args.switch, *args.flags])
    if progress.done == args.requests > 0:
        print(f"all have been asked; without {args.state} they are again")
    with tempfile.TemporaryDirectory() as folder:
        served.make_byte_folder(pathlib.Path(folder))
        try:
            with server(folder, args.switch, args.flags) as (process, port):
                if numbers := range(progress.done, args.requests):
                    clients = Clients(port, args.seed)
                    soak(process, clients, numbers, threads=args.clients, note=progress.note)
                if args.load:
                    load(port, [int(count) for count in args.load.split(",")], args.seconds)
        except (Wrong, OSError, openai.OpenAIError) as error:
            print(f"failed: {type(error).__name__}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
