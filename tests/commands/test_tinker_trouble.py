"""Wrong, hostile and very many requests to Tinker's API; these tests need no SDK."""

import http.client
import json
import socket

import pytest
from row_files import read_table
from tinker_served import NAME, SDK, TinkerServer, as_bytes, loss_message

from dapo_jax.extras.tinker.messages import MESSAGES

TOKENS = [1, 2, 3, 4]
POLICY = {"target_tokens": TOKENS, "logprobs": [-1.0] * 4, "advantages": [1.0] * 4}


@pytest.fixture(scope="module")
def server(byte_folder, tmp_path_factory):
    server = TinkerServer(byte_folder, tmp_path_factory.mktemp("tinker") / "state")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def session(server):
    _, answer = server.post("create_session", {"tags": [], "user_metadata": None, **SDK})
    return answer["session_id"]


@pytest.fixture(scope="module")
def model(server, session):
    return create(server, session, 0, rank=2)


@pytest.fixture(scope="module")
def sampler(server, session):
    body = {"session_id": session, "sampling_session_seq_id": 900, "base_model": NAME}
    return server.post("create_sampling_session", body)[1]["sampling_session_id"]


def create(server: TinkerServer, session: str, number: int, **lora) -> str:
    body = {"session_id": session, "model_seq_id": number, "base_model": NAME}
    status, future = server.post("create_model", body | {"lora_config": lora})
    assert status == 200, future
    return server.result(future["request_id"])["model_id"]


@pytest.mark.parametrize(("path", "body", "status", "message"), read_table(__file__, "bodies"))
def test_a_wrong_body_is_an_error_that_names_the_field(
    path, body, status, message, server, session, model, sampler
):
    body = body if isinstance(body, str) else json.dumps(body)
    for name, value in {"SESSION": session, "MODEL": model, "SAMPLER": sampler}.items():
        body = body.replace(name, value)
    answered, answer = server.post(path, body.encode())
    assert answered == int(status), answer
    assert message in answer["error"]["message"]


def wrong_losses(model: str, number: int) -> dict[str, bytes]:
    """Bodies of forward_backward that are messages but wrong, by a part of the error."""

    def of(tokens=TOKENS, inputs=POLICY, loss="ppo", **options) -> bytes:
        return loss_message(model, number, [(tokens, inputs)], loss, **options)

    def changed(**inputs) -> bytes:
        return of(inputs=POLICY | inputs)

    image, sparse, shape, dtype = (
        MESSAGES["ForwardBackwardRequest"].FromString(of(loss="cross_entropy")) for _ in range(4)
    )
    for message in (image, sparse, shape, dtype):
        del message.data[0].loss_fn_inputs[1:]
    image.data[0].model_input[0].ClearField("encoded_text")
    image.data[0].model_input[0].image = b"png"
    tensor = sparse.data[0].loss_fn_inputs[0].value
    tensor.sparse_csr.values = as_bytes([1], "<i8")
    tensor.sparse_csr.crow_indices = as_bytes([0, 5, 1, 1, 1], "<i8")
    tensor.sparse_csr.col_indices = as_bytes([9], "<i8")
    del tensor.shape[:]
    tensor.shape.extend([4, 2])
    shape.data[0].loss_fn_inputs[0].value.shape[:] = [2**40]
    dtype.data[0].loss_fn_inputs[0].value.dtype = 7
    return {
        "loss_fn = 'stable_reinforce': must be one of": of(loss="stable_reinforce"),
        "loss_fn_config.beta = 1.0: must be left out": of(beta=1.0),
        "loss_fn_config.clip_low_threshold = nan": of(clip_low_threshold=float("nan")),
        "data = []: must be one or more": loss_message(model, number, [], "ppo"),
        "data[0].model_input has 0 tokens": of(tokens=[]),
        "data[0].model_input has 97 tokens: must have 1 to 96": of(tokens=[1] * 97),
        "data[0].model_input has token 288": of(tokens=[1, 2, 3, 288]),
        "data[0].model_input has token -1": of(tokens=[1, 2, 3, -1]),
        "= 'an image': must be tokens": image.SerializeToString(),
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
    model = create(server, session, 1, rank=2)
    good = [(TOKENS, {"target_tokens": TOKENS})]

    def send(number: int, body: bytes):
        status, future = server.post("forward_backward", body)
        assert status == 200, future
        return server.result(future["request_id"])

    before = send(1, loss_message(model, 1, good, forward_only=True))
    wrong = wrong_losses(model, 0)
    for number, message in enumerate(wrong, start=2):
        answer = send(number, wrong_losses(model, number)[message])
        assert answer["category"] == "user" and message in answer["error"], answer
    last = 2 + len(wrong)
    body = {"model_id": model, "seq_id": last, "adam_params": {"beta1": 1.5}}
    _, future = server.post("optim_step", body)
    assert "adam_params.beta1 = 1.5" in server.result(future["request_id"])["error"]
    body = {"model_id": model, "seq_id": last + 1, "adam_params": {}}
    _, future = server.post("optim_step", body)
    assert "there is no gradient" in server.result(future["request_id"])["error"]
    after = send(last + 2, loss_message(model, last + 2, good, forward_only=True))
    assert before == after


def test_half_requests_and_too_large_ones_leave_no_trace(server, model):
    send_half(server)
    status, answer = server.post("forward_backward", b"x", content_length="2000000")
    assert status == 413 and "the body is too large" in answer["error"]["message"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", f"/api/v1/training_runs/{model}", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 403


def send_half(server: TinkerServer) -> None:
    head = b"POST /api/v1/asample HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head)
