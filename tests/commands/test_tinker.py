"""Tinker's API as the published SDK speaks it, and wrong, hostile and interrupted requests."""

import contextlib
import dataclasses
import functools
import http.client
import importlib
import importlib.metadata
import json
import random
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from row_files import read_table
from small_runs import ROOT
from tinker_served import NAME, SDK, TinkerServer, as_bytes, loss_message, tinker_serving

from dapo_jax.config.experiment import ExportConfig
from dapo_jax.extras.serve.fields import RequestError
from dapo_jax.extras.serve.logprobs import Scorer
from dapo_jax.extras.serve.policy import load_served
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.extras.tinker import store as stores
from dapo_jax.extras.tinker.messages import pb
from dapo_jax.extras.tinker.models import Operations
from dapo_jax.extras.tinker.store import Request, State, Store
from dapo_jax.run.export import export
from dapo_jax.types.errors import ConfigError

tinker = pytest.importorskip("tinker")
types = pytest.importorskip("tinker.types")

WORDS = [list(b"3+4=7."), list(b"Tell me!"), list(b"one, two, three")]
# Rank and Adam of the loop in the docs: its programs are compiled for all tests.
RANK = 8
ADAM = types.AdamParams(learning_rate=1e-2, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)
PROMPT = types.ModelInput.from_ints(WORDS[1])
KEY = "tml-secret"


@pytest.fixture(scope="module")
def server(byte_folder, tmp_path_factory):
    state = tmp_path_factory.mktemp("tinker") / "state"
    with tinker_serving(byte_folder, state, KEY) as server:
        server.state = state
        yield server


@pytest.fixture
def connect(server, monkeypatch):
    """Make clients, which would tell of failed heartbeats for minutes if they were left open."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    clients = []

    def make() -> "tinker.ServiceClient":
        clients.append(tinker.ServiceClient(base_url=server.url))
        return clients[-1]

    yield make
    for client in clients:
        client.close("success").result(60)


@pytest.fixture
def client(connect):
    return connect()


@pytest.fixture(scope="module")
def session(server):
    return server.create_session()


def datum(ids: list[int], **inputs) -> "types.Datum":
    inputs = {"target_tokens": ids[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


DATA = [datum(ids, weights=[1.0] * (len(ids) - 1)) for ids in WORDS]


def tokens_of(result) -> list[tuple[list[int], list[float]]]:
    return [(list(s.tokens), list(s.logprobs)) for s in result.sequences]


def train(model, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = model.forward_backward(DATA, "cross_entropy")
        stepped = model.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["skipped_updates"] == 0
    return losses


def test_a_model_is_trained_saved_loaded_and_sampled(client):
    model = client.create_lora_training_client(base_model=NAME, rank=RANK, seed=3).result()
    info = model.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == (NAME, RANK, True)
    losses = train(model, 6)
    assert losses[-1] < 0.7 * losses[0]
    path = model.save_state("six", user_metadata={"a": "b"}).result().path
    assert path == f"tinker://{model.model_id}/weights/six"
    # With the optimizer's state, the next steps are the same to the last bit.
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    weights = client.create_training_client_from_state(path).result()
    ahead, same, fresh = (train(other, 2) for other in (model, resumed, weights))
    assert ahead == same and ahead[0] == fresh[0] and ahead[1] != fresh[1]
    named = model.save_weights_for_sampler("eight").result().path
    sampler = client.create_sampling_client(model_path=named).result()
    params = types.SamplingParams(max_tokens=8, seed=5, top_k=20)
    unnamed = model.save_weights_and_get_sampling_client().result()
    results = [s.sample(PROMPT, 6, params).result() for s in (sampler, sampler, unnamed)]
    first, second, third = map(tokens_of, results)
    assert first == second == third and len({tuple(ids) for ids, _ in first}) > 1
    for ids, logprobs in first:
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(WORDS[1] + ids)).result()
        np.testing.assert_allclose(scored[len(WORDS[1]) :], logprobs, rtol=0, atol=1e-4)


def test_lists_and_descriptions(client):
    model = client.create_lora_training_client(base_model=NAME, rank=2, train_mlp=False).result()
    path = model.save_state("first", ttl_seconds=7200).result().path
    with pytest.raises(tinker.TinkerError, match="a new name; weights may also overwrite"):
        model.save_state("first").result()
    model.save_state("first", ttl_seconds=7200, overwrite=True).result()
    rest = client.create_rest_client()
    about = rest.get_weights_info_by_tinker_path(path).result()
    assert (about.lora_rank, about.train_attn, about.train_mlp) == (2, True, False)
    run = rest.get_training_run(model.model_id).result()
    assert run.last_checkpoint.tinker_path == path and run.last_checkpoint.expires_at is not None
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in listed] == [path]
    assert model.model_id in {
        r.training_run_id for r in rest.list_training_runs().result().training_runs
    }
    (supported,) = rest.get_server_capabilities().result().supported_models
    assert supported.model_name == NAME and supported.max_context_length == 96
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not rest.list_checkpoints(model.model_id).result().checkpoints


@pytest.mark.slow
def test_adapters_are_in_the_format_of_peft_and_merge(client, server, byte_folder):
    from safetensors.numpy import load_file

    model = client.create_lora_training_client(base_model=NAME, rank=4).result()
    train(model, 1)
    path = model.save_weights_for_sampler("peft").result().path
    folder = server.state / "checkpoints" / path.removeprefix("tinker://")
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {file.name for file in folder.iterdir()} - names == {".dapo_jax.json"}
    shapes = {array.shape for array in load_file(folder / "adapter_model.safetensors").values()}
    assert all(4 in shape for shape in shapes)
    # Merged by `dapo-jax export`, it is a model folder for `dapo-jax serve`, and scores the same.
    out = server.state.parent / "merged"
    settings = ExportConfig(run=str(folder), model=str(byte_folder), out=str(out))
    for wrong, message in {"model": "", "weights": "adapter"}.items():
        with pytest.raises(ConfigError, match=f"config.{wrong} = '{message}': must be"):
            export(dataclasses.replace(settings, **{wrong: message}))
    export(settings)
    merged = load_served(ServeConfig(model=str(out), slots=8, max_prompt_tokens=64))
    scores = Scorer(merged.engine.config).score(merged.params, WORDS[2], 0)
    sampler = client.create_sampling_client(model_path=path).result()
    theirs = sampler.compute_logprobs(types.ModelInput.from_ints(WORDS[2])).result()
    ours = [score.logprob for score in scores[1:]]
    np.testing.assert_allclose(theirs[1:], ours, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_full_parameters_are_trained_and_sampled(client):
    full = client.create_lora_training_client(base_model=NAME, rank=0).result()
    assert full.get_info().is_lora is False
    losses = train(full, 3)
    assert losses[-1] < losses[0]
    sampler = full.save_weights_and_get_sampling_client().result()
    greedy = types.SamplingParams(max_tokens=4, temperature=0)
    (sequence,) = sampler.sample(PROMPT, 1, greedy).result().sequences
    ids = types.ModelInput.from_ints(WORDS[1] + list(sequence.tokens))
    scored = sampler.compute_logprobs(ids).result()[len(WORDS[1]) :]
    np.testing.assert_allclose(scored, sequence.logprobs, rtol=0, atol=1e-4)


def test_samples_end_where_they_are_asked_to(client):
    sampler = client.create_sampling_client(base_model=NAME).result()

    def sample(**options):
        options = {"max_tokens": 24, "seed": 1} | options
        return sampler.sample(PROMPT, 4, types.SamplingParams(**options)).result().sequences

    endless = sample(stop=[])
    assert {len(s.tokens) for s in endless} == {24}
    assert {s.stop_reason for s in endless} == {"length"}
    token = int(endless[0].tokens[3])
    for before, after in zip(endless, sample(stop=[token]), strict=True):
        ids = list(before.tokens)
        ends = [at for at, i in enumerate(ids) if i in (token, 256)]
        assert list(after.tokens) == (ids[: ends[0] + 1] if ends else ids)
        assert after.stop_reason == ("stop" if ends else "length")
    result = sampler.sample(
        PROMPT,
        1,
        types.SamplingParams(max_tokens=2),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        prompt_logprobs_last_n=4,
    ).result()
    assert [value is None for value in result.prompt_logprobs] == [True] * 4 + [False] * 4
    tops = result.topk_prompt_logprobs
    assert tops[:4] == [None] * 4 and all(len(row) == 3 for row in tops[4:])


def play(client, seed: int, steps: int, turns=lambda: None) -> list:
    """The results of a tenant's calls; `turns` is called between two of them."""
    model = client.create_lora_training_client(base_model=NAME, rank=2 + 2 * (seed % 2), seed=seed)
    model = model.result()
    seen = []
    for step in range(steps):
        data = [DATA[(seed + step) % 3], DATA[step % 3]]
        turns()
        passed = model.forward_backward(data, "cross_entropy")
        stepped = model.optim_step(ADAM)
        seen.append([o["logprobs"].data for o in passed.result().loss_fn_outputs])
        seen.append(stepped.result().metrics)
        if step % 3 == 2:
            turns()
            sampler = model.save_weights_and_get_sampling_client().result()
            drawn = sampler.sample(PROMPT, 3, types.SamplingParams(max_tokens=6)).result()
            seen.append(tokens_of(drawn))
    return seen


def pause(chance: random.Random) -> None:
    time.sleep(chance.random() / 5)


@pytest.mark.slow
def test_fifty_interleavings_of_two_tenants(connect):
    """They wait at random between their calls."""
    alone = [play(connect(), seed, 3) for seed in range(2)]
    for number in range(50):
        chance = random.Random(number)
        calls = [(connect(), seed, 3, functools.partial(pause, chance)) for seed in range(2)]
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda call: play(*call), calls)) == alone, number


@pytest.mark.slow
def test_a_killed_server_answers_for_all_that_it_acknowledged(byte_folder, tmp_path, kills=3):
    """Raw requests, since the SDK hides the order of acknowledgements."""
    server = TinkerServer(byte_folder, tmp_path / "state")
    try:
        expected = run_calls(server, [])
        chance = random.Random(kills)
        results = run_calls(server, sorted(chance.sample(range(1, CALLS), kills)))
        assert results == expected
    finally:
        server.kill()


CALLS = 12


def run_calls(server: TinkerServer, kills: list[int]) -> list:
    """Send requests without waiting, kill the server before some, and return all results."""
    model = server.create_model(server.create_session(), 0, rank=4, seed=1)
    futures = []
    for call in range(1, CALLS):
        if call in kills:
            server.kill()
            server.start()
        body = {"model_id": model, "seq_id": call}
        if call % 4 == 0:
            sent = ("save_weights_for_sampler", body | {"sampling_session_seq_id": call})
        elif call % 2 == 0:
            sent = ("optim_step", body | {"adam_params": {"learning_rate": 0.01}})
        else:
            data = [(ids[:-1], {"target_tokens": ids[1:]}) for ids in WORDS]
            sent = ("forward_backward", loss_message(model, call, data))
        for _ in range(2):  # a retry of the client is done once
            status, future = server.post(*sent)
            assert status == 200, future
        futures.append(future["request_id"])
    results = [server.result(future) for future in futures]
    sampler = results[3]["sampling_session_id"]
    ask = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2}
    chunk = {"type": "encoded_text", "tokens": WORDS[0]}
    ask |= {"prompt": {"chunks": [chunk]}, "sampling_params": {"max_tokens": 6}}
    _, future = server.post("asample", ask)
    if kills:
        server.kill()
        server.start()
    results.append(server.result(future["request_id"]))
    return [r if isinstance(r, bytes) else without_names(r) for r in results]


def without_names(result: dict) -> dict:
    """The session's name is random."""
    return {key: re.sub("s-[0-9a-f]{16}", "", str(value)) for key, value in result.items()}


def test_the_loop_of_the_docs_runs(server, byte_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    page = (ROOT / "docs/tinker.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(code.splitlines()) <= 60
    script = tmp_path / "loop.py"
    script.write_text(code)
    command = [sys.executable, str(script), server.url, NAME]
    command += [str(byte_folder / "tokenizer.json"), "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step 1" in done.stdout


def test_a_key_is_asked_for(server):
    """By this server, from all the tests' clients."""
    for key in ("tml-other", ""):
        status, answer = server.post("client/config", SDK, x_api_key=key)
        assert status == 401 and "key is missing or wrong" in answer["error"]["message"]
    assert server.post("client/config", SDK)[0] == 200


def test_a_custom_loss_is_a_gradient_of_the_logprobs(client):
    """The SDK differentiates the client's loss, and sends weights of cross_entropy."""
    pytest.importorskip("torch")

    def custom(data, logprobs):
        return -sum(values.sum() for values in logprobs), {"own": 1.0}

    models = [
        client.create_lora_training_client(base_model=NAME, rank=RANK, seed=1) for _ in range(2)
    ]
    plain, own = (model.result() for model in models)
    passed = own.forward_backward_custom(DATA, custom)
    steps = [own.optim_step(ADAM).result().metrics]
    assert passed.result().metrics["own"] == 1.0
    plain.forward_backward(DATA, "cross_entropy")
    steps.append(plain.optim_step(ADAM).result().metrics)
    assert steps[0] == steps[1]
    assert train(own, 1) == train(plain, 1)


# --- wrong and hostile requests -------------------------------------------------------------------

TOKENS = [1, 2, 3, 4]
POLICY = {"target_tokens": TOKENS, "logprobs": [-1.0] * 4, "advantages": [1.0] * 4}


@pytest.fixture(scope="module")
def names(server, session):
    """The words of the table that stand for what the server named."""
    body = {"session_id": session, "sampling_session_seq_id": 900, "base_model": NAME}
    sampler = server.post("create_sampling_session", body)[1]["sampling_session_id"]
    model = server.create_model(session, 0, rank=RANK)
    return {"SESSION": session, "MODEL": model, "SAMPLER": sampler}


def test_a_wrong_body_is_an_error_that_names_the_field(server, names):
    for path, body, status, message in read_table(__file__, "bodies"):
        body = body if isinstance(body, str) else json.dumps(body)
        for name, value in names.items():
            body = body.replace(name, value)
        answered, answer = server.post(path, body.encode())
        assert answered == int(status) and message in answer["error"]["message"], (body, answer)


def wrong_losses(model: str, number: int) -> dict[str, bytes]:
    """Bodies of forward_backward that are messages but wrong, by a part of the error."""

    def of(tokens=TOKENS, inputs=POLICY, loss="ppo", **options) -> bytes:
        return loss_message(model, number, [(tokens, inputs)], loss, **options)

    def changed(**inputs) -> bytes:
        return of(inputs=POLICY | inputs)

    image, sparse, shape, dtype = (
        pb.ForwardBackwardRequest.FromString(of(loss="cross_entropy")) for _ in range(4)
    )
    for message in (image, sparse, shape, dtype):
        del message.data[0].loss_fn_inputs["logprobs"], message.data[0].loss_fn_inputs["advantages"]
    image.data[0].model_input[0].ClearField("encoded_text")
    image.data[0].model_input[0].image.data = b"png"
    tensor = sparse.data[0].loss_fn_inputs["target_tokens"]
    tensor.sparse_csr.values = as_bytes([1], "<i8")
    tensor.sparse_csr.crow_indices = as_bytes([0, 5, 1, 1, 1], "<i8")
    tensor.sparse_csr.col_indices = as_bytes([9], "<i8")
    del tensor.shape[:]
    tensor.shape.extend([4, 2])
    shape.data[0].loss_fn_inputs["target_tokens"].shape[:] = [2**40]
    dtype.data[0].loss_fn_inputs["target_tokens"].dtype = 7
    return {
        "loss_fn = 'stable_reinforce': must be one of": of(loss="stable_reinforce"),
        "loss_fn_config.beta = 1.0: must be left out": of(beta=1.0),
        "loss_fn_config.clip_low_threshold = nan": of(clip_low_threshold=float("nan")),
        "data = []: must be one or more": loss_message(model, number, [], "ppo"),
        "data[0].model_input has 0 tokens": of(tokens=[]),
        "data[0].model_input has 97 tokens: must have from 1 to 96": of(tokens=[1] * 97),
        "data[0].model_input[3] = 288: must be from 0 to 287": of(tokens=[1, 2, 3, 288]),
        "data[0].model_input[3] = -1: must be": of(tokens=[1, 2, 3, -1]),
        "= 'image': must be encoded_text": image.SerializeToString(),
        "target_tokens = '...': must be whole numbers": changed(target_tokens=[1, 2, 3, 288]),
        "logprobs.shape = (3,)": changed(logprobs=[-1.0] * 3),
        "loss_fn_inputs.logprobs = '...': must be finite": changed(logprobs=[float("nan")] * 4),
        "advantages = '...': must be finite": changed(advantages=[float("inf")] * 4),
        "loss_fn_inputs.weights = '...': must be left out": changed(weights=[1.0] * 4),
        "loss_fn_inputs.logprobs is missing": of(inputs={"target_tokens": TOKENS}),
        "sequence_ratio_mask is missing": of(loss="gspo"),
        "target_tokens.sparse_csr: ": sparse.SerializeToString(),
        "target_tokens.shape = (1099511627776,)": shape.SerializeToString(),
        "dtype = 7: must be float32 or int64": dtype.SerializeToString(),
    }


def test_wrong_data_fail_in_order_and_the_model_stays_as_it_was(server, session):
    model = server.create_model(session, 1, rank=RANK)
    good = [(TOKENS, {"target_tokens": TOKENS})]

    def pass_forward(number: int) -> bytes:
        body = loss_message(model, number, good, forward_only=True)
        return server.run("forward_backward", body)

    before, wrong = pass_forward(1), wrong_losses(model, 0)
    for number, message in enumerate(wrong, start=2):
        answer = server.run("forward_backward", wrong_losses(model, number)[message])
        assert answer["category"] == "user" and message in answer["error"], answer
    last = 2 + len(wrong)
    for adam, error in ({"beta1": 1.5}, "adam_params.beta1 = 1.5"), ({}, "there is no gradient"):
        body = {"model_id": model, "seq_id": last, "adam_params": adam}
        assert error in server.run("optim_step", body)["error"]
        last += 1
    assert before == pass_forward(last)


def test_a_server_reads_the_messages_alone_and_names_a_package_that_it_lacks(monkeypatch):
    monkeypatch.delitem(sys.modules, "dapo_jax.extras.tinker.messages")
    error = "config.tinker = True: needs pip install 'tinker==0.38"
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=error):
        patch.setattr(sys, "path", [])
        importlib.import_module("dapo_jax.extras.tinker.messages")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=error):
        patch.setattr(importlib.metadata.Distribution, "version", "0.39.0")
        importlib.import_module("dapo_jax.extras.tinker.messages")
    monkeypatch.setitem(sys.modules, "tinker", None)  # an import of the SDK would fail
    importlib.import_module("dapo_jax.extras.tinker.messages")


def test_half_requests_and_too_large_ones_leave_no_trace(server, names):
    head = b"POST /api/v1/asample HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head)
    status, answer = server.post("forward_backward", b"x", content_length="2000000")
    assert status == 413 and "the body is too large" in answer["error"]["message"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    path = f"/api/v1/training_runs/{names['MODEL']}"
    connection.request("GET", path, headers={"Host": "evil.example"})
    assert connection.getresponse().status == 403


# --- what is kept on the disk ---------------------------------------------------------------------


def request(owner: str, number: int, kind: str = "optim_step") -> Request:
    return Request(f"{owner}:{number}", owner, number, kind)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.close()


def test_requests_are_stored_once_wait_for_a_result_and_survive_a_new_start(store, tmp_path):
    for number in (3, 1, 2, 1):
        store.accept(request("a", number), str(len(store.pending())).encode())
    assert [r.number for r in store.pending()] == [3, 1, 2] and store.last_number("a") == -1
    store.finish(request("a", 2), State.ANSWERED, b"{}")
    with contextlib.closing(Store(tmp_path)) as again:
        assert [r.number for r in again.pending()] == [3, 1] and again.last_number("a") == 2
        assert again.body(request("a", 1)) == b"1" and again.result("x") is None
        assert again.result("a:1") == (State.PENDING, None)


def test_changes_replay_until_the_file_has_them(store):
    kinds = ["create_model", "forward_backward", "forward", "optim_step", "optim_step"]
    for number, kind in enumerate(kinds):
        store.accept(request("m", number, kind), b"body")
        failed = number == 3
        store.finish(request("m", number, kind), State.FAILED if failed else State.DONE, b"")
    assert [r.number for r in store.changes("m", -1)] == [0, 1, 4]
    store.forget_bodies("m", 1)
    assert [r.number for r in store.changes("m", 1)] == [4]
    assert store.last_number("m") == 4 and store.last_number("other") == -1


def test_old_results_and_expired_checkpoints_are_removed(store, monkeypatch):
    for number in range(2):
        store.accept(request("m", number), b"")
    store.finish(request("m", 0), State.DONE, b"result")
    path = "tinker://m/weights/old"
    store.put("checkpoint", path, {"expires": time.time() + 10}, "m")
    store.checkpoint_folder(path).mkdir(parents=True)
    store.tidy()
    assert store.get("checkpoint", path) is not None
    assert store.result("m:0") == (State.DONE, b"result")
    later = time.time() + stores.RESULT_SECONDS + 20
    monkeypatch.setattr(time, "time", lambda: later)
    store.tidy()
    assert store.result("m:0") == (State.DONE, None)
    assert store.result("m:1") == (State.PENDING, None)
    assert store.get("checkpoint", path) is None and not store.checkpoint_folder(path).exists()


def test_requests_that_fail_keep_no_more_models_in_memory(store, monkeypatch):
    operations = Operations(SimpleNamespace(config=SimpleNamespace(tinker_models=1)), store)
    model = SimpleNamespace(gradient=None, unsaved=0)
    monkeypatch.setattr(operations, "_open", lambda owner: model)
    for owner in "abc":
        store.accept(request(owner, 1), b"{}")
        with pytest.raises(RequestError, match="there is no gradient"):
            operations.run(request(owner, 1))
        assert list(operations._models) == [owner]
