"""OpenAI's protocol as OpenAI's published client speaks it."""

import json
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from conftest import make_prompt
from learners import token_logprobs
from row_files import read_table
from served import (
    BUDGET,
    BYTES_DECODER,
    END,
    PROMPTS,
    TOKENIZER,
    connect,
    http_serving,
    likeliest,
    make_byte_params,
    reopen,
)

from dapo_jax.data.prompts.templates import ChatTemplate
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve import policy, responses
from dapo_jax.extras.serve.logprobs import CHUNK_TOKENS, Scorer
from dapo_jax.model.logprobs import Rows
from dapo_jax.rollout.requests import Reader
from dapo_jax.runtime.tool_calls import read_calls
from dapo_jax.types.structs import Request, Stop

CHAT = ChatTemplate(
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('who speaks first?') }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
SUM = [{"role": "system", "content": "3+"}, {"role": "user", "content": "4="}]
DRAWN = {"model": "policy", "prompt": "Tell me!", "temperature": 1.0, "seed": 7}


def chat_client(folder, byte_engine, end_ids: tuple[int, ...], chat: ChatTemplate):
    """Client of a server that takes the likeliest token, unless a request has another rule."""
    load = reopen(byte_engine, tokenizer=Tokenizer(TOKENIZER.backend, end_ids, 0, chat))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "load_served", load)
        patch.setattr(policy, "warm_up", lambda *args: None)
        with http_serving(folder) as (_, client):
            yield client


@pytest.fixture(scope="module")
def client(byte_folder, byte_engine):
    yield from chat_client(byte_folder, byte_engine, (END,), CHAT)


@pytest.fixture(scope="module")
def agent(byte_folder, byte_engine):
    """Client of a server whose template shows tools; its first end token is never sampled."""
    yield from chat_client(byte_folder, byte_engine, (7, END), TOOLS_CHAT)


def read(stream) -> tuple[list[str], list[str | None], list]:
    """Texts and reasons by choice, and the usages, of a stream of completions."""
    texts, reasons, usages = {}, {}, []
    for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    return [texts[i] for i in sorted(texts)], [reasons[i] for i in sorted(reasons)], usages


def test_the_likeliest_responses_whole_and_streamed(client, byte_responses):
    for prompt, ids in byte_responses.items():
        request = {"model": "policy", "prompt": prompt, "max_tokens": BUDGET}
        whole, reason = client.completions.create(**request), "length"
        if len(ids) < BUDGET:
            reason = "stop"
        assert whole.choices[0].text == TOKENIZER.decode(ids)
        assert whole.choices[0].finish_reason == reason
        count = len(TOKENIZER.encode(prompt))
        usage = {"prompt_tokens": count, "completion_tokens": len(ids)}
        assert whole.usage.to_dict() == usage | {"total_tokens": count + len(ids)}
        options = {"include_usage": True}
        stream = client.completions.create(**request, stream=True, stream_options=options)
        texts, reasons, usages = read(stream)
        assert (texts, reasons) == ([TOKENIZER.decode(ids)], [reason])
        assert usages[-1] == whole.usage and not any(usages[:-1])


def test_prompts_in_every_form_and_the_servers_budget(client, byte_responses):
    texts = [TOKENIZER.decode(byte_responses[prompt]) for prompt in PROMPTS]
    ids = [TOKENIZER.encode(prompt) for prompt in PROMPTS]
    for prompts, wanted in (PROMPTS, texts), (ids, texts), (ids[1], texts[1:2]):
        answer = client.completions.create(model="policy", prompt=prompts)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))


@pytest.mark.parametrize("default", [5, -1])
def test_a_request_without_max_tokens_gets_the_default(byte_folder, same_engine, default):
    with http_serving(byte_folder, default_max_tokens=default) as (_, client):
        for prompt in PROMPTS:
            (choice,) = client.completions.create(model="policy", prompt=prompt).choices
            assert choice.text == TOKENIZER.decode(likeliest(prompt, max(default, 0)))


def test_chat_whole_and_streamed(client, byte_responses):
    wanted = TOKENIZER.decode(byte_responses["3+4="][:8])
    request = {"model": "policy", "messages": SUM, "max_completion_tokens": 8}
    answer = client.chat.completions.create(**request)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", wanted)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "="}]
    request["messages"] = [SUM[0], {"role": "user", "content": parts}]
    assert client.chat.completions.create(**request).choices[0].message.content == wanted


def test_a_stream_is_events_that_end_in_done(client):
    body = {"model": "policy", "prompt": "3+4=", "max_tokens": 3, "stream": True}
    answer = connect(client.base_url.port, json.dumps(body)).getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_a_seed_repeats_its_responses_whatever_else_is_served(client):
    def draw(**changes):
        return [c.text for c in client.completions.create(**DRAWN | changes).choices]

    alone, several = draw(), draw(n=4)
    assert several[0] == alone[0] and len(set(several)) == 4
    assert draw(seed=8) != alone and draw(seed=7 - 2**64 // 2) != alone
    others = [
        {},
        {"top_p": 0.5},
        {"extra_body": {"top_k": 3}},
        {"temperature": 0},
        {"temperature": 3.0},
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: draw(**others[i % 5], n=1 + i % 3), range(30)))
    for i, answer in enumerate(answers):
        assert answer[0] == answers[i % 5][0], others[i % 5]
        if i % 5 == 0:
            assert answer == several[: 1 + i % 3]
    assert len({answers[i][0] for i in range(5)}) == 5


def test_temperature_top_p_and_top_k_are_the_requests_own(client, byte_responses):
    greedy = TOKENIZER.decode(byte_responses["Tell me!"])
    for changes in ({"temperature": 0}, {"top_p": 1e-9}, {"extra_body": {"top_k": 1}}):
        request = DRAWN | {"seed": None} | changes
        assert client.completions.create(**request).choices[0].text == greedy
    texts = {client.completions.create(**DRAWN | {"seed": None}).choices[0].text for _ in range(4)}
    assert len(texts) == 4


def test_a_stop_ends_the_text_before_it(client, byte_responses):
    ids = byte_responses["3+4="]
    whole = TOKENIZER.decode(ids)
    assert len(ids) == BUDGET
    for stop, cut in (
        (whole[4:6], whole.index(whole[4:6])),
        (["never", whole[3]], whole.index(whole[3])),
        (whole[0], 0),
        (["never", whole + "!"], len(whole)),
    ):
        request = {"model": "policy", "prompt": "3+4=", "stop": stop}
        answer = client.completions.create(**request)
        assert answer.choices[0].text == whole[:cut]
        assert answer.choices[0].finish_reason == ("stop" if cut < len(whole) else "length")
        assert (answer.usage.completion_tokens < BUDGET) == (cut < len(whole))
        assert read(client.completions.create(**request, stream=True))[0] == [whole[:cut]]


def test_text_until_a_stop_by_definition():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=12))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        request = Request(make_prompt(0, [3]), [0], stop=Stop(tuple(stops)))
        news = []
        request.watch = news.append
        until = Reader(TOKENIZER, request, (END,))
        for at, token in enumerate(TOKENIZER.encode(text), 1):
            if until.read(0, [token], last=at == len(text)):
                break
        shown = "".join(new.text for new in news)
        # The first stop that is complete ends the text where it, or another one as complete, began.
        ends = [i for i in range(13) if any(text[:i].endswith(stop) for stop in stops)]
        if not ends:
            assert (shown, until.stopped) == (text, False)
        else:
            read = text[: ends[0]]
            begins = min(len(read) - len(stop) for stop in stops if read.endswith(stop))
            assert (shown, until.stopped) == (text[:begins], True)


def test_models_health_and_what_is_not_there(client):
    assert [model.id for model in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").owned_by == "dapo_jax"
    with urllib.request.urlopen(f"http://127.0.0.1:{client.base_url.port}/health") as answer:
        assert json.load(answer) == {"status": "ok"}
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.param == "model" and "'policy'" in missing.value.message
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings"):
        client.embeddings.create(model="policy", input="a")


@pytest.mark.parametrize(
    ("param", "fields", "message"),
    [
        *read_table(__file__, "completions"),
        ("prompt", {"prompt": ["a"] * 200}, "n = 1 responses to 200 prompts: at most 128"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(client, param, fields, message):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": "policy", "prompt": "a"} | fields)
    assert refused.value.param == param and message in refused.value.message
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("param", "fields", "message"),
    [
        *read_table(__file__, "chats"),
        ("messages", {"messages": SUM * 6}, "tokens: must have from 1 to 20"),
    ],
)
def test_what_is_wrong_with_a_chat_is_refused_by_its_field(client, param, fields, message):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "policy", "messages": SUM} | fields)
    assert refused.value.param == param and message in refused.value.message


def test_what_asks_for_nothing_is_served(client):
    harmless = {"user": "me", "logit_bias": {}, "presence_penalty": 0.0, "n": 2, "best_of": 1}
    assert client.completions.create(model="policy", prompt="a", **harmless).choices
    harmless = {"tools": [], "logprobs": False, "response_format": {"type": "text"}}
    assert client.chat.completions.create(model="policy", messages=SUM, **harmless).choices


# --- log-probs, echo, token ids and calls of tools ------------------------------------------------

TOOLS_CHAT = ChatTemplate(
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}"
    "{% endfor %}"
)
ASKED = {"model": "policy", "prompt": "3+4=", "max_tokens": 6}


@jax.jit
def row_logprobs(params: dict, row: jax.Array, length: int) -> jax.Array:
    """Of a row whose last tokens may be padding: few widths compile."""
    positions = jnp.arange(row.size)[None]
    segments = (positions < length).astype(jnp.int32)
    rows = Rows(row[None], segments, positions)
    return token_logprobs(params, BYTES_DECODER, rows, chunk_tokens=64)[0][0]


def logprobs_of(ids: list[int]) -> np.ndarray:
    """Log-probs of all ids but the first, by the trainer's own function."""
    width = 64 if len(ids) <= 64 else 3 * CHUNK_TOKENS
    row = np.pad(np.array(ids, np.int32), (0, width - len(ids)))
    return np.asarray(row_logprobs(make_byte_params(), row, len(ids)))[1 : len(ids)]


def test_logprobs_are_those_of_the_trainer(agent, byte_responses):
    for prompt, ids in byte_responses.items():
        request = ASKED | {"prompt": prompt, "max_tokens": BUDGET}
        answer = agent.completions.create(**request, logprobs=3).choices[0]
        before, ends = TOKENIZER.encode(prompt), [END] * (len(ids) < BUDGET)
        wanted = logprobs_of([*before, *ids, *ends])[len(before) - 1 :]
        shown = answer.logprobs
        np.testing.assert_allclose(shown.token_logprobs, wanted, atol=1e-4)
        assert len(shown.tokens) == len(shown.top_logprobs) == len(wanted)
        assert len(shown.text_offset) == len(wanted)
        for logprob, top in zip(shown.token_logprobs, shown.top_logprobs, strict=True):
            assert logprob == max(top.values()) and len(top) == 3  # it took the likeliest
        sampled = agent.completions.create(**request, logprobs=0, temperature=2.0, seed=1)
        tops = sampled.choices[0].logprobs.top_logprobs
        assert all(len(top) == 1 for top in tops)


def test_echo_scores_the_prompt_too_and_may_draw_nothing(agent, byte_responses):
    ids = TOKENIZER.encode("Tell me!")
    for count in (0, 1, 6):
        request = ASKED | {"prompt": [ids, ids[:1]], "max_tokens": count}
        answer = agent.completions.create(**request, echo=True, logprobs=1)
        first, second = answer.choices
        drawn = byte_responses["Tell me!"][:count]
        assert first.text == "Tell me!" + TOKENIZER.decode(drawn)
        assert answer.usage.prompt_tokens == len(ids) + 1
        assert first.logprobs.token_logprobs[0] is first.logprobs.top_logprobs[0] is None
        np.testing.assert_allclose(
            first.logprobs.token_logprobs[1:], logprobs_of([*ids, *drawn]), atol=1e-4
        )
        assert "".join(first.logprobs.tokens[: len(ids)]) == "Tell me!"
        assert first.logprobs.text_offset[:3] == [0, 1, 2]
        assert first.finish_reason == "length" and second.text[0] == "T"
        if not count:
            assert second.logprobs.token_logprobs == [None]
            assert answer.usage.completion_tokens == 0
    plain = agent.completions.create(**ASKED, echo=True).choices[0]
    assert plain.text.startswith("3+4=") and plain.logprobs is None


@pytest.mark.parametrize("count", [0, 6])
def test_a_stream_holds_what_the_whole_answer_does(agent, count):
    request = ASKED | {"n": 2, "max_tokens": count, "echo": True, "logprobs": 2}
    whole = agent.completions.create(**request)
    texts, shown, reasons = ["", ""], [None, None], [None, None]
    for chunk in agent.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            shown[choice.index] = choice.logprobs or shown[choice.index]
            reasons[choice.index] = choice.finish_reason
    for index, choice in enumerate(whole.choices):
        assert (texts[index], reasons[index]) == (choice.text, choice.finish_reason)
        assert shown[index] == choice.logprobs


def test_an_end_token_has_a_logprob(agent, byte_responses):
    prompt = next(prompt for prompt, ids in byte_responses.items() if not ids)
    request = ASKED | {"prompt": prompt, "max_tokens": 1}
    answer = agent.completions.create(**request, echo=True, logprobs=1).choices[0]
    assert answer.logprobs.tokens[-1] == "<|end|>" and answer.text == prompt
    chat = {"model": "policy", "messages": [{"role": "user", "content": prompt}], "logprobs": True}
    (shown,) = agent.chat.completions.create(**chat).choices[0].logprobs.content
    assert (shown.token, shown.logprob) == ("<|end|>", answer.logprobs.token_logprobs[-1])


def test_prompts_longer_than_a_chunk_are_scored_alike(byte_engine):
    scorer = Scorer(byte_engine.engine.config)
    ids = np.random.default_rng(0).integers(0, 256, 3 * CHUNK_TOKENS).tolist()
    for length in (2, 16, 17, CHUNK_TOKENS + 1, len(ids)):
        first, *scores = scorer.score(byte_engine.params, ids[:length], 20)
        assert first == (ids[0], None, [])
        logprobs = [score.logprob for score in scores]
        np.testing.assert_allclose(logprobs, logprobs_of(ids[:length]), atol=2e-4)
        assert all(len(score.likeliest) == 20 for score in scores)


def test_logprobs_of_a_chat(agent, byte_responses):
    messages = [{"role": "user", "content": "3+4="}]
    request = {"model": "policy", "messages": messages, "max_tokens": 5, "logprobs": True}
    shown = agent.chat.completions.create(**request, top_logprobs=2).choices[0].logprobs.content
    *_, last = agent.chat.completions.create(**request, top_logprobs=2, stream=True)
    assert last.choices[0].logprobs.content == shown
    wanted = logprobs_of(TOKENIZER.encode("3+4=") + byte_responses["3+4="][:5])[3:]
    np.testing.assert_allclose([entry.logprob for entry in shown], wanted, atol=1e-4)
    for entry in shown:
        assert entry.top_logprobs[0].logprob == entry.logprob and len(entry.top_logprobs) == 2
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    assert not agent.chat.completions.create(**request).choices[0].logprobs.content[0].top_logprobs


def test_token_ids_whole_and_streamed(agent, byte_responses):
    asked = ASKED | {"n": 2, "max_tokens": BUDGET, "extra_body": {"return_token_ids": True}}
    for choice in agent.completions.create(**asked).choices:
        assert choice.prompt_token_ids == TOKENIZER.encode("3+4=")
        assert choice.token_ids == byte_responses["3+4="]
    streamed = {0: [], 1: []}
    for chunk in agent.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
    assert list(streamed.values()) == [byte_responses["3+4="]] * 2


def test_more_scores_than_may_wait_are_refused(byte_folder, same_engine, monkeypatch):
    score, gate = Scorer.score, threading.Event()
    monkeypatch.setattr(Scorer, "score", lambda *args: gate.wait(30) and score(*args))
    request = ASKED | {"prompt": ["a", "3+4="], "max_tokens": 0, "echo": True, "logprobs": 0}
    with http_serving(byte_folder, waiting=3) as (_, agent), ThreadPoolExecutor(3) as pool:
        first = [pool.submit(agent.completions.create, **request) for _ in range(3)]
        time.sleep(0.5)  # four slots and three that may wait hold three requests of two
        with pytest.raises(openai.RateLimitError):
            agent.completions.create(**request)
        gate.set()
        assert [len(answer.result().choices) for answer in first] == [2, 2, 2]
        assert agent.completions.create(**request).choices


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [*read_table(__file__, "calls"), ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, [])],
)
def test_calls_are_read_and_what_is_none_stays_text(text, rest, calls):
    left, found = read_calls(text, TOOLS)
    assert left == (text if rest is None else rest)
    assert [call["function"]["arguments"] for call in found] == calls
    assert all(call["type"] == "function" for call in found)
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in found)  # as Mistral's


def test_tools_are_written_by_the_template_and_calls_come_as_such(agent, monkeypatch):
    request = {"model": "policy", "messages": [{"role": "user", "content": "3+4="}]}
    plain = agent.chat.completions.create(**request)
    with_tools = agent.chat.completions.create(**request, tools=TOOLS)
    assert with_tools.usage.prompt_tokens == plain.usage.prompt_tokens + len("add")
    none = agent.chat.completions.create(**request, tools=TOOLS, tool_choice="none")
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert with_tools.choices[0].message.tool_calls is None
    # A random policy calls nothing: what it says is taken for a call here.
    read = responses.read_calls
    call = '<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>'
    monkeypatch.setattr(responses, "read_calls", lambda text, tools: read(call, tools))
    choice = agent.chat.completions.create(**request, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (called,) = choice.message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"a": 7})
    assert not hasattr(called, "index")  # which parts of a stream have
    chunks = list(agent.chat.completions.create(**request, tools=TOOLS, stream=True))
    assert chunks[-1].choices[0].delta.tool_calls[0].index == 0
    assert chunks[-1].choices[0].delta.tool_calls[0].function.arguments == '{"a": 7}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    answered = [choice.message, {"role": "tool", "tool_call_id": called.id, "content": "14"}]
    request["messages"] = [*request["messages"], *answered]
    after = agent.chat.completions.create(**request, tools=TOOLS)
    assert after.usage.prompt_tokens == len("add3+4=714")
