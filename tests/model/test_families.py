"""Folders that `transformers` wrote: the same logits, the same greedy tokens, the same bytes back.

tests/fixtures/write_models.py made tests/fixtures/models and says what is in them.
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
import struct
import threading

import jax
import numpy as np
import pytest
from families_fixtures import export, greedy_tokens, packed_logits, stored_bytes
from mxfp4_folders import quantised, write_both
from row_files import read_table
from safetensors.numpy import load_file, save_file
from test_windows import GPT_OSS, random_params
from tokenizers import processors

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model import load_huggingface, save_huggingface
from dapo_jax.model.config_json import decoder_from_json, decoder_to_json
from dapo_jax.model.load_huggingface import load_params, read_config
from dapo_jax.runtime.sharding import make_mesh
from dapo_jax.runtime.text_files import MAX_TEXT_BYTES
from dapo_jax.types.errors import ConfigError

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures/models"
MODELS = sorted(FOLDER.iterdir())
NAMES = {path.name for path in MODELS}
# Their families are there without them.
ALIKE = {"llama3_tied_float16", "qwen2_bfloat16_sharded", "qwen3_tied_bias"}
# Between them they have biases, norms around blocks, experts, shards and types.
WRITTEN = {"gemma4", "llama3_tied_float16", "qwen2_bfloat16_sharded", "qwen3_moe"}


def each_model(in_ci=NAMES):
    """Parametrise a test by all models; those that are not in CI are slow."""
    rows = [(path, [pytest.mark.slow] * (path.name not in in_ci)) for path in MODELS]
    params = [pytest.param(path, id=path.name, marks=marks) for path, marks in rows]
    return pytest.mark.parametrize("folder", params)


def read_json(path):
    return json.loads(path.read_text())


@each_model(in_ci=NAMES - ALIKE)
def test_logits_of_a_ragged_batch_are_those_of_transformers(folder, one_device):
    logits, used = packed_logits(folder, one_device)
    with np.load(folder / "expected.npz") as expected:
        np.testing.assert_allclose(logits[used], expected["logits"][used], rtol=0, atol=1e-4)


@each_model(in_ci={"qwen2_tied"})
def test_greedy_generation_is_that_of_transformers(folder, one_device):
    actual, expected = greedy_tokens(folder, one_device)
    assert actual == expected


@each_model(in_ci=WRITTEN)
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


@each_model()
def test_config_json_describes_the_same_decoder_when_made_from_nothing(folder):
    config = load_huggingface.read_config(folder)
    made = decoder_to_json(config)
    assert decoder_from_json(made, "made", "model.folder") == config
    original = read_json(folder / "config.json")
    for name in ("architectures", "model_type"):
        assert made[name] == original[name]


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
    index = read_json(folder / INDEX)
    index["weight_map"]["extra"] = "model-00009-of-00009.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
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


@pytest.mark.parametrize(("generation", "config", "ends"), read_table(__file__, "ends"))
def test_a_response_ends_at_every_id_that_a_folder_names(
    generation, config, ends, tiny_folder, tmp_path
):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config))
    if ends:
        assert Tokenizer.from_folder(folder).end_ids == ends
        return
    with pytest.raises(ConfigError, match=r"text_config.eos_token_id = 7 and eos_token_id = \[5"):
        Tokenizer.from_folder(folder)


def test_an_added_token_without_a_row_is_rejected_where_it_occurs(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.backend.add_special_tokens(["<image>", "[PAD]"])
    size = tokenizer.backend.get_vocab_size()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    change("generation_config.json", pad_token_id=size - 1)(folder)
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.check_fits(size - 2, "model.folder", folder)
    assert tokenizer.pad_id == tokenizer.end_ids[0]
    assert tokenizer.encode_prompt("1+2=")
    with pytest.raises(ConfigError, match="a text holds '<image>', which the model has no row for"):
        tokenizer.encode_prompt("1<image>")


# --- what a folder holds besides its parameters ---------------------------------------------------


def test_a_head_that_is_said_to_be_tied_must_equal_the_embedding(tmp_path, one_device, monkeypatch):
    monkeypatch.setattr(load_huggingface, "BLOCK_BYTES", 1000)  # several blocks
    source = FOLDER / "qwen2_tied"
    config = read_config(source)
    table = load_file(source / WEIGHTS)["model.embed_tokens.weight"]
    folder = shutil.copytree(source, tmp_path / "model")
    tensor(lm_head__weight=table.copy())(folder)
    load_params(folder, config, one_device)
    table[-1, -1] += 1e-3
    tensor(lm_head__weight=table)(folder)
    with pytest.raises(ConfigError, match="lm_head.weight: differs from model.embed_tokens.weight"):
        load_params(folder, config, one_device)


def test_one_tensor_by_two_names_is_an_error(tmp_path, one_device):
    table = load_file(FOLDER / "gemma4" / WEIGHTS)["model.norm.weight"]
    names = {"model.language_model.norm.weight": table, "language_model.model.norm.weight": table}
    folder = shutil.copytree(FOLDER / "gemma4", tmp_path / "model")
    tensor(**names)(folder)
    with pytest.raises(ConfigError, match="norm.weight: beside .*norm.weight, which is the same"):
        load_params(folder, read_config(folder), one_device)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3"])  # one file; several and their index
@pytest.mark.parametrize("extra", ["consolidated", "adapter_model", "model"])
def test_weights_beside_those_of_the_folder_are_named_and_not_read(
    name, extra, tmp_path, one_device, capsys
):
    folder = shutil.copytree(FOLDER / name, tmp_path / "model")
    extra += ".safetensors"
    if (folder / extra).exists():
        extra = "mmproj.safetensors"
    before = load_huggingface.fingerprint(folder)
    save_file({"model.norm.weight": np.ones(32, np.float32)}, folder / extra)
    config = read_config(folder)
    expected = load_params(FOLDER / name, config, one_device)
    actual = load_params(folder, config, one_device)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert load_huggingface.fingerprint(folder) == before
    assert capsys.readouterr().out.count(f"{folder}: not read: {extra}\n") == 1


# --- broken and hostile folders ------------------------------------------------------------------

SECONDS = 20.0
WEIGHTS, TOKENS = "model.safetensors", "tokenizer.json"


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
INDEX = load_huggingface.INDEX
HOSTILE = {
    "config: nested deeply": (write(CONFIG, DEEP), "nested too deeply"),
    "config: a list": (write(CONFIG, "[1]"), "must hold an object"),
    "config: a pipe": (replace(CONFIG, os.mkfifo), "a pipe, a device or a folder: must be a file"),
    "config: a folder": (replace(CONFIG, pathlib.Path.mkdir), "a folder: must be a file"),
    "config: gigabytes": (
        lambda folder: os.truncate(folder / CONFIG, MAX_TEXT_BYTES + 1),
        "67,108,865 bytes, more than 67,108,864",
    ),
    "config: digits without end": (write(CONFIG, '{"vocab_size": ' + "9" * 9999 + "}"), "digits"),
    "weights: a pipe": (replace(WEIGHTS, os.mkfifo), f"{WEIGHTS} can't be read: it is a pipe"),
    "weights: a link to nowhere": (replace(WEIGHTS, lambda p: p.symlink_to("gone")), WEIGHTS),
    "weights: a long header": (write(WEIGHTS, header(b"{}", 1 << 62)), WEIGHTS),
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
    "tokenizer: an id beyond": (vocabulary(vocab={"=": 1 << 31}), "tokenizer.json = [2147483648]"),
    "tokenizer: begins beyond": (begins_with(99), "begin a prompt = [99]: must be from 0 to 31"),
}
HOSTILE |= {
    name: (change(f"{file}.json", **fields), words)
    for name, file, fields, words in read_table(__file__, "hostile fields")
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


# --- folders in MXFP4 ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder in MXFP4, and one of the same numbers."""
    root = tmp_path_factory.mktemp("mxfp4")
    save_huggingface.save_folder(root / "source", random_params(), GPT_OSS, (1,))
    write_both(root / "source", root / "packed", root / "plain")
    return root / "packed", root / "plain"


def test_numbers_equal_those_of_another_library():
    draws = np.random.default_rng(0).normal(size=(2, 64, 3)) * np.exp2([-40, 0, 40])
    blocks, scales, numbers = quantised(np.concatenate([draws, -draws]).astype("f"))
    np.testing.assert_array_equal(load_huggingface.dequantise(blocks, scales), numbers)
    every = np.arange(256, dtype=np.uint8).reshape(1, 16, 1, 16)
    doubled = load_huggingface.dequantise(every, np.full((1, 16, 1), 128, np.uint8))
    assert set(np.abs(doubled).ravel()) == {0, 1, 2, 3, 4, 6, 8, 12}
    assert np.isnan(load_huggingface.dequantise(blocks, np.full_like(scales, 255))).all()


def test_a_folder_in_mxfp4_loads_like_a_plain_one(folders, one_device, monkeypatch):
    packed, plain = folders
    config = load_huggingface.read_config(packed)
    assert config == load_huggingface.read_config(plain)
    assert load_huggingface.stored_dtype(packed) == "bfloat16"
    expected = load_huggingface.load_params(packed, config, one_device)
    monkeypatch.setattr(load_huggingface, "EXPERT_BYTES", 9000)  # two of eight experts
    mesh = make_mesh(1, 2, 2, expert=2)
    for folder, places in ((plain, one_device), (plain, mesh), (packed, mesh)):
        loaded = load_huggingface.load_params(folder, config, places)
        jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    gate = loaded["layers"]["moe"]["expert_gate"]["kernel"]
    assert gate.addressable_shards[0].data.size == gate.size / 8


def test_an_export_is_plain(folders, one_device, tmp_path):
    packed, plain = folders
    export(packed, tmp_path / "out", one_device)
    assert stored_bytes(tmp_path / "out") == stored_bytes(plain)
    original = json.loads((plain / "config.json").read_text())
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == original | {"torch_dtype": "bfloat16"}


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{NAME}_scales": None}, f"{NAME}_blocks: must be U8"),
        ({f"{NAME}_scales": np.zeros((8, 32, 2), np.uint8)}, f"{NAME}_blocks: must be U8"),
        ({f"{NAME}_scales": np.zeros((8, 32, 1), np.float32)}, f"{NAME}_blocks: must be U8"),
        ({f"{NAME}_scales": np.full((8, 32, 1), 255, np.uint8)}, "not finite.*expert_down"),
        ({NAME: np.zeros((8, 32, 32), np.float32)}, f"{NAME}: plain and in MXFP4"),
    ],
    ids=["missing", "shape", "dtype", "scale of 255", "twice"],
)
def test_blocks_that_do_not_fit_are_rejected(changes, words, folders, tmp_path, one_device):
    packed, _ = folders
    (tmp_path / "config.json").symlink_to(packed / "config.json")
    tensors = {n: x for path in packed.glob("*.safetensors") for n, x in load_file(path).items()}
    tensors = {name: array for name, array in (tensors | changes).items() if array is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_huggingface.read_config(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load_huggingface.load_params(tmp_path, config, one_device)
