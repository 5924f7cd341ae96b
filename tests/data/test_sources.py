"""Sources mixed by weight; what is held out; one order for all; pass rates; made-up arithmetic."""

import dataclasses
import importlib.metadata
import itertools
import json
import pathlib
import sys
import types

import numpy as np
import pytest
from conftest import heldout_prompts
from responses import respond
from row_files import read_table, write_lines

from dapo_jax.config.experiment import Data, Examples
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.sources import Sources, parse_range, parse_sources, read_problems
from dapo_jax.extras import arithmetic, gym
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.rewards.spelling import final_number
from dapo_jax.run.evaluate import rate_problems
from dapo_jax.types.errors import ConfigError

TOKENIZER = arithmetic_tokenizer()


@pytest.fixture
def settings(tmp_path):
    """Data settings over a folder with `one` of 40 problems and `two_train` and `two_test`."""

    def write(name: str, texts: list[str]) -> None:
        rows = [{"problem": text, "answer": text.split()[-1][-1]} for text in texts]
        write_lines(tmp_path / name, rows)

    write("one.jsonl", [f"{i}+{i}" for i in range(40)])
    write("two_train.jsonl", [f"{i}+0" for i in range(10)])
    write("two_test.jsonl", [" 1+0", "3+3 ", "5+5", "9+9+9"])

    def make(source: str, **settings) -> Data:
        return Data(source=source, folder=str(tmp_path), **{"heldout_problems": 8} | settings)

    make.write = write
    return make


def read(data: Data, count: int, seed: int = 0, start: int = 0) -> list:
    stream = PromptStream(data, seed, TOKENIZER)
    stream.position = start
    return list(itertools.islice(stream, count))


def test_sources_are_names_or_paths_with_weights():
    assert parse_sources("data.source", "arithmetic") == {"arithmetic": 1.0}
    text = " a/b.parquet=0.8, gym:chain_sum , gs://x/date=2024/y=2, gym:t?a=1&b=2, gym:t?a=1=0.5"
    found = {"a/b.parquet": 0.8, "gym:chain_sum": 1.0, "gs://x/date=2024/y": 2.0}
    found |= {"gym:t?a=1&b=2": 1.0, "gym:t?a=1": 0.5}
    assert parse_sources("data.source", text) == found
    assert parse_sources("data.source", "gs://x/date=2024/y") == {"gs://x/date=2024/y": 1.0}
    for text in ("", "a,", "a,a=2", "a=0", "a=-1", "a=nan", "a=inf", "=1"):
        with pytest.raises(ConfigError, match="config.data.source = "):
            parse_sources("data.source", text)


def test_sources_are_mixed_in_proportion_and_each_is_gone_through_whole(settings):
    data = settings("one=3,two=1,arithmetic=0.5", heldout_problems=9, train_problems=100)
    prompts = read(data, 9 * 40)
    by_source = {name: [p for p in prompts if p.source == name] for name in ("one", "two")}
    assert {name: len(found) for name, found in by_source.items()} == {"one": 240, "two": 80}
    for prompts in by_source.values():  # in whole passes, each in an order of its own
        size = len({p.id for p in prompts})
        first, second = ([p.id for p in prompts[i : i + size]] for i in (0, size))
        assert sorted(first) == sorted(second) and first != second and len(set(first)) == size


def test_the_mixed_order_depends_on_seed_and_position_and_counts_what_it_skips(settings):
    data = settings("one=3,two=1,arithmetic=0.5")
    assert [p.index for p in read(data, 60)] == list(range(60))
    data = settings("one=3,two=1", overlong_prompts="drop", max_prompt_tokens=4)
    whole = read(data, 60)
    assert [p.id for p in read(data, 60, seed=1)] != [p.id for p in whole]
    cut = whole[7].index + 1
    assert [p.id for p in read(data, 10, start=cut)] == [p.id for p in whole[8:18]]
    assert sum(p.skipped for p in whole) == whole[-1].index + 1 - 60 > 0


def test_heldout_problems_of_a_file_do_not_depend_on_seed_or_order(settings):
    data = settings("one")
    first, again = (heldout_prompts(data, seed, TOKENIZER) for seed in (0, 1))
    assert len(first) == 8 and [p.id for p in first] == [p.id for p in again]
    assert [p.index for p in first] == list(range(8)) and first[0].id.startswith("one-")
    by_path = heldout_prompts(settings(f"{data.folder}/one.jsonl"), 0, TOKENIZER)
    assert [p.id for p in by_path] == [p.id for p in first]
    held = {p.problem for p in first}
    assert not held & {p.problem for p in read(data, 100)}
    settings.write("turned.jsonl", [f"{i}+{i}" for i in reversed(range(40))])
    turned = heldout_prompts(settings("turned"), 0, TOKENIZER)
    assert {p.problem for p in turned} == held


def test_nothing_of_a_heldout_source_is_trained_on(settings):
    data = settings("one,two", heldout_source="two")
    held = heldout_prompts(data, 0, TOKENIZER)
    assert [p.problem.strip() for p in held] == ["1+0", "3+3", "5+5", "9+9+9"]  # the whole file
    stream = PromptStream(data, 0, TOKENIZER)
    trained = {next(stream).problem for _ in range(100)}
    assert len(trained) == 40 + 10 - 4 and not trained & {"1+0", "3+3", "5+5"}
    counts = [source.counts for source in stream.sources]
    assert [count["held out"] for count in counts] == [2, 1]
    assert counts[1]["repeats"] == 1  # 0+0 is in the first source
    one, two = (text for text in stream.warnings() if "left out" in text)
    assert "one: 2 problems are left out: held-out ones have the same text: one-4 '3+3', " in one
    assert "two: 1 problems are left out: held-out ones have the same text: two-2 '1+0'" in two


def test_held_out_texts_differ_by_runs_of_blanks_alone(settings):
    settings.write(
        "train.jsonl", ["Sort 12 3 4", "Sort 1 2 34", "Sort 1  23\n4 ", "Write b", "x=1"]
    )
    settings.write("test.jsonl", ["Sort 1 23 4", "Write B", "X=1", "$x=1$"])
    sources = Sources(settings("train.jsonl", heldout_source="test.jsonl"), 0)
    texts = {problem.fingerprint for source in sources.heldout() for problem in source.problems}
    (source,) = sources.training(texts)
    kept = ["Sort 12 3 4", "Sort 1 2 34", "Write b", "x=1"]
    assert [problem.text for problem in source.problems] == kept and source.counts["held out"] == 1
    assert (
        "1 problems are left out: held-out ones have the same text: train-3" in source.messages[0]
    )


@pytest.mark.parametrize(
    ("texts", "count", "held"), [(5, -1, 8), (1, -1, 0), (5, 9, 8), (40, 7, 7)]
)
def test_rows_with_the_same_text_are_held_out_together(settings, texts, count, held):
    rows = [{"problem": f"{i % texts}+0", "answer": "0", "target": i} for i in range(40)]
    write_lines(pathlib.Path(settings("one").folder, "tasks.jsonl"), rows)
    stream = PromptStream(settings("tasks", heldout_problems=count), 0, TOKENIZER)
    heldout = stream.heldout_prompts()
    assert len(heldout) == held and len(stream.sources[0].problems) == 40 - held
    trained = {next(stream).problem for _ in range(200)}
    assert not trained & {prompt.problem for prompt in heldout}
    assert not [text for text in stream.warnings() if "left out" in text]


def test_generated_problems_that_are_held_out_are_skipped(settings):
    data = settings("arithmetic", min_terms=2, max_terms=2, heldout_problems=30)
    settings.write("sums.jsonl", [f" {i}+{j}=" for i in range(10) for j in range(4)])
    prompts = read(settings("arithmetic", min_terms=2, max_terms=2, heldout_source="sums"), 200)
    assert all(int(p.problem[2]) >= 4 for p in prompts) and sum(p.skipped for p in prompts) > 100
    assert not any(p.skipped for p in read(data, 200))  # its own held-out split is disjoint


@pytest.mark.parametrize(("source", "more", "message"), read_table(__file__, "impossible"))
def test_impossible_sources_stop_before_the_run(settings, source, more, message):
    settings.write("empty.jsonl", [])
    with pytest.raises(ConfigError, match=message):
        PromptStream(settings(source, **more), 0, TOKENIZER)


@pytest.mark.parametrize(("source", "more", "held"), read_table(__file__, "small"))
def test_a_small_file_is_not_all_held_out(settings, source, more, held):
    settings.write("many.jsonl", [f"{i}+{i}" for i in range(100, 1380)])
    settings.write("few.jsonl", ["1+1", "2+2"])
    stream = PromptStream(settings(source, **{"heldout_problems": -1} | more), 0, TOKENIZER)
    assert stream.describe().endswith(f". Held out: {held}")
    held = {prompt.problem for prompt in stream.heldout_prompts()}
    assert not held & {next(stream).problem for _ in range(100)}


@pytest.mark.parametrize(("source", "more", "message"), read_table(__file__, "unreadable"))
def test_a_file_that_can_not_be_read_says_what_is_in_it(settings, source, more, message):
    folder = pathlib.Path(settings("one").folder)
    write_lines(folder / "odd.jsonl", [{"text": "1+1", "label": "2"}] * 20)
    rows = [{"problem": text, "answer": ""} for text in ("1+1", "2+2")]
    write_lines(folder / "unsolved.jsonl", rows)
    with pytest.raises(ConfigError, match=message) as stopped:
        PromptStream(settings(source, **more), 0, TOKENIZER)
    assert "\n" not in str(stopped.value) and "data.fields" in str(stopped.value)


def make_fake_gym(monkeypatch) -> None:
    """A package of one task: numbers, scored by their distance."""

    class Numbers:
        category = "counting"

        def __init__(self, seed: int = 0, size: int = 5):
            self._seed = seed

        def __getitem__(self, index: int) -> dict:
            number = (self._seed + index) % 7
            return {"question": f"{number}?", "answer": str(number), "metadata": {"at": (number,)}}

        def score_answer(self, answer: str, entry: dict) -> float:
            return float(entry["metadata"]["at"] == (int(answer),)) or 0.1

    def create_dataset(name: str, **settings) -> Numbers:
        if name != "numbers":
            raise ValueError(f"Dataset {name!r} not registered")
        return Numbers(**settings)

    factory = types.SimpleNamespace(create_dataset=create_dataset, DATASETS={"numbers": Numbers})
    package = types.SimpleNamespace(factory=factory)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: gym.RELEASE)


def test_gym_tasks_bring_problems_and_their_own_score(monkeypatch, settings):
    make_fake_gym(monkeypatch)
    data = settings("gym:numbers", heldout_problems=2, train_problems=50)
    prompts = read(data, 40)
    heldout = heldout_prompts(data, 0, TOKENIZER)
    assert [p.id for p in heldout] == [
        "gym:numbers-50",
        "gym:numbers-51",
    ]  # after those of training
    held = {p.problem for p in heldout}
    assert len(held) == 2 and len({p.problem for p in prompts}) == 5
    assert not held & {p.problem for p in prompts} and sum(p.skipped for p in prompts) > 0
    prompt = prompts[0]
    assert (prompt.source, prompt.subject) == ("gym:numbers", "counting")
    assert gym.score("numbers", prompt.metadata, prompt.answer) == 1.0
    assert gym.score("numbers", prompt.metadata, "8") == 0.1
    assert gym.score("numbers", prompt.metadata, None) == 0.0
    with pytest.raises(ConfigError, match="data.source = 'gym:letters': .*not registered.*numbers"):
        PromptStream(settings("gym:letters"), 0, TOKENIZER)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'reasoning-gym=="):
        PromptStream(settings("gym:leg_counting"), 0, TOKENIZER)


# --- a range of pass rates ----------------------------------------------------------------------


@pytest.fixture
def data(tmp_path) -> Data:
    """Settings with ten problems, of which problem i was solved i times in nine."""
    rows = [{"problem": f"{i} + {i}?", "answer": str(2 * i)} for i in range(10)]
    source = write_lines(tmp_path / "mine.jsonl", rows)
    problems = read_problems((source,), "other", 0).problems
    responses = [
        respond(i, j, j < i, digest=problems[i].digest) for i in range(9) for j in range(9)
    ]
    responses.append(dataclasses.replace(responses[0], failure="crash"))
    (tmp_path / "rates.jsonl").write_text(rate_problems(responses))
    return Data(
        source=source,
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


def test_equal_texts_with_other_answers_have_their_own_rates(tmp_path):
    rows = [("1+1+2=", "4"), ("1+ 1+2=", "9"), ("1+1+2=", "5")]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"problem": p, "answer": a}) for p, a in rows))
    prompts = heldout_prompts(Data(heldout_source=str(path), max_prompt_tokens=9), 0, TOKENIZER)
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


def test_a_wrong_range_or_one_without_problems_or_rates_is_rejected(data, tmp_path):
    for text in ("0.1", "0.9..0.1", "-1..1", "0..2", "a..b", "0.1..0.5..0.9"):
        with pytest.raises(ConfigError, match=r"data.difficulty = .*LOW..HIGH"):
            parse_range(text)
    with pytest.raises(ConfigError, match="none of 10 is in it"):
        Sources(dataclasses.replace(data, difficulty="0.34..0.35"), 0).training(set())
    with pytest.raises(ConfigError, match="empty with arithmetic"):
        Sources(dataclasses.replace(data, source="arithmetic"), 0).training(set())
    for path in (str(tmp_path / "no.jsonl"), data.source, ""):
        with pytest.raises(ConfigError, match="difficulty_file = .*--write_difficulty=FILE"):
            Sources(dataclasses.replace(data, difficulty_file=path), 0)


# --- the arithmetic of the tests -----------------------------------------------------------------


def stream(**settings) -> PromptStream:
    return PromptStream(Data(**settings), seed=3, tokenizer=TOKENIZER)


def test_no_heldout_problem_is_trained_on():
    make = arithmetic.make_problem
    train = {make("train", 0, i, 2, 4).text for i in range(3000)}
    heldout = {make("heldout", 0, i, 2, 4).text for i in range(1000)}
    assert not train & heldout


def test_worked_examples_end_in_their_own_last_result_and_are_often_wrong():
    right = 0
    for i in range(500):
        text, worked = arithmetic.make_worked_example(0, i, Examples(max_terms=12))
        last = worked.split("####")[0].split("=")[-1]
        assert worked.endswith(f"#### {last}")
        right += final_number(worked, str(eval(text[:-1]) % 10), "").correct
    assert 0.4 < right / 500 < 0.7


def test_a_long_prompt_keeps_its_end_when_truncated():
    prompts = stream(min_terms=8, max_terms=8, max_prompt_tokens=6)
    whole = stream(min_terms=8, max_terms=8, max_prompt_tokens=99)
    for _ in range(5):
        cut, full = next(prompts), next(whole)
        np.testing.assert_array_equal(cut.tokens, full.tokens[-6:])
        assert cut.truncated and not full.truncated and cut.problem == full.text
    assert prompts.position == 5  # none was skipped


def test_data_without_any_short_prompt_is_an_error_not_an_endless_loop():
    prompts = stream(train_problems=10, overlong_prompts="drop", max_prompt_tokens=2)
    with pytest.raises(ValueError, match="max_prompt_tokens = 2"):
        next(prompts)
