"""The learned reward: a folder with a scalar head, read at the last token of every response."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, make_completion, make_prompt
from safetensors.numpy import load_file, save_file

from dapo_jax.config.experiment import Config, Model, Packing, Reward
from dapo_jax.learner.critic import scalar_config
from dapo_jax.model.logprobs import Rows, scalars_after
from dapo_jax.rewards.group_rewards import Judge
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.run.build import load_reward_model
from dapo_jax.types.errors import ConfigError

RNG = np.random.default_rng(7)
PADDED = 24


def make_config(policy, folder) -> Config:
    return Config(
        model=Model(folder=str(policy)),
        reward=Reward(parts="rule=1,model=0.5", model_folder=str(folder)),
        packing=Packing(row_tokens=32, rows_per_microbatch=4),
    )


def make_responses(lengths):
    """Prompts and responses of random tokens; the first prompts are shared."""
    return [
        (make_prompt(i // 2, [2 + i // 2, 9, 4]), make_completion(RNG.integers(2, 20, n).tolist()))
        for i, n in enumerate(lengths)
    ]


RESPONSES = make_responses([5, 1, 0, 14, 7, 20, 3, 12, 2, 6, 8, 8])


@pytest.fixture(scope="module")
def expected(score_params):
    """Each score by a forward pass of its own: nothing packed beside it."""
    of_row = jax.jit(lambda *row: scalars_after(score_params, scalar_config(TINY), Rows(*row)))
    scores = []
    for prompt, done in RESPONSES:
        tokens = [*prompt.tokens, *done.tokens]
        row = jnp.array([tokens + [0] * (PADDED - len(tokens))])
        alone = (jnp.arange(PADDED) < len(tokens)).astype(jnp.int32)[None]
        scores.append(of_row(row, alone, jnp.arange(PADDED)[None])[0, len(tokens) - 1])
    return np.array(scores)


def test_the_folder_is_a_sequence_classifier_with_one_label(score_folder, score_params):
    settings = json.loads((score_folder / "config.json").read_text())
    assert settings["architectures"] == ["Qwen2ForSequenceClassification"]
    tensors = load_file(score_folder / "model.safetensors")
    np.testing.assert_array_equal(tensors["score.weight"], score_params["score"][None])
    assert "lm_head.weight" not in tensors


@pytest.mark.parametrize("mesh", ["one_device", "eight_devices"])
def test_a_score_is_the_head_at_the_last_token_however_responses_are_packed(
    mesh, request, tiny_folder, score_folder, expected
):
    model = load_reward_model(make_config(tiny_folder, score_folder), request.getfixturevalue(mesh))
    assert np.ptp(expected) > 1
    groups = [(prompt, [done]) for prompt, done in RESPONSES]
    scores = np.concatenate(model.score(groups))
    np.testing.assert_allclose(scores, expected, atol=2e-5)
    few = [7, 2, 5]  # one of them empty
    np.testing.assert_array_equal(
        np.concatenate(model.score([groups[i] for i in few])), scores[few]
    )
    several = [(groups[0][0], [done for _, (done,) in groups[i : i + 3]]) for i in range(0, 12, 3)]
    together = model.score(several)
    for group, values in zip(several, together, strict=True):
        np.testing.assert_array_equal(model.score([group])[0], values)  # to the last bit


def test_without_the_part_no_model_is_held(tiny_folder, one_device):
    assert load_reward_model(Config(model=Model(folder=str(tiny_folder))), one_device) is None


def test_the_judge_gives_each_group_the_scores_of_its_own_responses(
    tiny_folder, score_folder, one_device, expected
):
    config = make_config(tiny_folder, score_folder)
    model = load_reward_model(config, one_device)
    judge = Judge(config, RewardPool(config.reward), model.score)
    pairs = [RESPONSES[i : i + 2] for i in range(0, len(RESPONSES), 2)]
    pending = [judge.submit(pair[0][0], tuple(done for _, done in pair)) for pair in pairs]
    groups = judge.groups(pending[:2]) + judge.groups([]) + judge.groups(pending[2:])
    judge.close()
    actual = np.concatenate([group.reward_parts["model"] for group in groups])
    np.testing.assert_allclose(actual, 0.5 * expected, atol=2e-5)
    assert [group.prompt.index for group in groups] == list(range(6))


def rejection(policy, folder, mesh) -> str:
    with pytest.raises(ConfigError) as caught:
        load_reward_model(make_config(policy, folder), mesh)
    return str(caught.value)


def test_a_folder_without_a_head_of_one_label_is_rejected(
    tiny_folder, score_folder, one_device, tmp_path
):
    assert "score.weight: missing" in rejection(tiny_folder, tiny_folder, one_device)
    folder = tmp_path / "labels"
    shutil.copytree(score_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = np.repeat(tensors["score.weight"], 2, axis=0)
    save_file(tensors, folder / "model.safetensors")
    message = rejection(tiny_folder, folder, one_device)
    assert "score.weight: shape (2, 32), expected (1, 32)" in message


def test_a_folder_with_another_tokenizer_is_rejected(
    tiny_folder, score_folder, one_device, tmp_path
):
    folder = tmp_path / "other"
    shutil.copytree(score_folder, folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("again", "gaina"))
    message = rejection(tiny_folder, folder, one_device)
    assert message.startswith(f"config.reward.model_folder = '{folder}'")
    assert "tokenizer" in message and str(tiny_folder) in message
