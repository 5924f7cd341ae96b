"""GGUF files: round trips of every family and type, damaged files, and llama.cpp's tokens."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
from families_fixtures import packed_logits
from row_files import read_table
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dapo_jax.data.prompts.tokenizer import Tokenizer as ModelTokenizer
from dapo_jax.model import load_huggingface
from dapo_jax.runtime.storage.models import PACKAGED, model_path
from dapo_jax.types.errors import ConfigError

gguf = pytest.importorskip("gguf")
gguf_files = pytest.importorskip("dapo_jax.extras.gguf")
gguf_writer = pytest.importorskip("gguf_writer")
FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures/models"
FAMILIES = (
    "gemma3 llama3 llama3_biases_head_dim llama3_tied_float16 qwen2_tied qwen3 "
    "qwen2_bfloat16_sharded smollm3"
).split()
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
CHANGED = {  # changes of the fixture llama3
    "mistral": {"model_type": "mistral", "sliding_window": 2048, "rope_parameters": None},
    "llama3_linear": {"rope_parameters": LINEAR},
}
FAMILIES += CHANGED
TEXTS = ["Tom's 12 apples + 345 more.", " naïve 你好\n\n ok", "a  b\t\tc", "x**2  # sq"]
TEXTS += ["HOWmany aPPles//\n ALL", ""]
SPECIAL = ["<|end|>", "<|user|>"]


def train_tokenizer(kind: str) -> Tokenizer:
    """Return a small tokenizer of a kind of `gguf_files.SPLITS`, or of SentencePiece ('spm')."""
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    if kind == "spm":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<|end|>", fuse_unk=True))
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        trainer.special_tokens = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
        trainer.vocab_size = 600
    else:
        backend = Tokenizer(models.BPE())
        pattern = gguf_files.SPLITS[kind]
        own = kind in gguf_files.WHOLE_SPLITS
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated")] if own else []
        steps += [pre_tokenizers.Digits(individual_digits=True)] if kind == "smollm" else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not own))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.normalizer = normalizers.NFC() if kind == "qwen2" else None
        backend.decoder = decoders.ByteLevel()
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = "Tom has apples and buys more, so how many apples are there in all? 1 2 3 4 5 6 7 8 9 0"
    backend.train_from_iterator([words, words.upper(), "ok naïve 你好"] * 9, trainer)
    return backend


def make_folder(folder: pathlib.Path, family: str, kind: str = "smollm") -> pathlib.Path:
    """Copy a fixture of a family and give it a tokenizer, a chat template and end ids."""
    shutil.copytree(FIXTURES / ("llama3" if family in CHANGED else family), folder)
    backend = train_tokenizer(kind)
    values = json.loads(backend.to_str())
    values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] in SPECIAL]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    config = json.loads((folder / "config.json").read_text())
    added = backend.get_vocab_size() - config["vocab_size"]
    for file in folder.glob("*.safetensors"):  # more tokens than the fixture has
        tensors = load_file(file)
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
            tensors[name] = np.pad(tensors[name], [(0, added), (0, 0)])
        save_file(tensors, file, metadata={"format": "pt"})
    config["vocab_size"] += added
    if family == "gemma3":  # as in the published models
        config |= {"layer_types": ["sliding_attention"] * 3, "query_pre_attn_scalar": 16}
    config |= CHANGED.get(family, {})
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<|end|>", "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 1], "pad_token_id": 0}')
    return folder


def round_trip(
    folder: pathlib.Path, place: pathlib.Path, dtype: str, kind: str = "smollm"
) -> pathlib.Path:
    """Write a folder as a GGUF file, and return the folder that the file is converted into."""
    gguf_writer.write(folder, place / "model.gguf", dtype, kind)
    gguf_files.convert(place / "model.gguf", place / "back")
    return place / "back"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gemma3", "llama3", "mistral")))
        for name in FAMILIES
    ],
)
def test_a_round_trip_changes_no_logits(family, tmp_path, one_device):
    folder = make_folder(tmp_path / "hf", family)
    back = round_trip(folder, tmp_path, "f32")
    before, after = (load_huggingface.read_config(path) for path in (folder, back))
    assert dataclasses.replace(after, dtype=before.dtype) == before
    shutil.copyfile(folder / "expected.npz", back / "expected.npz")
    expected, used = packed_logits(folder, one_device)
    logits, _ = packed_logits(back, one_device)
    np.testing.assert_allclose(logits[used], expected[used], atol=2e-5)


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "tekken", "smollm", "gpt-2", "spm"])
def test_a_tokenizer_survives_the_round_trip(kind, tmp_path):
    back = round_trip(make_folder(tmp_path / "hf", "llama3", kind), tmp_path, "f16", kind)
    before, after = (ModelTokenizer.from_folder(path) for path in (tmp_path / "hf", back))
    for text in [*TEXTS, "<|user|>12<|end|>"]:
        assert after.encode(text) == before.encode(text)
        assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    assert after.end_ids == before.end_ids == (0, 1) and after.pad_id == before.pad_id
    assert after.chat.render([{"role": "user", "content": "hi"}]) == "hi"


def test_ends_are_known_by_their_names_too(tmp_path):
    """As in llama.cpp: a file names `<eos>` by key, and not the ends of turns."""
    ends = ["</s>", "<|im_end|>", "<end_of_turn>", "<|eom_id|>", "<|file_sep|>"]
    folder, path = make_folder(tmp_path / "old", "llama3"), tmp_path / "new.gguf"
    gguf_writer.write(folder, path, "f16", more=["<start_of_turn>", *ends])
    gguf_files.convert(path, tmp_path / "hf")
    tokenizer = ModelTokenizer.from_folder(tmp_path / "hf")
    size = tokenizer.backend.get_vocab_size()
    assert tokenizer.end_ids == (0, 1, *range(size - 5, size))
    assert tokenizer.encode("12<end_of_turn>")[-1] == size - 3
    assert tokenizer.decode([size - 3]) == ""


def test_all_parts_of_a_split_file_are_read(gguf_content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(gguf_content)
    place, folder = tmp_path / "parts", make_folder(tmp_path / "hf", "llama3")
    place.mkdir()
    gguf_writer.write(folder, place / "m[1].gguf", "f16", split_max_tensors=8)
    parts = sorted(place.iterdir())
    assert parts[0].name == f"m[1]-00001-of-0000{len(parts)}.gguf" and len(parts) > 1
    whole = load_all(model_path(tmp_path / "model.gguf"))
    for name in (place, parts[0], parts[1]):
        split = load_all(model_path(name))
        assert split.keys() == whole.keys()
        assert all((split[tensor] == whole[tensor]).all() for tensor in whole)
    parts[-1].unlink()
    problem = f"it is one of {len(parts)} files, of which {len(parts) - 1} are in its folder"
    with pytest.raises(ConfigError, match=problem):
        model_path(place)


def widen(folder: pathlib.Path, factor: int = 16) -> pathlib.Path:
    """Make a folder's matrices wide enough for blocks of 256 numbers; return the folder."""
    config = json.loads((folder / "config.json").read_text())
    for field in ("hidden_size", "intermediate_size", "head_dim"):
        config[field] *= factor
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, array in tensors.items():
            shape = [n if n == config["vocab_size"] else n * factor for n in array.shape]
            scale = 0.05 if len(shape) > 1 else 1
            tensors[name] = (scale * rng.standard_normal(shape)).astype(np.float32)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


# Of a number, as a fraction of the largest in its tensor.
LARGEST_ERRORS = {"f16": 5e-4, "bf16": 4e-3, "q8_0": 0.0045, "q4_0": 0.13, "q4_1": 0.07}
LARGEST_ERRORS |= {"q5_0": 0.065, "q5_1": 0.035, "q4_k": 0.1, "q5_k": 0.06, "q6_k": 0.025}


@pytest.mark.parametrize("dtype", [name for name in LARGEST_ERRORS if not name.endswith("_k")])
def test_types_lose_only_their_precision(dtype, tmp_path):
    folder = widen(make_folder(tmp_path / "hf", "llama3"))
    back = round_trip(folder, tmp_path, dtype)
    assert types_of(tmp_path / "model.gguf") == {"F32", dtype.upper()}
    assert 0 < largest_error(folder, back) < LARGEST_ERRORS[dtype]


def types_of(path: pathlib.Path) -> set[str]:
    return {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def largest_error(folder: pathlib.Path, back: pathlib.Path) -> float:
    """Compare a folder's numbers with those of another one; vectors must be equal."""
    before, after = (load_all(path) for path in (folder, back))
    assert before.keys() == after.keys()
    errors = {k: np.abs(before[k] - after[k]).max() / np.abs(before[k]).max() for k in before}
    assert all(errors[name] == 0 for name in before if before[name].ndim == 1)
    return max(errors.values())


def load_all(folder: pathlib.Path) -> dict[str, np.ndarray]:
    files = folder.glob("*.safetensors")
    return {k: v.astype(np.float32) for f in files for k, v in load_file(f).items()}


def uint32(value: int) -> bytes:
    return int(value).to_bytes(4, "little")


def swap(old: bytes, new: bytes):
    """Return a change of a file's bytes."""

    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new)

    return change


HEADS = b"llama.attention.head_count" + uint32(gguf.GGUFValueType.UINT32)
QUERY = b"blk.0.attn_q.weight" + uint32(2) + (32).to_bytes(8, "little") * 2
F16, I16 = (uint32(gguf.GGMLQuantizationType[name]) for name in ("F16", "I16"))
DAMAGES = {
    "empty": (lambda content: b"", "empty file"),
    "magic": (lambda content: b"XXXX" + content[4:], "GGUF magic invalid"),
    "cut in the metadata": (lambda content: content[:200], ""),
    "cut in the weights": (lambda content: content[:-4000], ""),
    "future": (lambda c: c[:4] + uint32(99) + c[8:], "version 99"),
    "many tensors": (lambda c: c[:8] + (2**40).to_bytes(8, "little") + c[16:], ""),
    "text": (lambda content: b"<html>404</html>", "GGUF magic invalid"),
    "noise": (lambda c: c[: len(c) // 2] + bytes(range(256)) * 8, ""),
    "no heads": (swap(HEADS + uint32(4), HEADS + uint32(0)), "head_count = 0: must be a positive"),
    "other heads": (swap(HEADS + uint32(4), HEADS + uint32(5)), "q_proj has 32 rows: must have 40"),
    "type": (swap(QUERY + F16, QUERY + I16), "I16 is not yet implemented"),
}
for kind, old, new, words in read_table(__file__, "swaps"):
    DAMAGES[kind] = swap(old.encode(), new.encode()), words


@pytest.fixture(scope="module")
def gguf_content(tmp_path_factory):
    place = tmp_path_factory.mktemp("gguf")
    gguf_writer.write(make_folder(place / "hf", "llama3"), place / "model.gguf", "f16")
    return (place / "model.gguf").read_bytes()


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_one_line(kind, gguf_content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    change, words = DAMAGES[kind]
    path.write_bytes(change(gguf_content))
    with pytest.raises(ConfigError, match=f"read as a GGUF file: .*{words}") as error:
        model_path(path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("cache/**/config.json"))


def test_a_file_is_converted_once_and_again_after_a_change(gguf_content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "models"
    place.mkdir()
    path = place / "model.gguf"
    path.write_bytes(gguf_content)
    first = model_path(path)
    written = (first / "config.json").stat().st_mtime_ns
    assert model_path(place) == first  # a folder that holds one file
    assert (first / "config.json").stat().st_mtime_ns == written
    path.write_bytes(gguf_content + b"\0" * 32)
    assert model_path(path) != first
    (place / "other.gguf").write_bytes(gguf_content)
    with pytest.raises(ConfigError, match="name one of its files: model.gguf, other.gguf"):
        model_path(place)


def test_a_packaged_model_names_its_package(monkeypatch):
    monkeypatch.setitem(PACKAGED, "dapo_jax:smollm2", ("no_such_module", "that"))
    with pytest.raises(ConfigError, match="needs the package no_such_module: pip install that"):
        model_path("dapo_jax:smollm2")
    with pytest.raises(ConfigError, match="did you mean dapo_jax:smollm2"):
        model_path("dapo_jax:smollm")


def test_a_packaged_model_is_joined_from_its_parts(tmp_path, monkeypatch, gguf_content):
    package = tmp_path / "parts_of_a_model"
    package.mkdir()
    file = tmp_path / "joined.gguf"
    text = f"import pathlib\ndef assemble():\n    return pathlib.Path({str(file)!r}).resolve(True)"
    (package / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGED, "dapo_jax:smollm2", (package.name, "that"))
    with pytest.raises(ConfigError, match="parts_of_a_model cannot join its parts: .*joined.gguf"):
        model_path("dapo_jax:smollm2")
    file.write_bytes(gguf_content)
    assert model_path("dapo_jax:smollm2") == model_path(file)


# --- against llama.cpp and transformers (slow: neither is a dependency) ---------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*gguf_files.SPLITS, "spm"])
def test_tokens_of_a_text_are_those_of_llama_cpp(kind, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    back = round_trip(make_folder(tmp_path / "hf", "llama3", kind), tmp_path, "f16", kind)
    tokenizer = ModelTokenizer.from_folder(back)
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    for text in [*TEXTS, "<|user|>12<|end|>", "We'LL a1b23c456 1234567", "  x  \n\n\n y "]:
        assert tokenizer.encode(text) == theirs.tokenize(text.encode(), False, True), text


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_llama_cpp(family, tmp_path, one_device):
    llama_cpp = pytest.importorskip("llama_cpp")
    folder = make_folder(tmp_path / "hf", family)
    back = round_trip(folder, tmp_path, "f32")
    cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    options = {"n_ctx": 64, "logits_all": True, "verbose": False} | cache
    model = llama_cpp.Llama(str(tmp_path / "model.gguf"), **options)
    tokens = np.random.default_rng(1).integers(2, model.n_vocab(), (2, 40))
    np.savez(back / "expected.npz", tokens=tokens, lengths=np.full(2, 40))
    logits, _ = packed_logits(back, one_device)
    for row, ours in zip(tokens, logits, strict=True):
        model.reset()
        model.eval(row.tolist())
        # ggml looks GELU and SiLU up in tables of float16.
        np.testing.assert_allclose(model.scores[: len(row)], ours, atol=4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_K_M", "Q6_K", "Q4_0"])
def test_files_that_llama_cpp_quantised_are_read(kind, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    folder = widen(make_folder(tmp_path / "hf", "llama3"))
    gguf_writer.write(folder, tmp_path / "f16.gguf", "f16")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    source, target = (str(tmp_path / name).encode() for name in ("f16.gguf", "model.gguf"))
    assert llama_cpp.llama_model_quantize(source, target, params) == 0
    kind = kind.removesuffix("_M")
    assert kind in types_of(tmp_path / "model.gguf")
    gguf_files.convert(tmp_path / "model.gguf", tmp_path / "back")
    assert 0 < largest_error(folder, tmp_path / "back") < LARGEST_ERRORS[kind.lower()]
