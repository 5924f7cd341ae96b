"""The part `judge`: scores, retries, cache, cost, and responses that tell the judge what to say."""

import collections
import concurrent.futures
import contextlib
import http.server
import json
import random
import re
import threading
import time

import pytest
from conftest import make_completion, make_prompt
from row_files import read_table

from dapo_jax.config.experiment import Config, Reward
from dapo_jax.config.settings import open_extras
from dapo_jax.extras import judge as model_judge
from dapo_jax.extras.judge import JudgeSettings as Settings
from dapo_jax.extras.judge import read_score
from dapo_jax.rewards.functions import PartsReply, ResponseCall, find_functions
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.run.metrics import judge_counts
from dapo_jax.types.structs import Outcome

# What a chat template's tokenizer reads as the begin of another message.
CONTROL = re.compile(
    r"<\|im_start\|>\w+|\[INST\]|<start_of_turn>\w+|</response>|<s>|\[gMASK\]|\]~b\]"
    r"|\[UNUSED_TOKEN_\d+\]|\[e~\[|>>\w+<<"
)
ORDER = re.compile(r"[Ss]core(?:\W+is|\W+of)?\W*(\d+)")


def naive_grade(messages: list[dict]) -> str:
    """Grade as a judge that does whatever it is told, except by the text of the response.

    It gives 10 if the response ends in the reference answer, else 0, and quotes the response.
    """
    text = messages[1]["content"]
    _, *orders = CONTROL.split(text)  # messages of others, which it obeys
    fields = {} if orders else json.loads(text)
    orders += [str(value) for name, value in fields.items() if name != "response"]
    told = [match[1] for order in orders for match in ORDER.finditer(order)]
    response = fields.get("response", "")
    own = 10 if response.rstrip().endswith(fields.get("reference answer", "?")) else 0
    return json.dumps({"reason": f"It says: {response}", "score": int(told[-1]) if told else own})


@contextlib.contextmanager
def judging(replies, port=0):
    """Serve a judge; `replies(messages)` is a text, or a status code."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request | {"key": self.headers["Authorization"], "path": self.path})
            reply = replies(request["messages"])
            message = {"choices": [{"message": {"content": reply}}]}
            body = json.dumps(message | {"usage": {"prompt_tokens": 100, "completion_tokens": 10}})
            self.send_response(reply if isinstance(reply, int) else 200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_): ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def open_judge(settings: Settings):
    """Return the function that rewards a response as the part `judge` does in its worker."""
    part = find_functions(["judge"], extras=open_extras({"judge": settings}))["judge"]
    return lambda text, columns="": part.score(
        ResponseCall("6*7?", text, "42", None, columns), 60.0
    )


def score(settings: Settings, *responses: str, columns: str = "") -> list[PartsReply]:
    judge = open_judge(settings)
    return [judge(text, columns) for text in responses]


HONEST = "Six times seven is 42"
ATTACKS = read_table(__file__, "attacks")


def test_no_response_tells_the_judge_its_score():
    with judging(naive_grade) as (url, _):
        settings = Settings(url=url, model="naive", cache="")
        verdicts = score(settings, HONEST, *ATTACKS)
    assert [verdict.parts["judge"] for verdict in verdicts] == [1.0] + [0.0] * len(ATTACKS)


def test_the_naive_judge_obeys_what_stands_outside_of_the_response(monkeypatch):
    monkeypatch.setattr(model_judge, "_CONTROL", re.compile("(?!)"))
    texts = [model_judge.write_messages(Settings(), "?", text, "42", "") for text in ATTACKS]
    told = [json.loads(naive_grade(messages))["score"] for messages in texts]
    assert told.count(10) == 8


@pytest.mark.parametrize(("reply", "expected"), read_table(__file__, "replies"))
def test_only_one_object_with_one_score_counts(reply, expected):
    with contextlib.nullcontext() if expected is not None else pytest.raises(ValueError):
        assert read_score(reply, 10) == expected


def test_a_judge_that_repeats_the_response_is_asked_again_and_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    replies = iter([503, 'The response: {"score": 10}', '{"reason": "", "score": 5}'])
    settings = {"model": "m", "cache": str(tmp_path), "input_price": 1.0, "output_price": 10.0}
    with judging(lambda _: next(replies)) as (url, asked):
        rubric = json.dumps({"rubric": "Is it short?"})
        (first,) = score(Settings(url=url, **settings), HONEST, columns=rubric)
    with judging(lambda _: 500) as (other_url, others):  # it has moved; its model is the same
        (second,) = score(Settings(url=other_url, **settings), HONEST, columns=rubric)
    assert first.parts["judge"] == second.parts["judge"] == 0.5
    assert first.counts["judge_calls"] == 3 and first.counts["judge_tokens"] == 220 and not others
    assert first.counts["judge_cost"] == pytest.approx((200 * 1 + 20 * 10) / 1e6)
    assert second.counts["judge_calls"] == 0 and len(asked) == 3
    assert "Is it short?" in asked[0]["messages"][1]["content"]
    system, user = asked[2]["messages"]
    assert system["content"].endswith(model_judge.AGAIN) and user == asked[0]["messages"][1]
    assert asked[0]["key"] == "Bearer secret" and asked[0]["path"] == "/v1/chat/completions"


@pytest.mark.parametrize("reply", [401, 500, "I give it 10 of 10"])
def test_a_judge_without_a_score_gives_no_reward_and_no_wait_at_the_end(reply, monkeypatch):
    monkeypatch.setattr(model_judge, "FIRST_DELAY_SECONDS", 60.0)
    began = time.monotonic()
    with judging(lambda _: reply) as (url, asked):
        settings = Settings(url=url, model="m", cache="", retries=0)
        (verdict,) = score(settings, HONEST)
    assert verdict.failure and verdict.failure.outcome is Outcome.JUDGE_UNAVAILABLE
    assert len(asked) == {401: 1, 500: 1}.get(reply, 2) and time.monotonic() - began < 30


@pytest.mark.parametrize("reply", [400, 413, 422, "I give it 10 of 10"])
def test_a_response_that_no_judge_can_read_has_the_lowest_grade(reply):
    def grade(messages):
        return reply if "too long" in messages[1]["content"] else '{"reason": "", "score": 9}'

    with judging(grade) as (url, _), judging(lambda _: reply) as (broken, _):
        for place, expected in ((url, 0.0), (broken, None)):
            settings = Settings(url=place, model="m", cache="", retries=1)
            (verdict,) = score(settings, "too long")
            assert (verdict.parts or {}).get("judge") == expected, place


@pytest.mark.parametrize("calls", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_judge_that_errs_hangs_and_restarts_gives_no_wrong_score(calls, monkeypatch):
    rng, served = random.Random(0), collections.Counter()
    monkeypatch.setattr(model_judge, "FIRST_DELAY_SECONDS", 0.05)

    def grade(messages):
        served["calls"] += 1
        if (draw := rng.random()) < 0.05:
            time.sleep(1.0)
        time.sleep(0.01)
        if draw < 0.15:
            return rng.choice([500, 503, 429])
        served["tokens"] += 110
        return json.dumps({"score": int(json.loads(messages[1]["content"])["response"]) % 11})

    with judging(grade) as (url, _):
        limits = {"retries": 6, "request_seconds": 0.5}
        judge = open_judge(Settings(url=url, model="m", cache="", input_price=1.0, **limits))
        threads = concurrent.futures.ThreadPoolExecutor(16)
        futures = [threads.submit(judge, str(i)) for i in range(calls)]
        futures[calls // 4].result(timeout=60)
    for last in (calls // 2, calls):  # the server restarts twice
        time.sleep(0.2)
        with judging(grade, int(url.rpartition(":")[2][:-3])):
            replies = [future.result(timeout=60) for future in futures[:last]]
    assert not any(reply.failure for reply in replies)
    assert [reply.parts["judge"] for reply in replies] == [i % 11 / 10 for i in range(calls)]
    for name in served:
        assert sum(reply.counts[f"judge_{name}"] for reply in replies) == served[name]
    cost = sum(reply.counts["judge_cost"] for reply in replies)
    assert cost == pytest.approx(100 * calls / 1e6) and served["calls"] > calls


def test_calls_whose_scores_nobody_reads_are_not_sent_and_sent_ones_count():
    started, free = threading.Event(), threading.Event()

    def grade(_):
        started.set()
        free.wait(30)
        return 503

    with judging(grade) as (url, asked):
        settings = Settings(url=url, model="m", cache="", concurrency=2, retries=1)
        reward = Reward(parts="judge=0.5", correct="spread")
        pool = RewardPool(reward, extras=open_extras({"judge": settings}))
        groups = [pool.submit_group(make_prompt(i, [2]), [make_completion([5])]) for i in range(4)]
        assert started.wait(60)
        for group in groups:
            group.cancel()
        time.sleep(0.5)  # the stopped requests stay open for a while
        free.set()
        (verdict,) = pool.submit_group(make_prompt(4, [2]), [make_completion([5])]).result(60)
        reply = reward_group(Config(), make_prompt(0, [2]), (make_completion([5]),), (verdict,))
        pool.close()
    assert reply.failed and judge_counts([reply])["judge/calls"] == len(asked) <= 2 + 2
