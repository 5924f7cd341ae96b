"""Models in GGUF files (llama.cpp), converted into folders in the Hugging Face layout.

Weights are dequantised to float32 by the package `gguf`, an extra: import this module if needed.
"""

import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import gguf  # pyright: ignore[reportMissingImports]: an extra
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post_processors

from dapo_jax.model.families import family_of
from dapo_jax.model.param_paths import TOP_TENSORS
from dapo_jax.model.save_huggingface import write_tensors
from dapo_jax.runtime.storage.models import file_parts

# Names of architectures in files by `model_type` of config.json.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",  # with sliding windows
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "smollm3": "smollm3",
}
# Rows of queries and keys alternate between rotary halves.
INTERLEAVED = ("llama", "mistral", "smollm3")
NORM_OFFSETS = {"gemma3_text": 1.0}  # that a file adds to the scales of norms
ROTARY_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
# Keys of a file, below the name of its architecture, and their fields in config.json.
REQUIRED_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
FIELDS = REQUIRED_FIELDS | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
FLOAT_FIELDS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq")
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, as a factor per frequency
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192  # Llama 3's own numbers, which a file does not hold

UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
CAPITALISED = rf"{BEFORE_WORD}[{UPPER}]*[{LOWER}]+|{BEFORE_WORD}[{UPPER}]+[{LOWER}]*"
CONTRACTIONS = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{BEFORE_WORD}\p{{L}}+"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# Splits of text before the merges, by `tokenizer.ggml.pre`; GPT-2's follow unless they are whole.
SPLITS = {
    "llama-bpe": rf"{CONTRACTIONS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{SPACES}",
    "qwen2": rf"{CONTRACTIONS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{SPACES}",
    "tekken": rf"{CAPITALISED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{SPACES}",
    "smollm": r"\p{N}",
    "gpt-2": "",
}
WHOLE_SPLITS = ("llama-bpe", "qwen2", "tekken")
# These take a word of the vocabulary without merges, and begin texts with the begin token.
KNOWN_WORDS_FIRST = ("llama-bpe", "tekken")
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6  # types of tokens
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "eot": "eot", "eom": "eom"}
SPECIAL_TOKENS |= {name: name for name in ("fim_pad", "fim_rep", "fim_sep")}
# Tokens that end a text by their names, as in llama.cpp: files name one or two ends by key.
END_NAMES = set(
    "<|eot_id|> <|eom_id|> <|end_of_text|> <|im_end|> <|endoftext|> <|end|> </s> <eos> [EOS] <EOT> "
    "_<EOT> [EOT] <end_of_turn> <end_of_utterance> <|fim_pad|> <|fim_repo|> <|repo_name|> "
    "<|file_sep|>".split()
)


def _open(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metadata and tensors of a file, with all parts of a split one. Raises ValueError."""
    parts = file_parts(path)
    readers = [gguf.GGUFReader(str(part)) for part in parts]
    metadata = {name: field.contents() for name, field in readers[0].fields.items()}
    if len(parts) != (count := max(1, int(metadata.get("split.count", 1)))):
        raise ValueError(f"it is one of {count} files, of which {len(parts)} are in its folder")
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    return metadata, tensors


def _dequantise(tensor: Any) -> np.ndarray:
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return np.ascontiguousarray(array, np.float32).reshape(tensor.shape[::-1])


def _require_key(key: str, value: Any, allowed: Any) -> None:
    """Raise ValueError unless the value of a key is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{key} = {value!r}: must be one of {[*allowed]}")


# --- config.json ----------------------------------------------------------------------------------


def _read_config(metadata: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json."""
    name = metadata["general.architecture"]
    _require_key("general.architecture", name, dict.fromkeys(ARCHITECTURES.values()))
    kinds = [kind for kind, architecture in ARCHITECTURES.items() if architecture == name]
    kind = kinds[-1 if metadata.get(f"{name}.attention.sliding_window") else 0]
    config = {
        "architectures": [f"{family_of(kind).class_name}ForCausalLM"],  # TRL and vLLM read it
        "model_type": kind,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32",
    }
    for suffix, field in FIELDS.items():
        key = f"{name}.{suffix}"
        if suffix in REQUIRED_FIELDS or metadata.get(key):
            value = metadata[key]
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"{key} = {str(value)[:40]}: must be a positive number")
            value = float(f"{value:.7g}") if field in FLOAT_FIELDS else value
            if config.setdefault(field, value) != value:
                raise ValueError(f"{key} = {value}: must be {config[field]}, the {field}")
    heads, largest = config["num_attention_heads"], config["num_hidden_layers"] == 62
    width = config["hidden_size"] // heads
    defaults = {"num_key_value_heads": heads, "head_dim": width, "rope_theta": 1e4}
    config = defaults | config
    if name == "gemma3":  # its largest model scales queries by the width of all heads
        config["query_pre_attn_scalar"] = width if largest else config["head_dim"]
        config.setdefault("rope_local_base_freq", 1e4)
    else:
        config["attention_bias"] = name in INTERLEAVED and "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if ROPE_FACTORS in tensors:
        config["rope_scaling"] = _read_scaling(_dequantise(tensors[ROPE_FACTORS]), config)
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    _require_key(f"{name}.rope.scaling.type", scaling, ("none", "linear"))
    if scaling == "linear":
        factor = float(metadata[f"{name}.rope.scaling.factor"])
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config


def _read_scaling(factors: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling of Llama 3 with these factors; the original context follows from them."""
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(len(factors)) / len(factors))
    largest = float(factors.max())
    smooth = (1 / factors - 1 / largest) / (1 - 1 / largest)
    between = (smooth > 1e-3) & (smooth < 1 - 1e-3)
    contexts = (smooth * (HIGH - LOW) + LOW)[between] * waves[between]
    original = round(float(np.median(contexts))) if between.any() else ORIGINAL
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": original,
    }


# --- weights --------------------------------------------------------------------------------------


def _modules(config: dict[str, Any]) -> dict[str, str]:
    """Return the modules of a Hugging Face folder by their names in a file."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    kind, layers = config["model_type"], range(config["num_hidden_layers"])
    table = gguf.get_tensor_name_map(kinds[ARCHITECTURES[kind]], len(layers))
    tensors = [TOP_TENSORS[path] for path in ("embedding", "final_norm/scale", "head")]
    tensors += [f"model.layers.{i}.{t}" for i in layers for t in family_of(kind).tensors.values()]
    modules = [tensor.rpartition(".")[0] for tensor in tensors]
    return {name: module for module in modules if (name := table.get_name(module))}


def _from_file(array: np.ndarray, module: str, config: dict[str, Any]) -> np.ndarray:
    """Return a module's float32 array in the layout of a Hugging Face folder."""
    part = module.rpartition(".")[2]
    if config["model_type"] in INTERLEAVED and part in ROTARY_HEADS:
        heads = config[ROTARY_HEADS[part]]
        rows = heads * config["head_dim"]
        if len(array) != rows:
            raise ValueError(f"{module} has {len(array)} rows: must have {rows}")
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
    if part.endswith("norm") and (offset := NORM_OFFSETS.get(config["model_type"])):
        return array - np.float32(offset)
    return array


def _read_weights(
    tensors: dict[str, Any], config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and arrays of a Hugging Face folder, dequantised one by one."""
    modules = _modules(config)
    for tensor in tensors:
        name, _, kind = tensor.rpartition(".")
        if tensor == ROPE_FACTORS:
            continue
        if name not in modules:
            raise ValueError(f"its tensor {tensor} is not known")
        array = _from_file(_dequantise(tensors[tensor]), modules[name], config)
        yield f"{modules[name]}.{kind}", array


# --- tokenizer ------------------------------------------------------------------------------------


def _merges_by_score(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary: every split of a token, best score first."""
    merges = []
    for token in sorted(scores, key=scores.__getitem__, reverse=True):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [split for split in splits if split[0] in vocab and split[1] in vocab]
        merges += sorted(known, key=lambda split: (vocab[split[0]], vocab[split[1]]))
    return merges


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """Return a tokenizer of byte-level merges (`tokenizer.ggml.model` gpt2)."""
    pre = metadata["tokenizer.ggml.pre"]
    _require_key("tokenizer.ggml.pre", pre, SPLITS)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in KNOWN_WORDS_FIRST))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")] if SPLITS[pre] else []
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in WHOLE_SPLITS)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: dict[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """Return a tokenizer of SentencePiece's merges (`tokenizer.ggml.model` llama)."""
    types = metadata["tokenizer.ggml.token_type"]
    scored = zip(vocab, metadata["tokenizer.ggml.scores"], types, strict=True)
    scores = {token: score for token, score, kind in scored if kind in (NORMAL, USER_DEFINED)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    merges = _merges_by_score(vocab, scores)
    options = {"unk_token": [*vocab][unknown], "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(models.BPE(vocab, merges, **options))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(steps)
    return backend


def _save_tokenizer(metadata: dict[str, Any], folder: pathlib.Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = {"gpt2": _byte_level, "llama": _sentence_piece}
    kind = metadata["tokenizer.ggml.model"]
    _require_key("tokenizer.ggml.model", kind, kinds)
    backend = kinds[kind](metadata, {token: index for index, token in enumerate(tokens)})
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, of_type in itertools.zip_longest(tokens, types[: len(tokens)]):
        is_special = of_type == CONTROL or token in END_NAMES
        if is_special or of_type == USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in SPECIAL_TOKENS.items()}
    ids = {name: metadata[key] for name, key in keys.items() if key in metadata or name == "eos"}
    has_begin = kind == "llama" or metadata["tokenizer.ggml.pre"] in KNOWN_WORDS_FIRST
    if "bos" in ids and metadata.get("tokenizer.ggml.add_bos_token", has_begin):
        begin = tokens[ids["bos"]]
        backend.post_processor = post_processors.TemplateProcessing(
            single=f"{begin}:0 $A:0", pair=None, special_tokens=[(begin, ids["bos"])]
        )
    backend.save(str(folder / "tokenizer.json"))
    settings = {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos", "pad") if name in ids}
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    others = {ids[name] for name in ids if name not in ("bos", "pad")}
    others |= {index for index, token in enumerate(tokens) if token in END_NAMES}
    ends = [ids["eos"], *sorted(others - {ids["eos"]})]  # the first one ends examples
    generation = {"eos_token_id": ends, "pad_token_id": ids.get("pad", ends[0])}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


def convert(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder; damage raises any exception."""
    metadata, tensors = _open(path)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        config = _read_config(metadata, tensors)
        _save_tokenizer(metadata, folder)
    except KeyError as error:
        raise ValueError(f"it has no {error.args[0]}") from None
    write_tensors(folder, _read_weights(tensors, config))
    (folder / "config.json").write_text(json.dumps(config, indent=2))  # last: it is complete
