"""launch/download.py against a hub that is served here."""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from row_files import read_table

SCRIPT = pathlib.Path(__file__).parents[2] / "launch/download.py"
FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 100, "pytorch_model.bin": b"no"}
REPOS = {"a/model": FILES, "a/closed": FILES, "a/torch": {"pytorch_model.bin": b"no"}}
REPOS["datasets/a/sums"] = {"main/train-0.parquet": b"rows"}
TOKEN = "hf_of_a_test"


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download of a snapshot asks for."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        for name, files in REPOS.items():
            if name == "a/closed" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                continue
            kind = "" if name.startswith("datasets/") else "models/"
            if path.startswith(f"/api/{kind}{name}/"):
                rows = [
                    {"type": "file", "path": f, "rfilename": f, "size": len(c), "oid": "0" * 40}
                    for f, c in files.items()
                ]
                info = {"id": name, "sha": "1" * 40, "siblings": rows}
                return self.answer(json.dumps(rows if "/tree/" in path else info).encode())
            file = path.removeprefix(f"/{name}/resolve/{'1' * 40}/")
            if file in files:
                return self.answer(files[file])
        self.answer(b"", self.server.refusal)

    do_HEAD = do_GET

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(content)),
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": "1" * 40,
            "X-Error-Code": "RepoNotFound" if status == 404 else "",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.refusal = [], 404
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def download(hub, folder: pathlib.Path, *flags: str, token: str = "") -> tuple[int, str]:
    """Exit code and output of the script, which becomes a command that prints its arguments."""
    (folder / "token").write_text(token)
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "2",
        "HF_TOKEN_PATH": str(folder / "token"),
    }
    environment.pop("HF_TOKEN", None)
    command = [sys.executable, SCRIPT, *flags, "--", "echo", "trainer", "--config=x"]
    options = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, cwd=folder, env=environment, **options)
    return done.returncode, done.stdout + done.stderr


def test_model_and_data_are_downloaded_once_and_the_command_is_told(hub, tmp_path):
    flags = "--model=a/model", "--data=a/sums"
    code, output = download(hub, tmp_path, *flags)
    assert code == 0 and "trainer --config=x --config.model.folder=models/model" in output, output
    folder = tmp_path / "models/model"
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (folder / "pytorch_model.bin").exists()
    assert (tmp_path / "data/sums/main/train-0.parquet").read_bytes() == b"rows"
    hub.asked.clear()
    assert download(hub, tmp_path, *flags)[0] == 0
    assert not [path for path in hub.asked if path.endswith(".safetensors")]


def test_the_token_opens_what_is_closed_and_is_gone_afterwards(hub, tmp_path):
    code, output = download(hub, tmp_path, "--model=a/closed", token=TOKEN)
    assert code == 0 and "--config.model.folder=models/closed" in output, output
    assert TOKEN not in output and not (tmp_path / "token").exists()


@pytest.mark.parametrize(("name", "refusal", "code", "text"), read_table(__file__, "refusals"))
def test_a_refusal_is_final_and_a_hub_that_is_down_is_not(hub, tmp_path, name, refusal, code, text):
    hub.refusal = refusal
    got, output = download(hub, tmp_path, f"--model={name}")
    assert got == code and text in output and "trainer" not in output, output
    assert not (tmp_path / "token").exists()
