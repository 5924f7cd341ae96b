"""`dapo-jax serve` as a user runs it."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from row_files import read_table
from served import free_port, make_openai
from small_runs import ROOT

from dapo_jax.config.experiment import Examples, Mesh, Optimizer, Packing
from dapo_jax.data.arithmetic import make_problem
from dapo_jax.extras.sft.settings import Architecture, SftConfig
from dapo_jax.extras.sft.training import train_supervised


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "dapo_jax", "serve", *flags]


@pytest.mark.parametrize(("flag", "message"), read_table(__file__, "settings"))
def test_a_wrong_setting_is_one_line(flag, message, monkeypatch, capsys):
    from dapo_jax.extras.serve import server

    monkeypatch.setattr(sys, "argv", ["serve", *["--model=x"] * ("--model" not in flag), flag])
    try:
        code = server.main()
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and len(error.splitlines()) == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A policy that adds two or three digits without mistakes."""
    return train_supervised(
        SftConfig(
            out=str(tmp_path_factory.mktemp("trained")),
            total_steps=500,
            architecture=Architecture(layers=2, embed=64, heads=4, kv_heads=2, head_dim=16),
            examples=Examples(errors=False, min_terms=2, max_terms=3),
            max_response_tokens=24,
            optimizer=Optimizer(learning_rate=5e-3, warmup_steps=5, schedule="cosine"),
            packing=Packing(row_tokens=64, rows_per_microbatch=32),
            mesh=Mesh(data=8, fsdp=1, tensor=1),
        )
    )


@pytest.mark.slow
def test_a_trained_policy_answers_thirty_two_clients_rightly_and_leaves_on_sigterm(trained):
    http_port = free_port()
    flags = [f"--model={trained}", "--slots=8", "--max_response_tokens=24"]
    flags += [f"--http_port={http_port}", "--served_name=sums"]
    process = subprocess.Popen(
        command(*flags, "--temperature=0"), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert f":{http_port}/v1" in process.stdout.readline()
        ask = make_openai(http_port).completions.create
        problems = [make_problem("heldout", 0, i, 2, 3) for i in range(32)]
        with ThreadPoolExecutor(32) as pool:
            replies = pool.map(lambda p: ask(model="sums", prompt=p.text), problems)
            answers = [reply.choices[0].text for reply in replies]
        results = [answer.rpartition("#### ")[2] for answer in answers]
        assert results == [problem.answer for problem in problems]
        texts = [problem.text for problem in problems]
        again = ask(model="sums", prompt=texts)
        assert [choice.text for choice in again.choices] == answers
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
