"""Writes a Hugging Face folder as a GGUF file, for tests of the reader."""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from dapo_jax.extras import gguf as gguf_files
from dapo_jax.extras.gguf import (
    ARCHITECTURES,
    BYTE,
    CONTROL,
    FIELDS,
    FLOAT_FIELDS,
    INTERLEAVED,
    NORM_OFFSETS,
    NORMAL,
    ROPE_FACTORS,
    ROTARY_HEADS,
    UNUSED,
    USER_DEFINED,
)


def _rope_factors(config: dict[str, Any]) -> np.ndarray:
    """Invert `_read_scaling`."""
    size, scaling = config["head_dim"], config["rope_scaling"]
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(0, size, 2) / size)
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _load_config(folder: pathlib.Path) -> dict[str, Any]:
    """Return the config of a folder, with the field names of older folders."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    scaling = rope.get("full_attention", rope) or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    config["rope_scaling"] = scaling | {"rope_type": kind}
    config["rope_theta"] = scaling.get("rope_theta") or config.get("rope_theta") or 1e4
    if local := rope.get("sliding_attention", {}).get("rope_theta"):
        config["rope_local_base_freq"] = local
    heads = config["num_attention_heads"]
    return {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads} | config


def _write_config(writer: Any, config: dict[str, Any]) -> None:
    name = ARCHITECTURES[config["model_type"]]
    writer.add_vocab_size(config["vocab_size"])
    for key, field in FIELDS.items():
        if value := config.get(field):
            add = writer.add_float32 if field in FLOAT_FIELDS else writer.add_uint32
            add(f"{name}.{key}", value)
    scaling = config["rope_scaling"]
    if scaling["rope_type"] == "linear":
        writer.add_string(f"{name}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(scaling["factor"])


def _to_file(array: np.ndarray, module: str, config: dict[str, Any]) -> np.ndarray:
    """Invert `gguf_files._from_file`."""
    part = module.rpartition(".")[2]
    if config["model_type"] in INTERLEAVED and part in ROTARY_HEADS:
        pairs = array.reshape(config[ROTARY_HEADS[part]], 2, -1, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
    if part.endswith("norm") and (offset := NORM_OFFSETS.get(config["model_type"])):
        return array + np.float32(offset)
    return array


def _file_tensors(
    config: dict[str, Any], folder: pathlib.Path, dtype: str
) -> Iterator[tuple[str, np.ndarray, Any]]:
    """Yield name, numbers or bytes, and type of every tensor of a file."""
    matrix_type, vector_type = (gguf.GGMLQuantizationType[d] for d in (dtype.upper(), "F32"))
    if config["rope_scaling"].get("rope_type") == "llama3":
        yield ROPE_FACTORS, _rope_factors(config), vector_type
    block = gguf.GGML_QUANT_SIZES[matrix_type][0]
    names = {module: name for name, module in gguf_files._modules(config).items()}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as stored:
            for tensor in stored.keys():  # noqa: SIM118
                module, _, kind = tensor.rpartition(".")
                if module not in names:
                    raise ValueError(f"GGUF has no name for its tensor {tensor}")
                array = np.asarray(stored.get_tensor(tensor), np.float32)
                array = _to_file(array, module, config)
                is_plain = array.ndim == 1 or array.shape[-1] % block
                of_type = vector_type if is_plain else matrix_type
                yield f"{names[module]}.{kind}", gguf.quants.quantize(array, of_type), of_type


def _write_tokenizer(
    writer: Any, folder: pathlib.Path, config: dict[str, Any], splits: str, more: Sequence[str]
) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    known = {index: (token, NORMAL) for token, index in model["vocab"].items()}
    for entry in tokenizer["added_tokens"]:
        known[entry["id"]] = entry["content"], CONTROL if entry["special"] else USER_DEFINED
    padded = [known.get(index, (f"[PAD{index}]", UNUSED)) for index in range(config["vocab_size"])]
    padded += [(token, NORMAL) for token in more]
    tokens, types = map(list, zip(*padded, strict=True))
    if splits == "spm":
        # A token's score is the rank of its first merge.
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        ranks = {m.replace(" ", "", 1): rank for rank, m in reversed([*enumerate(merges)])}
        is_byte = [len(token) == 6 and token.startswith("<0x") for token in tokens]
        types = [BYTE if byte else kind for byte, kind in zip(is_byte, types, strict=True)]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(ranks.get(token, len(merges))) for token in tokens])
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splits)
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    settings = json.loads((folder / "generation_config.json").read_text())
    writer.add_eos_token_id(settings["eos_token_id"][0])
    writer.add_eot_token_id(settings["eos_token_id"][1])
    writer.add_pad_token_id(settings["pad_token_id"])
    writer.add_add_bos_token(False)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])


def write(
    folder: pathlib.Path,
    path: pathlib.Path,
    dtype: str,
    splits: str = "smollm",
    more: Sequence[str] = (),
    **options: Any,
) -> None:
    """Write a Hugging Face folder as a GGUF file with matrices of `dtype`; vectors are float32.

    `splits` is a key of `gguf_files.SPLITS`, or 'spm' for a tokenizer of SentencePiece's merges.
    `more` tokens are added, and `options` are those of the package's writer.
    """
    config = _load_config(folder)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]], **options)
    writer.add_name(path.stem)
    _write_config(writer, config)
    _write_tokenizer(writer, folder, config, splits, more)
    for name, array, kind in _file_tensors(config, folder, dtype):
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
