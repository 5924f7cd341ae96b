"""A range of pass rates: which problems of a file are trained on, and files that give none."""

import dataclasses
import json

import pytest
from conftest import heldout_prompts
from responses import respond

from dapo_jax.config.experiment import Data
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.data.sources import Sources, parse_range, read_problems
from dapo_jax.run.evaluate import rate_problems
from dapo_jax.types.errors import ConfigError


@pytest.fixture
def data(tmp_path) -> Data:
    """Settings with ten problems, of which problem i was solved i times in nine."""
    rows = [{"problem": f"{i} + {i}?", "answer": str(2 * i)} for i in range(10)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = read_problems((str(tmp_path / "mine.jsonl"),), "other", 0).problems
    responses = [
        respond(i, j, j < i, digest=problems[i].digest) for i in range(9) for j in range(9)
    ]
    responses.append(dataclasses.replace(responses[0], failure="crash"))
    (tmp_path / "rates.jsonl").write_text(rate_problems(responses))
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


@pytest.mark.parametrize("text", ["0.1", "0.9..0.1", "-1..1", "0..2", "a..b", "0.1..0.5..0.9"])
def test_a_wrong_range_names_the_setting(text):
    with pytest.raises(ConfigError, match=r"data.difficulty = .*LOW..HIGH"):
        parse_range(text)


def test_equal_texts_with_other_answers_have_their_own_rates(tmp_path):
    rows = [("1+1+2=", "4"), ("1+ 1+2=", "9"), ("1+1+2=", "5")]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"problem": p, "answer": a}) for p, a in rows))
    prompts = heldout_prompts(
        Data(heldout_source=str(path), max_prompt_tokens=9), 0, arithmetic_tokenizer()
    )
    responses = [
        respond(p.index, j, p.index == 1, digest=p.digest) for p in prompts for j in (0, 1)
    ]
    rates = [json.loads(line) for line in rate_problems(responses).splitlines()]
    assert [(rate["samples"], rate["pass_rate"]) for rate in rates] == [(2, 0), (2, 1), (2, 0)]
    (tmp_path / "rates.jsonl").write_text(rate_problems(responses))
    copy = (tmp_path / "copy.jsonl").with_suffix(".json")
    copy.write_text(json.dumps([json.loads(line) for line in path.read_text().splitlines()][::-1]))
    data = Data(source=str(copy), heldout_problems=0, difficulty="0.5..1")
    data.difficulty_file = str(tmp_path / "rates.jsonl")
    (source,) = Sources(data, 0).training(set())
    assert [problem.answer for problem in source.problems] == ["9"]


def test_a_range_without_problems_or_rates_is_rejected(data, tmp_path):
    with pytest.raises(ConfigError, match="none of 10 is in it"):
        Sources(dataclasses.replace(data, difficulty="0.34..0.35"), 0).training(set())
    with pytest.raises(ConfigError, match="empty with arithmetic"):
        Sources(dataclasses.replace(data, source="arithmetic"), 0).training(set())
    for path in (str(tmp_path / "no.jsonl"), data.source, ""):
        with pytest.raises(ConfigError, match="difficulty_file = .*--write_difficulty=FILE"):
            Sources(dataclasses.replace(data, difficulty_file=path), 0)
