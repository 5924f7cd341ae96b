"""OpenAI's protocol as OpenAI's published client speaks it."""

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from conftest import make_prompt
from row_files import read_table
from served import (
    BUDGET,
    END,
    PROMPTS,
    TOKENIZER,
    free_port,
    http_serving,
    likeliest,
    make_openai,
    make_serve_config,
    reopen,
    serving,
)

from dapo_jax.data.prompts.templates import ChatTemplate
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve import policy
from dapo_jax.rollout.requests import Reader
from dapo_jax.types.structs import Request, Stop

CHAT = ChatTemplate(
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('who speaks first?') }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
SUM = [{"role": "system", "content": "3+"}, {"role": "user", "content": "4="}]
DRAWN = {"model": "policy", "prompt": "Tell me!", "temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture(scope="module")
def client(byte_folder, byte_engine, port):
    """Client of a server that takes the likeliest token, unless a request has another rule."""
    load = reopen(byte_engine, tokenizer=Tokenizer(TOKENIZER.backend, (END,), 0, CHAT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "load_served", load)
        config = make_serve_config(byte_folder, http_port=port, served_name="policy")
        with serving(config):
            yield make_openai(port)


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


def test_a_stream_is_events_that_end_in_done(client, port):
    body = {"model": "policy", "prompt": "3+4=", "max_tokens": 3, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
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


def test_models_health_and_what_is_not_there(client, port):
    assert [model.id for model in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").owned_by == "dapo_jax"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
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
    harmless = {"user": "me", "logit_bias": {}, "presence_penalty": 0.0, "n": 2, "best_of": 2}
    assert client.completions.create(model="policy", prompt="a", **harmless).choices
    harmless = {"tools": [], "logprobs": False, "response_format": {"type": "text"}}
    assert client.chat.completions.create(model="policy", messages=SUM, **harmless).choices
