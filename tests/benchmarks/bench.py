"""Command lines, runs and tables of the benchmarks."""

import argparse
import contextlib
import io
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))  # of the tests
BASE, SFT, RL = (f"configs/arithmetic{name}.py" for name in ("_base", "_sft", ""))


def read_arguments(description: str | None, *, others: bool = False, **defaults: Any) -> Any:
    """Return the command line's values of the named arguments.

    The type of a default is the type of the argument: False makes a switch, a list takes several
    values. With `others`, all other arguments are returned too, as a list.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, list):
            parser.add_argument(f"--{name}", type=type(default[0]), nargs="+", default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_known_args() if others else parser.parse_args()


def print_table(heads: Sequence[str]) -> None:
    """Print the head of a Markdown table."""
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")


def print_row(cells: Iterable[object]) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def json_lines(command: list[str], **options: Any) -> list[dict]:
    """Return the JSON lines that a command prints. Exit if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{command}\nfailed:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def sample(sampler: Any, params: Any, prompts: Iterable[Any], samples: int, step: int = 0) -> list:
    """Sample so many responses to each prompt; return the groups in the order of their end."""
    from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
    from dapo_jax.types.structs import RolloutKey, SamplingRule

    sampler.begin(params, RolloutKey(SAMPLE_FOR_TRAINING, step), SamplingRule())
    for prompt in prompts:
        sampler.submit(prompt, samples)
    groups = []
    while not sampler.idle:
        groups += sampler.step()
    return groups


def flags(settings: str) -> list[str]:
    """Return settings, separated by spaces, as command-line arguments."""
    return [f"--config.{setting}" for setting in settings.split()]


def command(module: str, *arguments: object) -> str:
    """Run a command of the project in this process, which compiles once for all commands."""
    from dapo_jax.runtime import registry

    arguments_before, output = sys.argv, io.StringIO()
    # Of an argument that is given twice, the last counts here.
    given = {text.partition("=")[0]: text for text in map(str, arguments)}
    sys.argv = [f"dapo-jax {module}", *given.values()]
    print("$", *sys.argv, file=sys.stderr, flush=True)
    try:
        with contextlib.redirect_stdout(output):
            code = registry.find("commands", module)()
    finally:
        sys.argv = arguments_before
    if code:
        raise SystemExit(f"{output.getvalue()}exit code {code}: {module}")
    return output.getvalue()


def sft(folder: pathlib.Path, *arguments: object) -> pathlib.Path:
    """Return a model folder of supervised training; train it if it is missing."""
    if not folder.exists():
        command("sft", *arguments, f"--config.out={folder}")
    return folder


def train(folder: pathlib.Path, preset: str, *arguments: object) -> list[dict]:
    """Return all rows of the run in a folder; run it if it is not finished."""
    if not (folder / "summary.json").exists():
        command("train", f"--config={RL}:{preset}", f"--config.run_dir={folder}", *arguments)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluate(scores: pathlib.Path, *arguments: object) -> dict:
    """Return the metrics of a policy's evaluation, which is run if its file is missing."""
    kept = scores.with_suffix(".json")
    if not kept.exists():
        printed = command("evaluate", f"--config={RL}", f"--config.run_dir={scores}", *arguments)
        kept.write_text(printed.splitlines()[-1])
    return json.loads(kept.read_text())
