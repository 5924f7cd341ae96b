"""A cloud for the tests of launch/: stubs that work in a folder and record their calls."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
STUBS = ROOT / "tests/launch/stubs"
AT = ("--name=dapo", "--zone=us-east5-b")
JOBSET = "run --name=big --image=host/p/dapo:1 --type=v5p --topology=4x4x4 --slices=2".split()
# The stubs' `python3`: one that pyenv stands before takes ten times as long to start.
INTERPRETER = pathlib.Path(sys.executable).resolve().parent


def make_checkout(folder: pathlib.Path) -> pathlib.Path:
    """Make a repository of launch/ alone, which is small to pack."""
    git = f"git -C {folder} -c user.name=a -c user.email=a@b"
    line = f"cp -r {ROOT}/launch {ROOT}/setup.py {folder} && {git} init -q && {git} add . && "
    subprocess.run(line + f"{git} commit -qm a", shell=True, check=True)
    return folder


class Cloud:
    """A folder in which the stubs work, and what they recorded there."""

    def __init__(self, folder: pathlib.Path, checkout: pathlib.Path):
        self.folder = folder
        self.python = "none"  # that checks the trainer's arguments
        self.tree = shutil.copytree(checkout, folder / "checkout")
        self.plays()

    def plays(self, **scenario: object) -> None:
        text = json.dumps({"workers": 2} | scenario)
        (self.folder / "scenario.json").write_text(text)

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "STUB": str(self.folder),
            "PATH": f"{STUBS}:{INTERPRETER}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.folder / "state"),
            "DAPO_LAUNCH_POLL_SECONDS": "0.1",
            "DAPO_LAUNCH_SAVE_SECONDS": "2",
            "DAPO_LAUNCH_PYTHON": self.python,
        }

    def start(self, *words: str, script: str = "tpu_vm.sh", path: str = "", **options):
        """Start a script; what is in the folder `path` is found first."""
        line = ["bash", f"launch/{script}", *words]
        environment = self.environment() | {"STUB_WORKER": "0", "HOME": str(self.folder)}
        if path:
            environment["PATH"] = f"{path}:{environment['PATH']}"
        options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True} | options
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(line, cwd=self.tree, env=environment, **pipes, **options)

    def call(self, *words: str, expect: int = 0, **options: str) -> str:
        return output_of(self.start(*words, **options), expect)

    def does(self, action: str, *words: str, expect: int = 0) -> str:
        return self.call(action, *AT, *words, expect=expect)

    def runs(self, *words: str, expect: int = 0, folder: str = "gs://b/r") -> str:
        trainer = ["--", "--config=x", f"--config.run_dir={folder}"]
        return self.does("run", "--yes", *words, *trainer, expect=expect)

    def _lines(self, name: str) -> list:
        path = self.folder / name
        return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []

    def calls(self, *verb: str) -> list[list[str]]:
        calls = [[w for w in line if w != "alpha"][2:] for line in self._lines("calls.jsonl")]
        return [call for call in calls if call[: len(verb)] == list(verb)]

    def kubectl(self, verb: str) -> list[list[str]]:
        return [call for _, *call in self._lines("kubectl.jsonl") if call[0] == verb]

    def made(self) -> bool:
        """Return True if a machine or a JobSet was created, or something installed."""
        created = self.calls("tpu-vm", "create") or self.kubectl("create")
        return bool(created) or (self.folder / "pip.log").exists()

    def starts(self, worker: int = 0) -> list[dict]:
        return [start for start in self._lines("starts.jsonl") if start["worker"] == worker]

    def exists(self) -> bool:
        return (self.folder / "node.json").exists()

    def is_training(self) -> bool:
        mine = f"STUB={self.folder}\0".encode()
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_trainer = b"train.py" in (process / "cmdline").read_bytes()
                if is_trainer and mine in (process / "environ").read_bytes():
                    return True
        return False


def output_of(process: subprocess.Popen, expect: int = 0) -> str:
    """Return what a process prints until it ends. Fail if the exit code is another."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == expect, output
    return output


def wait_for(what) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)
