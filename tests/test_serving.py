"""JetStream's Driver and LLMOrchestrator over the real engine, and the server around them."""

import asyncio
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import jax
import numpy as np
import pytest
from served import (
    BYTES_DECODER,
    END,
    byte_tokenizer,
    make_byte_folder,
    make_byte_params,
    make_serve_config,
    messages,
    read,
    serving,
)
from test_sampler import greedy_loop

from dapo_jax import serve
from dapo_jax.settings import ConfigError
from dapo_jax.tokenizer import TextStream

TOKENIZER = byte_tokenizer()
PROMPTS = ["a", "3+4=", "naïve 你好", "Tell me!", "ö" * 10, "?"]
BUDGET = 24


def code_and_details(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        read(call)
    return raised.value.code(), raised.value.details()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_byte_folder(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module", autouse=True)
def one_of_eight():
    """As the fixture `alone`, for the whole file."""
    devices = jax.devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices(*args)[:1])
        yield


@pytest.fixture(scope="module")
def opened(folder, one_of_eight):
    """An engine that takes the likeliest token, its parameters, its tokenizer."""
    return serve.open_engine(make_serve_config(folder, temperature=0.0))


@pytest.fixture(scope="module")
def expected():
    """The likeliest response to each prompt, without its end token."""
    params = make_byte_params()

    def respond(prompt: str) -> list[int]:
        ids = TOKENIZER.encode(prompt)
        drawn = greedy_loop(params, ids, BUDGET, BYTES_DECODER, END)
        return drawn[: drawn.index(END)] if END in drawn else drawn

    responses = {prompt: respond(prompt) for prompt in PROMPTS}
    lengths = {len(response) for response in responses.values()}
    assert {0, BUDGET} <= lengths and len(lengths) > 3  # empty, cut off, and between
    return responses


@pytest.fixture(scope="module")
def metrics_port():
    return free_port()


@pytest.fixture(scope="module")
def server(folder, opened, metrics_port):
    """A server that takes the likeliest token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "open_engine", lambda config: opened)
        config = make_serve_config(folder, temperature=0.0, metrics_port=metrics_port)
        with serving(config) as server:
            yield server


@pytest.fixture
def same_engine(opened, monkeypatch):
    """Servers of a test's own use the engine that is compiled already."""
    monkeypatch.setattr(serve, "open_engine", lambda config: opened)
    return opened[0]


# --- the engine, by JetStream's calls alone -------------------------------------------------


def jetstream_prefill(engine, params, text: str, **options):
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    tokens, length = tokenizer.encode(
        text, is_bos=True, max_prefill_length=engine.max_prefill_length, **options
    )
    return engine.prefill(params=params, padded_tokens=tokens, true_length=length)


def generate(engine, params, state, slot: int, steps: int) -> list[int]:
    drawn = []
    for _ in range(steps):
        state, result = engine.generate(params, state)
        result.copy_to_host_async()
        data = result.convert_to_numpy().get_result_at_slot(slot)
        assert data.tokens.shape == data.valid.shape == (1, 1)
        drawn += data.tokens[0, data.valid[0] != 0].tolist()
    return drawn


@pytest.mark.parametrize("jax_padding", [True, False])
def test_an_engine_survives_that_its_prefix_is_deleted(opened, expected, jax_padding):
    engine, params, _ = opened
    prefix = jetstream_prefill(engine, params, "3+4=", jax_padding=jax_padding)
    state = engine.insert(prefix, engine.init_decode_state(), slot=2)
    for leaf in jax.tree.leaves(prefix):
        leaf.delete()
    assert generate(engine, params, state, 2, 9) == expected["3+4="][:9]


def test_a_token_that_jetstream_puts_before_ids_is_no_part_of_the_prompt(opened):
    engine, params, _ = opened
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    ids = TOKENIZER.encode("Tell me!")
    padded = np.array([tokenizer.bos_id, *ids] + [0] * 7)
    key = jax.random.key(3)
    from_ids = engine.prefill(params=params, padded_tokens=padded, true_length=9, key=key)
    from_text = engine.prefill(
        params=params, padded_tokens=np.array(ids + [0] * 8), true_length=8, key=key
    )
    for left, right in zip(jax.tree.leaves(from_ids), jax.tree.leaves(from_text), strict=True):
        left, right = (
            jax.random.key_data(x) if x is from_ids.key or x is from_text.key else x
            for x in (left, right)
        )
        np.testing.assert_array_equal(left, right)


def test_a_slot_that_reached_its_budget_draws_nothing_more(opened, expected):
    engine, params, _ = opened
    prefix = jetstream_prefill(engine, params, "3+4=")
    state = engine.insert(prefix, engine.init_decode_state(), slot=0)
    assert generate(engine, params, state, 0, BUDGET + 3) == expected["3+4="]


# --- JetStream's orchestrator -----------------------------------------------------------------


def orchestrate(driver, *requests) -> list[tuple[str, list[int]]]:
    """Text and ids that JetStream's orchestrator answers, all requests at once."""
    orchestrator = serve.import_jetstream().LLMOrchestrator(driver)

    async def respond(request):
        return read([response async for response in orchestrator.Decode(request)])

    async def respond_to_all():
        try:
            return await asyncio.gather(*map(respond, requests))
        finally:
            await asyncio.to_thread(driver.stop)

    return asyncio.run(respond_to_all())


@pytest.mark.parametrize("interleaved", [True, False])
def test_jetstreams_orchestrator_drives_the_engine(folder, opened, expected, interleaved):
    engine, params, _ = opened
    prefiller = engine
    if not interleaved:
        config = make_serve_config(folder, slots=1, temperature=0.0)
        prefiller = serve.open_engine(config)[0]
    driver = serve.import_jetstream().Driver(
        prefill_engines=[prefiller],
        generate_engines=[engine],
        prefill_params=[params],
        generate_params=[params],
        interleaved_mode=interleaved,
    )
    content = messages.DecodeRequest.TextContent
    answers = orchestrate(
        driver,
        *(
            messages.DecodeRequest(text_content=content(text=prompt), max_tokens=BUDGET)
            for prompt in PROMPTS
        ),
        messages.DecodeRequest(text_content=content(text="3+4="), max_tokens=3),
        messages.DecodeRequest(
            token_content=messages.DecodeRequest.TokenContent(token_ids=TOKENIZER.encode("?")),
            max_tokens=BUDGET,
        ),
    )
    wanted = [expected[prompt] for prompt in PROMPTS] + [expected["3+4="][:3], expected["?"]]
    assert [ids for _, ids in answers] == wanted
    assert answers[-1][0] == ""  # a client that sends ids decodes by itself
    assert driver.live is False


# --- the server ------------------------------------------------------------------------------


def test_text_is_streamed_and_joins_to_the_whole(server, expected):
    for prompt, ids in expected.items():
        text, answered = server.client.ask(prompt, BUDGET)
        assert answered == ids
        assert text == TOKENIZER.decode(ids)
    pieces = [r.stream_content.samples[0].text for r in server.client.stream("Tell me!", BUDGET)]
    assert sum(piece != "" for piece in pieces) >= 8


def test_ids_are_answered_by_ids_alone(server, expected):
    for prompt in PROMPTS:
        text, ids = server.client.ask(TOKENIZER.encode(prompt), BUDGET)
        assert (text, ids) == ("", expected[prompt])


@pytest.mark.parametrize("max_tokens", [1, 2, 23, 24])
def test_a_response_has_no_more_than_max_tokens(server, expected, max_tokens):
    assert server.client.ask("3+4=", max_tokens)[1] == expected["3+4="][:max_tokens]


def test_thirty_two_at_once_are_answered_as_each_alone(server, expected):
    asked = [(PROMPTS[i % len(PROMPTS)], 1 + (5 * i) % BUDGET) for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda request: server.client.ask(*request), asked))
    for (prompt, budget), (text, ids) in zip(asked, answers, strict=True):
        assert ids == expected[prompt][:budget]
        assert text == TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "text_content.text has 0 tokens: must have from 1 to 20"),
        ("x" * 21, {}, "text_content.text has 21 tokens: must have from 1 to 20"),
        ([], {}, "token_content.token_ids has 0 tokens: must have from 1 to 20"),
        ([7, 257], {}, "token_content.token_ids[1] = 257: must be from 0 to 256"),
        ([-1, 7], {}, "token_content.token_ids[0] = -1: must be from 0 to 256"),
        ("x", {"max_tokens": 0}, "max_tokens = 0: must be from 1 to 24"),
        ("x", {"max_tokens": -3}, "max_tokens = -3: must be from 1 to 24"),
        ("x", {"max_tokens": 25}, "max_tokens = 25: must be from 1 to 24"),
        ("x", {"session_cache": "here"}, "session_cache = 'here': must be empty; none is kept"),
        (None, {}, "content is missing: must be text_content or token_content"),
    ],
)
def test_a_bad_request_is_refused_by_field_value_and_allowed(server, prompt, fields, message):
    fields = {"max_tokens": 5} | fields
    if prompt is None:
        call = server.client.stub.Decode(messages.DecodeRequest(**fields))
    else:
        call = server.client.stream(prompt, **fields)
    assert code_and_details(call) == (grpc.StatusCode.INVALID_ARGUMENT, message)


def test_the_longest_prompt_is_answered_whole(server):
    ids = TOKENIZER.encode("0123456789abcdefghij")
    wanted = greedy_loop(make_byte_params(), ids, 4, BYTES_DECODER, END)
    assert server.client.ask("0123456789abcdefghij", 4)[1] == wanted
    assert server.client.ask(ids, 4)[1] == wanted


def test_health_and_metrics_are_jetstreams(server, metrics_port):
    assert server.client.is_live()
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as page:
        text = page.read().decode()
    assert "jetstream_prefill_backlog_size{" in text
    assert "jetstream_slots_available_percentage{" in text


def test_only_this_machine_is_listened_to(server, metrics_port):
    others = [a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for address in {a for a in others if not a.startswith("127.")}:
        with pytest.raises(OSError):
            socket.create_connection((address, metrics_port), timeout=2)
        with pytest.raises(OSError):
            socket.create_connection((address, server.client.port), timeout=2)


def test_a_taken_port_is_named(server, folder, same_engine):
    port = server.client.port
    with pytest.raises(ConfigError, match=f"'127.0.0.1:{port}': must be an address.*free"):
        with serving(make_serve_config(folder, port=port)):
            pass


def test_sampled_responses_differ_and_a_seed_repeats_them(folder, same_engine, monkeypatch):
    monkeypatch.setattr(same_engine, "rule", same_engine.rule._replace(temperature=1.0))
    runs = []
    for _ in range(2):
        monkeypatch.setattr(same_engine, "_served", iter(range(99)))
        with serving(make_serve_config(folder)) as server:
            runs.append([server.client.ask("3+4=", 12)[1] for _ in range(6)])
    assert runs[0] == runs[1]
    assert len(set(map(tuple, runs[0]))) >= 5


def test_too_many_requests_are_refused_and_the_others_answered(folder, same_engine, expected):
    config = make_serve_config(folder, waiting=2)
    with serving(config) as server, ThreadPoolExecutor(64) as pool:

        def ask(_):
            try:
                return server.client.ask("3+4=", BUDGET)[1]
            except grpc.RpcError as error:
                return error.code()

        answers = list(pool.map(ask, range(64)))
    refused = answers.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert refused > 0
    assert answers.count(expected["3+4="]) == 64 - refused >= config.slots


def slow_down(engine, monkeypatch, gate: threading.Event) -> None:
    """Decoding goes on only while the gate is open."""
    original = engine.generate

    def generate(*args):
        gate.wait(30)
        return original(*args)

    monkeypatch.setattr(engine, "generate", generate)


def test_a_cancelled_request_gives_its_slot_back(folder, same_engine, expected, monkeypatch):
    gate = threading.Event()
    slow_down(same_engine, monkeypatch, gate)
    steps = []
    generate = same_engine.generate
    monkeypatch.setattr(same_engine, "generate", lambda *a: steps.append(1) or generate(*a))
    with serving(make_serve_config(folder)) as server:
        calls = [server.client.stream("3+4=", BUDGET) for _ in range(same_engine._slots)]
        while not steps:
            threading.Event().wait(0.01)
        for call in calls:
            call.cancel()
        threading.Event().wait(0.3)
        gate.set()
        assert server.client.ask("a", BUDGET)[1] == expected["a"]
        assert len(steps) < BUDGET  # nobody waited for 24 tokens that nobody reads


def test_running_requests_are_finished_when_the_server_is_asked_to_leave(
    folder, same_engine, expected, monkeypatch
):
    gate = threading.Event()
    slow_down(same_engine, monkeypatch, gate)
    with serving(make_serve_config(folder)) as server, ThreadPoolExecutor(8) as pool:
        answer = pool.submit(server.client.ask, "3+4=", BUDGET)
        threading.Event().wait(0.3)
        server.stop(wait=False)
        threading.Event().wait(0.5)
        code, _ = code_and_details(server.client.stream("a", BUDGET))
        assert code == grpc.StatusCode.UNAVAILABLE
        gate.set()
        assert answer.result()[1] == expected["3+4="]
        server.join()
    assert server.error is None


def test_requests_that_take_too_long_are_cancelled_when_the_server_leaves(
    folder, same_engine, monkeypatch
):
    gate = threading.Event()
    slow_down(same_engine, monkeypatch, gate)
    with serving(make_serve_config(folder, shutdown_seconds=0.2)) as server:
        call = server.client.stream("3+4=", BUDGET)
        threading.Event().wait(0.3)
        server.stop(wait=False)
        code, _ = code_and_details(call)
        assert code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
        gate.set()
        server.join()
    assert server.error is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("call", ["prefill", "insert", "generate"])
def test_clients_are_told_when_a_thread_of_jetstream_fails(folder, same_engine, monkeypatch, call):
    monkeypatch.setattr(serve, "warm_up", lambda *args: None)
    with serving(make_serve_config(folder)) as server:
        assert server.client.is_live()

        def fail(*args, **options):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(same_engine, call, fail)
        code, details = code_and_details(server.client.stream("3+4=", BUDGET))
        assert code == grpc.StatusCode.INTERNAL
        assert "JetStream's thread" in details and "has failed" in details
        server.join()
    assert isinstance(server.error, serve.ServingFailed)


# --- text ------------------------------------------------------------------------------------


def test_streamed_text_equals_the_decoded_whole():
    rng = np.random.default_rng(0)
    characters = list("a ñ你🙂\ufffdé\n")
    for number in range(400):
        if number % 2:
            ids = rng.integers(0, 257, 30).tolist()
        else:
            whole = TOKENIZER.encode("".join(rng.choice(characters, 12)))
            ids = whole[: rng.integers(1, len(whole) + 1)]
        stream, pieces, rest = TextStream(TOKENIZER), [], list(ids)
        while rest:
            count = int(rng.integers(1, 4))
            pieces.append(stream.add(rest[:count]))
            rest = rest[count:]
        assert "".join(pieces) + stream.rest() == TOKENIZER.decode(ids)


def test_a_character_is_shown_once_it_is_complete():
    stream = TextStream(TOKENIZER)
    pieces = [stream.add([i]) for i in TOKENIZER.encode("a你!")]
    assert pieces == ["a", "", "", "你", "!"]
