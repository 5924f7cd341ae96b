"""Soaks a served policy in short requests, rude clients among them.

    cd tests/commands
    python soak_server.py --requests 100000              for hours
    python soak_server.py --requests 20000 --switch 1e-6 threads of the server change places

A tenth of the requests are given up half-way, some are read slowly. Every other answer must be the
one that the same request got alone. Exit code 1 where one is not, where the
server exits or fails, or where threads, open files or memory grow.
"""

import argparse
import contextlib
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # where it is no test
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))

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


def soak(
    process: int,
    clients: Clients,
    numbers: range,
    *,
    threads: int,
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


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--switch", type=float, default=0.0, help="seconds; 0: Python's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="flags of dapo-jax serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served.make_byte_folder(pathlib.Path(folder))
        try:
            with server(folder, args.switch, args.flags) as (process, port):
                clients = Clients(port, args.seed)
                soak(process, clients, range(args.requests), threads=args.clients)
        except (Wrong, OSError, openai.OpenAIError) as error:
            print(f"failed: {type(error).__name__}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
