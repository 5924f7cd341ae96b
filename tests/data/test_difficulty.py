"""A range of pass rates: which problems of a file are trained on, and files that give none."""

import dataclasses
import json

import pytest

from dapo_jax.config.experiment import Data
from dapo_jax.data.difficulty import parse_range
from dapo_jax.data.sources import Sources
from dapo_jax.reporting.scores import Response
from dapo_jax.run.evaluation import rate_problems
from dapo_jax.runtime.settings import ConfigError


@pytest.fixture
def data(tmp_path) -> Data:
    """Settings with ten problems, of which problem i was solved i times in nine."""
    rows = [{"problem": f"{i} + {i}?", "answer": str(2 * i)} for i in range(10)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {"question": "Q: template", "answer": "", "response": "", "extracted": None}
    common |= {"truncated": False, "tokens": 1, "logprob": 0.0}
    responses = [
        Response(f"mine-{i}", i, j, correct=j < i, reflection=False, repetition=0.0, **common)
        for i in range(9)
        for j in range(9)
    ]
    failed = dataclasses.replace(responses[0], failure="crash")
    # Blanks differ from the file's: problems are compared as everywhere.
    texts = {i: f"{i}+{i}?" for i in range(10)}
    (tmp_path / "rates.jsonl").write_text(rate_problems([*responses, failed], texts))
    return Data(
        source=str(tmp_path / "mine.jsonl"),
        heldout_problems=0,
        difficulty="0.3..0.8",
        difficulty_file=str(tmp_path / "rates.jsonl"),
    )


def test_problems_within_the_range_are_left(data):
    (source,) = Sources(data, 0).training(set())
    assert [problem.answer for problem in source.problems] == ["6", "8", "10", "12", "14"]
    assert source.counts["outside data.difficulty"] == 5  # problem 9 was not measured
    (source,) = Sources(dataclasses.replace(data, difficulty=""), 0).training(set())
    assert len(source.problems) == 10


def test_a_rate_has_its_samples_and_interval(data):
    with open(data.difficulty_file) as file:
        rows = [json.loads(line) for line in file]
    assert rows[3]["problem"] == "mine-3" and rows[3]["samples"] == 9
    assert rows[3]["low"] < rows[3]["pass_rate"] == 1 / 3 < rows[3]["high"]
    assert rows[0]["samples"] == 9 and rows[0]["low"] == 0 < rows[0]["high"]


@pytest.mark.parametrize("text", ["0.1", "0.9..0.1", "-1..1", "0..2", "a..b", "0.1..0.5..0.9"])
def test_a_wrong_range_names_the_setting(text):
    with pytest.raises(ConfigError, match=r"data.difficulty = .*LOW..HIGH"):
        parse_range(text)


def test_a_range_without_problems_or_rates_is_rejected(data, tmp_path):
    with pytest.raises(ConfigError, match="none of 10 is in it"):
        Sources(dataclasses.replace(data, difficulty="0.34..0.35"), 0).training(set())
    with pytest.raises(ConfigError, match="empty with arithmetic"):
        Sources(dataclasses.replace(data, source="arithmetic"), 0).training(set())
    for path in (str(tmp_path / "no.jsonl"), data.source, ""):
        with pytest.raises(ConfigError, match="difficulty_file = .*--write_difficulty=FILE"):
            Sources(dataclasses.replace(data, difficulty_file=path), 0)
