"""Clients of a served policy who know what they must be answered; some of them are rude."""

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from served import BUDGET, PROMPTS, TOKENIZER, Client

MODEL = "policy"
JSON = {"Content-Type": "application/json"}
RUDE = 0.1  # of the requests are given up, half-way or before
SLOW = 0.03  # are read with pauses


class Wrong(Exception):
    """Wrong answer of the server."""


class Refused(Exception):
    """Refusal because as many requests wait as may wait."""


class Case(NamedTuple):
    """Request with a known answer.

    Attributes:
        drawn: sampling fields for HTTP; gRPC takes the likeliest token.
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
        """Answer to a completion, with its body still to be read."""
        for fresh in (False, True):  # one that was idle for long may be closed
            if self._kept is None or fresh:
                self.drop()
                self._kept = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            try:
                self._kept.request("POST", "/v1/completions", json.dumps(fields), JSON)
                answer = self._kept.getresponse()
            except (http.client.RemoteDisconnected, ConnectionError):
                if fresh:
                    raise
                continue
            if answer.status == 429:
                answer.read()
                raise Refused
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
        half.putheader("Content-Type", JSON["Content-Type"])
        half.endheaders(json.dumps(case.body()).encode())
        half.close()


class Clients:
    """What they ask is a function of the request's number; each thread is one client.

    Args:
        ports: of gRPC and HTTP.

    Attributes:
        answers: what each case is answered alone.
        said: a word for every request.
    """

    def __init__(self, ports: tuple[int, int], seed: int):
        self._local, self._ports, self._seed = threading.local(), ports, seed
        self._every: list[tuple[Client, Web]] = []
        self.answers = {case: self._alone(case) for case in CASES}
        self.said: list[str] = []

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
        text = web.whole(case)[0]
        if web.whole(case)[0] != text:
            raise Wrong(f"{case}: asked twice alone, two answers")
        return text

    def ask(self, number: int) -> None:
        """Sends one request. Raises `Wrong`, or an error of the connection."""
        rng = random.Random(f"{self._seed} {number}")
        case, chance = rng.choice(CASES), rng.random()
        if chance < RUDE:
            self.said.append("rude")
            self._leave(case, rng.randrange(5))
            return
        grpc_too = [self._grpc_text, self._grpc_ids] * (not case.drawn)
        way = rng.choice([self._whole, self._several, self._stream, *grpc_too])
        if chance < RUDE + SLOW:
            way = self._slow
        if (text := way(case)) != self.answers[case]:
            raise Wrong(f"{case} by {way.__name__}: {text!r}, alone {self.answers[case]!r}")
        self.said.append(way.__name__.strip("_"))

    def _grpc_text(self, case: Case) -> str:
        return self._mine()[0].ask(case.prompt, case.budget)[0]

    def _grpc_ids(self, case: Case) -> str:
        return TOKENIZER.decode(self._mine()[0].ask(TOKENIZER.encode(case.prompt), case.budget)[1])

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
