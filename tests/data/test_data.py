"""The embedded task and the order of its prompts."""

import numpy as np
import pytest
from conftest import heldout_prompts

from dapo_jax.config.experiment import Data, Examples
from dapo_jax.data import arithmetic
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.verifier.verifier import final_number

TOKENIZER = arithmetic_tokenizer()


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
        right += final_number(worked, str(eval(text[:-1]) % 10), None)[0]
    assert 0.4 < right / 500 < 0.7


def test_worked_examples_without_errors_are_all_right_and_never_ramble():
    for i in range(300):
        text, worked = arithmetic.make_worked_example(0, i, Examples(errors=False, max_terms=6))
        assert final_number(worked, str(eval(text[:-1]) % 10), None)[0]
        assert "again" not in worked and worked.count("=") == text.count("+")


def test_every_character_of_the_task_survives_the_tokenizer():
    for i in range(100):
        for text in arithmetic.make_worked_example(0, i, Examples(max_terms=12)):
            assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_each_pass_has_every_problem_once_in_a_new_order():
    prompts = stream(train_problems=50)
    passes = [[next(prompts).id for _ in range(50)] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1]


def test_a_long_prompt_keeps_its_end_when_truncated():
    prompts = stream(min_terms=8, max_terms=8, max_prompt_tokens=6)
    whole = stream(min_terms=8, max_terms=8, max_prompt_tokens=99)
    for _ in range(5):
        cut, full = next(prompts), next(whole)
        np.testing.assert_array_equal(cut.tokens, full.tokens[-6:])
        assert cut.truncated and not full.truncated and cut.problem == full.text
    assert prompts.position == 5  # none was skipped


def test_a_long_prompt_is_dropped_when_so_configured():
    settings = dict(min_terms=3, max_terms=8, overlong_prompts="drop", max_prompt_tokens=8)
    prompts = stream(**settings)
    taken = [next(prompts) for _ in range(20)]
    assert all(len(prompt.tokens) <= 8 for prompt in taken)
    assert prompts.position == taken[-1].index + 1 == 20 + sum(p.skipped for p in taken) > 20
    assert all(len(p.tokens) <= 8 for p in heldout_prompts(Data(**settings), 3, TOKENIZER))


def test_data_without_any_short_prompt_is_an_error_not_an_endless_loop():
    prompts = stream(train_problems=10, overlong_prompts="drop", max_prompt_tokens=2)
    with pytest.raises(ValueError, match="max_prompt_tokens = 2"):
        next(prompts)
