"""Broken or hostile model folders raise an error with field and value, without delay."""

import concurrent.futures
import json
import os
import pathlib
import shutil
import struct
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model import load_huggingface, published_tensors
from dapo_jax.runtime.settings import MAX_TEXT_BYTES, ConfigError

SECONDS = 20.0
WEIGHTS, TOKENS = "model.safetensors", "tokenizer.json"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def open_folder(folder: pathlib.Path, mesh) -> None:
    """All that a run reads of its model folder."""
    decoder = load_huggingface.read_config(folder)
    load_huggingface.fingerprint(folder)
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.check_fits(decoder.vocab, "model.folder", folder)
    tokenizer.encode_prompt("1+2=")
    load_huggingface.load_params(folder, decoder, mesh)


def refusal(folder: pathlib.Path, mesh) -> str:
    """Message of the `ConfigError`; the test fails for another error, for none, and after long."""
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(open_folder(folder, mesh))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # one that waits for ever is left behind
    with pytest.raises(ConfigError) as caught:
        outcome.result(timeout=SECONDS)
    return str(caught.value)


def change(name: str, **fields):
    """Damage: other fields of a JSON file."""

    def damage(folder: pathlib.Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | fields))

    return damage


def write(name: str, content: str | bytes):
    """Damage: another content of a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def replace(name: str, make):
    """Damage: something that is no file, in the place of one."""

    def damage(folder: pathlib.Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def tensor(**changes):
    """Damage: tensors by name, in the place of or beside those of the folder."""

    def damage(folder: pathlib.Path) -> None:
        named = {name.replace("__", "."): array for name, array in changes.items()}
        save_file(load_file(folder / WEIGHTS) | named, folder / WEIGHTS)

    return damage


def vocabulary(**fields):
    """Damage: other fields of the model in tokenizer.json."""

    def damage(folder: pathlib.Path) -> None:
        values = json.loads((folder / TOKENS).read_text())
        values["model"] |= fields
        (folder / TOKENS).write_text(json.dumps(values))

    return damage


def header(text: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if size is None else size) + text


def begins_with(number: int):
    """Post-processor that puts the token of that id before each prompt."""
    special = {"<|pad|>": {"id": "<|pad|>", "ids": [number], "tokens": ["<|pad|>"]}}
    single = [{"SpecialToken": {"id": "<|pad|>", "type_id": 0}}]
    single += [{"Sequence": {"id": "A", "type_id": 0}}]
    parts = {"single": single, "pair": single, "special_tokens": special}
    return change(TOKENS, post_processor={"type": "TemplateProcessing"} | parts)


CONFIG = "config.json"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
INDEX = published_tensors.INDEX
GENERATION = "generation_config.json"
HOSTILE = {
    "config: nested deeply": (write(CONFIG, DEEP), "nested too deeply"),
    "config: torn": (write(CONFIG, '{"model_type": "qw'), "can't be read"),
    "config: a list": (write(CONFIG, "[1]"), "must hold an object"),
    "config: a pipe": (replace(CONFIG, os.mkfifo), "a pipe: must be a file"),
    "config: a folder": (replace(CONFIG, pathlib.Path.mkdir), "a folder: must be a file"),
    "config: gigabytes": (
        lambda folder: os.truncate(folder / CONFIG, MAX_TEXT_BYTES + 1),
        "67,108,865 bytes, more than 67,108,864",
    ),
    "config: digits without end": (write(CONFIG, '{"vocab_size": ' + "9" * 9999 + "}"), "digits"),
    "model_type: a list": (change(CONFIG, model_type=["qwen2"]), "model_type ['qwen2']"),
    "layer_types: numbers": (change(CONFIG, layer_types=[[1], 2]), "layer_types [[1], 2]"),
    "rope_scaling: a list": (change(CONFIG, rope_scaling=[1]), "rope_scaling = [1]: must be an ob"),
    "rope: low above high": (
        change(CONFIG, rope_scaling=LLAMA3 | {"low_freq_factor": 4}),
        "high_freq_factor = 4.0: must be above low_freq_factor = 4.0",
    ),
    "tied: a word": (change(CONFIG, tie_word_embeddings="false"), "= 'false': must be true or fal"),
    "weights: a pipe": (replace(WEIGHTS, os.mkfifo), f"{WEIGHTS} can't be read: it is a pipe"),
    "weights: a link to nowhere": (replace(WEIGHTS, lambda p: p.symlink_to("gone")), WEIGHTS),
    "weights: a long header": (write(WEIGHTS, header(b"{}", 1 << 62)), WEIGHTS),
    "weights: header nested deeply": (write(WEIGHTS, header(b"[" * 100_000)), WEIGHTS),
    "weights: a tensor outside": (
        write(WEIGHTS, header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,9000000000]}}')),
        WEIGHTS,
    ),
    "weights: of 10,000 others": (
        tensor(**{f"x{i}": np.zeros(1, np.float32) for i in range(10_000)}),
        "and 9,000 more",
    ),
    "weights: NaN": (tensor(model__norm__weight=np.full(32, np.nan, np.float32)), "not finite"),
    "index: a list": (write(INDEX, '{"weight_map": ["a"]}'), "weight_map must be an object"),
    "tokenizer: nested deeply": (write(TOKENS, DEEP), "tokenizer.json can't be read"),
    "tokenizer: nothing known": (vocabulary(vocab={}), "tokenizer.json can't be read"),
    "tokenizer: an id beyond": (vocabulary(vocab={"=": 1 << 31}), "tokenizer.json = [2147483648]"),
    "tokenizer: begins beyond": (begins_with(99), "begin a prompt = [99]: must be from 0 to 31"),
    "chat template: a number": (
        change("tokenizer_config.json", chat_template=5),
        "chat_template = 5: must be text",
    ),
    "eos_token: a list": (
        change("tokenizer_config.json", chat_template="x", eos_token=["a"]),
        "eos_token = ['a']: must be text",
    ),
    "pad: beyond": (change(GENERATION, pad_token_id=32), "pad_token_id = [32]"),
    "end: none": (change(GENERATION, eos_token_id=[]), "eos_token_id = []"),
    "end: huge": (change(GENERATION, eos_token_id=10**18), "must be from 0 to 31"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_raises_a_clear_error(name, tiny_folder, tmp_path, one_device):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    damage, words = HOSTILE[name]
    damage(folder)
    message = refusal(folder, one_device)
    assert words in message and "config.model.folder" in message
    assert message.count("\n") <= 1002 and len(message) < 100_000


def test_lengths_in_tokenizer_json_are_ignored(tiny_folder, tmp_path):
    """A tokenizer.json may say to cut texts at 2 tokens, or to fill them up to millions."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    plain = Tokenizer.from_folder(folder).encode("1+2=3")
    padding = {"strategy": {"Fixed": 10_000_000}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|pad|>"}
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    change(TOKENS, padding=padding, truncation=cut)(folder)
    assert len(plain) == 5 and Tokenizer.from_folder(folder).encode("1+2=3") == plain


def test_a_pad_token_of_minus_1_means_no_pad_token(tiny_folder, tmp_path):
    """As the first folders of Llama say it."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    change("generation_config.json", pad_token_id=-1)(folder)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.pad_id == tokenizer.end_ids[0]
