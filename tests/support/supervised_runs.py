"""Rows and settings of small supervised runs."""

import json
import pathlib

from conftest import check_documented
from row_files import write_lines

from dapo_jax.config.experiment import Mesh, Optimizer, Packing
from dapo_jax.extras.sft.settings import OwnData

SUMS = [(a, b) for a in range(8) for b in range(8)]


def settings(path: pathlib.Path, rows: list[dict], folder, **changes) -> dict:
    """Of a run of seconds on one device."""
    return {
        "out": str(path / "out"),
        "start": str(folder),
        "data": OwnData(write_lines(path / "own.jsonl", rows), heldout_examples=8, passes=4.0),
        "optimizer": Optimizer(learning_rate=3e-3, warmup_steps=2),
        "packing": Packing(row_tokens=32, rows_per_microbatch=16),
        "mesh": Mesh(1, 1, 1),
    } | changes


def read_metrics(out) -> list[dict]:
    rows = [json.loads(line) for line in (pathlib.Path(out) / "metrics.jsonl").open()]
    check_documented(name for row in rows for name in row)
    return rows


def answer(a: int, b: int, wrong: int = 0) -> str:
    return f"{a}+{b}={(a + b + wrong) % 10}#### {(a + b + wrong) % 10}"


def example_rows() -> list[dict]:
    return [{"prompt": f"{a}+{b}=", "response": answer(a, b)} for a, b in SUMS]


def pair_rows() -> list[dict]:
    return [
        {"prompt": f"{a}+{b}=", "chosen": answer(a, b), "rejected": answer(a, b, wrong=1)}
        for a, b in SUMS
    ]
