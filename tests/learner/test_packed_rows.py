"""Rows of `packing.row_tokens=auto`: as long as a batch fills best, and the same update."""

import pytest
from conftest import make_completion, make_prompt

from dapo_jax.commands import checks, command_line
from dapo_jax.config.experiment import Config, DpoConfig, Packing, SftConfig
from dapo_jax.learner.packing import Segment, choose_rows, fill, pack_updates
from dapo_jax.runtime.settings import ConfigError

PROMPT = make_prompt(0, [3, 4, 5, 6])
SHORTEST = Packing(row_tokens=100, rows_per_microbatch=8)
FREE = {"shards": 2, "longest": 10_000, "attention_tokens": 1e9}


def segments(lengths) -> list[Segment]:
    """Prompts and responses of so many tokens in all."""
    return [
        Segment(PROMPT, make_completion([7] * (length - len(PROMPT.tokens))), i)
        for i, length in enumerate(lengths)
    ]


def places(updates, packing: Packing) -> int:
    """That updates in such rows compute."""
    _, used = pack_updates(updates, packing)
    return sum(used) * packing.rows_per_microbatch * packing.row_tokens


def test_responses_over_half_a_row_get_longer_rows():
    updates = [segments([60 + i % 5 for i in range(96)])]
    actual = choose_rows(updates, SHORTEST, **FREE)
    assert actual.row_tokens > 100 and actual.rows_per_microbatch % 2 == 0
    assert actual.row_tokens * actual.rows_per_microbatch <= 800
    assert places(updates, actual) < 0.75 * places(updates, SHORTEST)


def test_a_last_microbatch_that_is_nearly_empty_is_halved():
    long = Packing(row_tokens=600, rows_per_microbatch=8)
    updates = [segments([600] * 9)]
    actual = choose_rows(updates, long, **FREE)
    assert actual == Packing(row_tokens=600, rows_per_microbatch=4)
    assert places(updates, actual) == 12 * 600 < places(updates, long)


def test_no_row_is_longer_than_attention_allows():
    updates = [segments([60] * 96)]
    assert choose_rows(updates, SHORTEST, **FREE | {"longest": 100}) == SHORTEST
    assert choose_rows(updates, SHORTEST, **FREE | {"longest": 250}).row_tokens == 200
    # Where attention is most of the work, padding is cheaper than longer rows.
    assert choose_rows(updates, SHORTEST, **FREE | {"attention_tokens": 10.0}) == SHORTEST


def test_an_empty_batch_takes_the_shortest_rows():
    assert choose_rows([[]], SHORTEST, **FREE) == SHORTEST


def test_fill_counts_what_microbatches_compute():
    rollouts, used = pack_updates([segments([50, 50, 30]), segments([9])], Packing(100, 2))
    assert used == [1, 1] and fill(rollouts, used) == pytest.approx(139 / 400)


@pytest.mark.parametrize(
    "arguments",
    [["--config.packing.row_tokens=auto"], ["--config.packing.row_tokens", "auto"]],
    ids=["one word", "two"],
)
def test_auto_is_a_value_on_the_command_line(arguments):
    config = command_line.override(Config(), arguments)
    assert config.packing.row_tokens == -1
    longest = config.data.max_prompt_tokens + config.sampler.max_response_tokens
    assert longest <= config.rows().row_tokens < longest + 128
    assert config.rows().row_tokens % 128 == 0 or longest <= 512


def test_other_settings_and_examples_reject_auto():
    with pytest.raises(ConfigError, match="seed = 'auto'"):
        command_line.override(Config(), ["--config.seed=auto"])
    for kind in SftConfig, DpoConfig:
        config = command_line.override(kind(), ["--config.packing.row_tokens=auto"])
        config.data.source, config.start = "own.jsonl", "somewhere"
        with pytest.raises(ConfigError, match="packing.row_tokens = -1: must be above 0"):
            checks.check(config)
