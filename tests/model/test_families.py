"""Folders that `transformers` wrote: the same logits, the same greedy tokens, the same bytes back.

tests/fixtures/write_models.py made tests/fixtures/models and says what is in them.
"""

import json
import pathlib
import shutil

import numpy as np
import pytest
from families_fixtures import export, greedy_tokens, packed_logits, stored_bytes
from safetensors.numpy import load_file, save_file
from tokenizers import processors

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model import load_huggingface
from dapo_jax.model.config_json import decoder_from_json, decoder_to_json
from dapo_jax.runtime.settings import ConfigError

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures/models"
MODELS = sorted(FOLDER.iterdir())
each_model = pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)


def read_json(path):
    return json.loads(path.read_text())


@each_model
def test_logits_of_a_ragged_batch_are_those_of_transformers(folder, one_device):
    logits, used = packed_logits(folder, one_device)
    with np.load(folder / "expected.npz") as expected:
        np.testing.assert_allclose(logits[used], expected["logits"][used], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3", "llama3", "gpt_oss"])
def test_greedy_generation_is_that_of_transformers(name, one_device):
    actual, expected = greedy_tokens(FOLDER / name, one_device)
    assert actual == expected


@each_model
def test_a_folder_read_onto_eight_devices_is_written_back_bit_for_bit(
    folder, eight_devices, tmp_path, monkeypatch
):
    monkeypatch.setattr(load_huggingface, "BLOCK_BYTES", 1000)  # several blocks to a tensor
    monkeypatch.setattr(load_huggingface, "EXPERT_BYTES", 7000)  # two of four experts
    config = export(folder, tmp_path / "out", eight_devices, max_shard_gb=2e-5)
    stored = stored_bytes(folder)
    assert stored_bytes(tmp_path / "out") == stored
    index = read_json(tmp_path / "out" / load_huggingface.INDEX)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("model-*")}
    assert sizes.keys() == set(index["weight_map"].values()) and len(sizes) > 1
    largest = max(len(content) for *_, content in stored.values())
    assert max(sizes.values()) < max(2e4, largest) + 4000  # with its header
    assert load_huggingface.read_config(tmp_path / "out") == config
    for name in ("config.json", "generation_config.json"):
        assert read_json(tmp_path / "out" / name) == read_json(folder / name)


@each_model
def test_config_json_describes_the_same_decoder_when_made_from_nothing(folder):
    config = load_huggingface.read_config(folder)
    made = decoder_to_json(config)
    assert decoder_from_json(made, "made", "model.folder") == config
    original = read_json(folder / "config.json")
    for name in ("architectures", "model_type"):
        assert made[name] == original[name]


def test_a_response_ends_at_every_id_that_the_generation_settings_name(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    # Null: config.json has it.
    for value, ends in (([7, 9], (7, 9)), (5, (5,)), (None, (1,))):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert Tokenizer.from_folder(folder).end_ids == ends


def test_prompts_begin_with_what_the_tokenizer_puts_first(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    plain = Tokenizer.from_folder(folder)
    assert plain.begin_ids == [] and plain.encode_prompt("1+2=") == plain.encode("1+2=")
    plain.backend.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A <|end|>", special_tokens=[("<|pad|>", 0), ("<|end|>", 1)]
    )
    plain.backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    ids = plain.encode("1+2=")
    assert tokenizer.begin_ids == [0] and tokenizer.encode("1+2=") == ids
    assert tokenizer.encode_prompt("1+2=") == tokenizer.encode_prompt("<|pad|>1+2=") == [0, *ids]


def test_every_wrong_tensor_of_several_files_is_named_at_once(tmp_path, one_device):
    folder = shutil.copytree(FOLDER / "qwen3", tmp_path / "broken")
    first, second = sorted(folder.glob("model-*"))[:2]
    tensors, others = load_file(first), load_file(second)
    lost, repeated, cut = sorted(tensors)[0], *sorted(others)[:2]
    tensors.pop(lost)
    tensors |= {repeated: others[repeated], "model.extra": np.zeros(3, np.float32)}
    save_file(tensors, first)
    others[cut] = others[cut][:-1].astype(np.int32)
    save_file(others, second)
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"\x00" * 9)
    with pytest.raises(ConfigError) as caught:
        load_huggingface.load_params(folder, load_huggingface.read_config(folder), one_device)
    message = str(caught.value)
    for words in (
        f"{lost}: missing",
        f"{repeated}: in {first.name} and in {second.name}",
        "model.extra: unknown",
        f"{cut}: shape",
        f"{cut}: dtype I32, expected F32, BF16, F16",
        "model-00009-of-00009.safetensors: ",
    ):
        assert words in message, words
