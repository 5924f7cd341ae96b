"""Log-probs, echo, token ids and calls of tools, as OpenAI's published client asks for them."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from row_files import read_table
from served import BUDGET, BYTES_DECODER, END, TOKENIZER, http_serving, make_byte_params, reopen

from dapo_jax.data.prompts.templates import ChatTemplate
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve import policy
from dapo_jax.extras.serve.logprobs import CHUNK_TOKENS, Scorer
from dapo_jax.model.logprobs import Rows, token_logprobs
from dapo_jax.runtime.tool_calls import read_calls

CHAT = ChatTemplate(
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}"
    "{% endfor %}"
)
ASKED = {"model": "policy", "prompt": "3+4=", "max_tokens": 6}


@pytest.fixture(scope="module")
def client(byte_folder, byte_engine):
    """Client of a server that takes the likeliest token; the first end token is never sampled."""
    load = reopen(byte_engine, tokenizer=Tokenizer(TOKENIZER.backend, (7, END), 0, CHAT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "load_served", load)
        with http_serving(byte_folder) as (_, client):
            yield client


@jax.jit
def row_logprobs(params: dict, row: jax.Array, length: int) -> jax.Array:
    """Of a row whose last tokens may be padding: few widths compile."""
    positions = jnp.arange(row.size)[None]
    segments = (positions < length).astype(jnp.int32)
    options = {"temperature": 1.0, "chunk_tokens": 64}
    rows = Rows(row[None], segments, positions)
    return token_logprobs(params, BYTES_DECODER, rows, **options)[0][0]


def logprobs_of(ids: list[int]) -> np.ndarray:
    """Log-probs of all ids but the first, by the trainer's own function."""
    width = 64 if len(ids) <= 64 else 3 * CHUNK_TOKENS
    row = np.pad(np.array(ids, np.int32), (0, width - len(ids)))
    return np.asarray(row_logprobs(make_byte_params(), row, len(ids)))[1 : len(ids)]


def test_logprobs_are_those_of_the_trainer(client, byte_responses):
    for prompt, ids in byte_responses.items():
        request = ASKED | {"prompt": prompt, "max_tokens": BUDGET}
        answer = client.completions.create(**request, logprobs=3).choices[0]
        before, ends = TOKENIZER.encode(prompt), [END] * (len(ids) < BUDGET)
        wanted = logprobs_of([*before, *ids, *ends])[len(before) - 1 :]
        shown = answer.logprobs
        np.testing.assert_allclose(shown.token_logprobs, wanted, atol=1e-4)
        assert len(shown.tokens) == len(shown.top_logprobs) == len(wanted)
        assert len(shown.text_offset) == len(wanted)
        for logprob, top in zip(shown.token_logprobs, shown.top_logprobs, strict=True):
            assert logprob == max(top.values()) and len(top) == 3  # it took the likeliest
        sampled = client.completions.create(**request, logprobs=0, temperature=2.0, seed=1)
        tops = sampled.choices[0].logprobs.top_logprobs
        assert all(len(top) == 1 for top in tops)


def test_echo_scores_the_prompt_too_and_may_draw_nothing(client, byte_responses):
    ids = TOKENIZER.encode("Tell me!")
    for count in (0, 1, 6):
        request = ASKED | {"prompt": [ids, ids[:1]], "max_tokens": count}
        answer = client.completions.create(**request, echo=True, logprobs=1)
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
    plain = client.completions.create(**ASKED, echo=True).choices[0]
    assert plain.text.startswith("3+4=") and plain.logprobs is None


@pytest.mark.parametrize("count", [0, 6])
def test_a_stream_holds_what_the_whole_answer_does(client, count):
    request = ASKED | {"n": 2, "max_tokens": count, "echo": True, "logprobs": 2}
    whole = client.completions.create(**request)
    texts, shown, reasons = ["", ""], [None, None], [None, None]
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            shown[choice.index] = choice.logprobs or shown[choice.index]
            reasons[choice.index] = choice.finish_reason
    for index, choice in enumerate(whole.choices):
        assert (texts[index], reasons[index]) == (choice.text, choice.finish_reason)
        assert shown[index] == choice.logprobs


def test_an_end_token_has_a_logprob(client, byte_responses):
    prompt = next(prompt for prompt, ids in byte_responses.items() if not ids)
    request = ASKED | {"prompt": prompt, "max_tokens": 1}
    answer = client.completions.create(**request, echo=True, logprobs=1).choices[0]
    assert answer.logprobs.tokens[-1] == "<|end|>" and answer.text == prompt
    chat = {"model": "policy", "messages": [{"role": "user", "content": prompt}], "logprobs": True}
    (shown,) = client.chat.completions.create(**chat).choices[0].logprobs.content
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


def test_logprobs_of_a_chat(client, byte_responses):
    messages = [{"role": "user", "content": "3+4="}]
    request = {"model": "policy", "messages": messages, "max_tokens": 5, "logprobs": True}
    shown = client.chat.completions.create(**request, top_logprobs=2).choices[0].logprobs.content
    *_, last = client.chat.completions.create(**request, top_logprobs=2, stream=True)
    assert last.choices[0].logprobs.content == shown
    wanted = logprobs_of(TOKENIZER.encode("3+4=") + byte_responses["3+4="][:5])[3:]
    np.testing.assert_allclose([entry.logprob for entry in shown], wanted, atol=1e-4)
    for entry in shown:
        assert entry.top_logprobs[0].logprob == entry.logprob and len(entry.top_logprobs) == 2
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    assert not client.chat.completions.create(**request).choices[0].logprobs.content[0].top_logprobs


def test_token_ids_whole_and_streamed(client, byte_responses):
    asked = ASKED | {"n": 2, "max_tokens": BUDGET, "extra_body": {"return_token_ids": True}}
    for choice in client.completions.create(**asked).choices:
        assert choice.prompt_token_ids == TOKENIZER.encode("3+4=")
        assert choice.token_ids == byte_responses["3+4="]
    streamed = {0: [], 1: []}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
    assert list(streamed.values()) == [byte_responses["3+4="]] * 2


def test_more_scores_than_may_wait_are_refused(byte_folder, same_engine, monkeypatch):
    score, gate = Scorer.score, threading.Event()
    monkeypatch.setattr(Scorer, "score", lambda *args: gate.wait(30) and score(*args))
    request = ASKED | {"prompt": ["a", "3+4="], "max_tokens": 0, "echo": True, "logprobs": 0}
    with http_serving(byte_folder, waiting=3) as (_, client), ThreadPoolExecutor(3) as pool:
        first = [pool.submit(client.completions.create, **request) for _ in range(3)]
        time.sleep(0.5)  # four slots and three that may wait hold three requests of two
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**request)
        gate.set()
        assert [len(answer.result().choices) for answer in first] == [2, 2, 2]
        assert client.completions.create(**request).choices


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


def test_tools_are_written_by_the_template_and_calls_come_as_such(client, monkeypatch):
    from dapo_jax.extras.serve import responses

    request = {"model": "policy", "messages": [{"role": "user", "content": "3+4="}]}
    plain = client.chat.completions.create(**request)
    with_tools = client.chat.completions.create(**request, tools=TOOLS)
    assert with_tools.usage.prompt_tokens == plain.usage.prompt_tokens + len("add")
    none = client.chat.completions.create(**request, tools=TOOLS, tool_choice="none")
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert with_tools.choices[0].message.tool_calls is None
    # A random policy calls nothing: what it says is taken for a call here.
    read = responses.read_calls
    call = '<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>'
    monkeypatch.setattr(responses, "read_calls", lambda text, tools: read(call, tools))
    choice = client.chat.completions.create(**request, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (called,) = choice.message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"a": 7})
    chunks = list(client.chat.completions.create(**request, tools=TOOLS, stream=True))
    assert chunks[-1].choices[0].delta.tool_calls[0].function.arguments == '{"a": 7}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    answered = [choice.message, {"role": "tool", "tool_call_id": called.id, "content": "14"}]
    request["messages"] = [*request["messages"], *answered]
    after = client.chat.completions.create(**request, tools=TOOLS)
    assert after.usage.prompt_tokens == len("add3+4=714")
