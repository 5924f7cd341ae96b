"""Models in GGUF files (llama.cpp): conversion to a folder in the Hugging Face layout.

A file is converted once, into the cache of this machine; after that it is a model folder like any
other. Weights are dequantised to float32 by the package `gguf`.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post_processors

from dapo_jax.runtime.settings import ConfigError

TYPES = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q4_K Q5_K Q6_K".split()  # that can be dequantised
MAX_SHARD_BYTES = 5_000_000_000
# Names of modules in llama.cpp and in Hugging Face folders, below a layer.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, as a factor per frequency
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192  # Llama 3's own numbers, which a file does not hold
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Splits of text before the merges, by `tokenizer.ggml.pre`.
SPLITS = {
    "llama-bpe": WORDS.replace("DIGITS", "{1,3}"),
    "qwen2": WORDS.replace("DIGITS", ""),
    "smollm": r"\p{N}",
    "gpt-2": "",
    "default": "",
}
CONTROL, USER_DEFINED = 3, 4  # types of tokens that text never produces by merges


class Architecture(NamedTuple):
    """How a family's files differ from its Hugging Face folders.

    Attributes:
        model_type: of config.json.
        is_rotary_interleaved: rows of queries and keys alternate between the rotary halves.
        norm_offset: number that a file adds to the scales of norms.
    """

    model_type: str
    names: dict[str, str]
    is_rotary_interleaved: bool = False
    norm_offset: float = 0.0


ARCHITECTURES = {
    "llama": Architecture("llama", LAYER_NAMES, is_rotary_interleaved=True),
    "qwen2": Architecture("qwen2", LAYER_NAMES),
    "qwen3": Architecture("qwen3", LAYER_NAMES),
    "gemma3": Architecture("gemma3_text", GEMMA_NAMES, norm_offset=1.0),
}


class _Metadata(dict):
    """Metadata of a file; a missing key without a default raises ValueError with its name."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"its metadata lack {key}")


def _open(path: pathlib.Path) -> tuple[_Metadata, list[Any]]:
    """Return metadata and tensors of a file. Raises ValueError."""
    import gguf  # pyright: ignore[reportMissingImports]: an extra

    reader = gguf.GGUFReader(str(path))
    metadata = _Metadata({name: field.contents() for name, field in reader.fields.items()})
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in TYPES:
            allowed = f"must be one of {', '.join(TYPES)}"
            raise ValueError(f"{tensor.name} has type {tensor.tensor_type.name}: {allowed}")
    return metadata, reader.tensors


def _dequantise(tensor: Any) -> np.ndarray:
    import gguf  # pyright: ignore[reportMissingImports]: an extra

    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return np.ascontiguousarray(array, np.float32).reshape(tensor.shape[::-1])


# --- config.json ----------------------------------------------------------------------------------


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


def _query_scalar(config: dict[str, Any]) -> int:
    """Return Gemma 3's scale of queries: the largest model's is the width of all heads."""
    largest = config["hidden_size"] // config["num_attention_heads"]
    return largest if config["num_hidden_layers"] == 62 else config["head_dim"]


def _read_config(metadata: _Metadata, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json."""
    name = metadata["general.architecture"]
    if name not in ARCHITECTURES:
        raise ValueError(f"general.architecture = {name!r}: must be one of {[*ARCHITECTURES]}")
    values = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    values = _Metadata(values)
    heads, embed = values["attention.head_count"], values["embedding_length"]
    config = {
        "model_type": ARCHITECTURES[name].model_type,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": embed,
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": values.get("attention.key_length", embed // heads),
        "max_position_embeddings": values["context_length"],
        "rms_norm_eps": round(values["attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": float(values.get("rope.freq_base", 1e4)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32",
    }
    if name == "gemma3":
        local = float(values.get("rope.freq_base_swa", 1e4))
        config |= {"query_pre_attn_scalar": _query_scalar(config), "rope_local_base_freq": local}
    else:
        is_llama = name == "llama"
        config["attention_bias"] = is_llama and "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = is_llama and "blk.0.ffn_up.bias" in tensors
    window = values.get("attention.sliding_window")
    if window and name == "llama":
        config["model_type"] = "mistral"
    if window:
        config["sliding_window"] = window
    scaling = values.get("rope.scaling.type", "none")
    if ROPE_FACTORS in tensors:
        config["rope_scaling"] = _read_scaling(_dequantise(tensors[ROPE_FACTORS]), config)
    elif scaling != "none":
        if scaling != "linear":
            raise ValueError(f"{name}.rope.scaling.type = {scaling!r}: must be none or linear")
        factor = float(values["rope.scaling.factor"])
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config


# --- weights --------------------------------------------------------------------------------------


def _published_name(name: str, architecture: Architecture) -> str:
    """Return the name of a tensor in Hugging Face folders. Raises ValueError for an unknown one."""
    module, _, kind = name.rpartition(".")
    if module in TOP_NAMES:
        return f"{TOP_NAMES[module]}.{kind}"
    block, number, part = (*module.split("."), "", "")[:3]
    if block == "blk" and part in architecture.names:
        return f"model.layers.{number}.{architecture.names[part]}.{kind}"
    raise ValueError(f"its tensor {name} is not known")


def _split_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of interleaved rotary pairs in the order of Hugging Face: half after half."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _weights(
    tensors: dict[str, Any], architecture: Architecture, config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and float32 array of every tensor, as in a Hugging Face folder."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            continue
        array = _dequantise(tensor)
        part = name.split(".")[-2]
        if architecture.is_rotary_interleaved and part in heads:
            array = _split_halves(array, heads[part])
        if architecture.norm_offset and part.endswith("norm"):
            array = array - np.float32(architecture.norm_offset)
        yield _published_name(name, architecture), array


def _save_weights(weights: Iterator[tuple[str, np.ndarray]], folder: pathlib.Path) -> None:
    """Write safetensors files of at most `MAX_SHARD_BYTES` and their index."""
    names: dict[str, str] = {}
    part: dict[str, np.ndarray] = {}

    def write() -> None:
        file = f"model-{len(set(names.values())) + 1:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(part, file))
        part.clear()

    for name, array in weights:
        if part and sum(a.nbytes for a in part.values()) + array.nbytes > MAX_SHARD_BYTES:
            write()
        part[name] = array
    write()
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


# --- tokenizer ------------------------------------------------------------------------------------


def _merges_by_score(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary: every split of a token, best score first."""
    merges = []
    for token, score in scores.items():
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [split for split in splits if split[0] in vocab and split[1] in vocab]
        known.sort(key=lambda split: (vocab[split[0]], vocab[split[1]]))
        merges += [(-score, split) for split in known]
    merges.sort(key=lambda merge: merge[0])
    return [split for _, split in merges]


def _byte_level(metadata: _Metadata, vocab: dict[str, int]) -> Tokenizer:
    """Return a tokenizer of byte-level merges (`tokenizer.ggml.model` gpt2)."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre = {pre!r}: must be one of {[*SPLITS]}")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if SPLITS[pre]:
        steps.append(pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"))
    has_own_words = pre in ("llama-bpe", "qwen2")
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not has_own_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: _Metadata, vocab: dict[str, int]) -> Tokenizer:
    """Return a tokenizer of SentencePiece's merges (`tokenizer.ggml.model` llama)."""
    types = metadata["tokenizer.ggml.token_type"]
    scored = zip(vocab, metadata["tokenizer.ggml.scores"], types, strict=True)
    scores = {token: score for token, score, kind in scored if kind in (1, USER_DEFINED)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab,
        _merges_by_score(vocab, scores),
        unk_token=[*vocab][unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(steps)
    return backend


def _save_tokenizer(metadata: _Metadata, folder: pathlib.Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    kinds = {"gpt2": _byte_level, "llama": _sentence_piece}
    kind = metadata["tokenizer.ggml.model"]
    if kind not in kinds:
        raise ValueError(f"tokenizer.ggml.model = {kind!r}: must be one of {[*kinds]}")
    backend = kinds[kind](metadata, vocab)
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, of_type in zip(tokens, types, strict=False):
        if of_type in (CONTROL, USER_DEFINED):
            added = AddedToken(token, special=of_type == CONTROL, normalized=False)
            (backend.add_special_tokens if added.special else backend.add_tokens)([added])
    ids = {
        name: metadata[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("eot", "eot"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    if "eos" not in ids:
        raise ValueError("its metadata lack tokenizer.ggml.eos_token_id")
    has_begin = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    if "bos" in ids and metadata.get("tokenizer.ggml.add_bos_token", has_begin):
        begin = tokens[ids["bos"]]
        backend.post_processor = post_processors.TemplateProcessing(
            single=f"{begin}:0 $A:0", pair=None, special_tokens=[(begin, ids["bos"])]
        )
    backend.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos", "pad") if name in ids}
    template = metadata.get("tokenizer.chat_template")
    settings = named | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    ends = sorted({ids[name] for name in ("eos", "eot") if name in ids})
    generation = {"eos_token_id": ends, "pad_token_id": ids.get("pad", ends[0])}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


# --- files ----------------------------------------------------------------------------------------


def convert(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder; raises ValueError."""
    metadata, listed = _open(path)
    tensors = {tensor.name: tensor for tensor in listed}
    if "token_embd.weight" not in tensors:
        raise ValueError("it has no tensor token_embd.weight")
    config = _read_config(metadata, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(metadata, folder)
    architecture = ARCHITECTURES[metadata["general.architecture"]]
    _save_weights(_weights(tensors, architecture, config), folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))  # last: it is complete


def converted_folder(path: pathlib.Path, field: str) -> pathlib.Path:
    """Return the folder in the cache that a GGUF file was converted into; convert it if needed.

    Raises:
        ConfigError: the file is damaged, or holds something that is not supported.
    """
    status = path.stat()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    source = repr((str(path.resolve()), status.st_size, status.st_mtime_ns))
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    folder = pathlib.Path(cache, "dapo_jax_models", digest, path.stem)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / "lock"):
        if not (folder / "config.json").exists():
            try:
                convert(path, folder)
            except ImportError:
                problem = "needs the package gguf: pip install 'dapo_jax[gguf]'"
                raise ConfigError(f"config.{field} = '{path}': {problem}", field) from None
            except Exception as error:  # damage can break the package anywhere
                text = " ".join(str(error).split())[:300]
                problem = f"can't be read as a GGUF file: {text or type(error).__name__}"
                raise ConfigError(f"config.{field} = '{path}': {problem}", field) from None
    return folder


# --- writing --------------------------------------------------------------------------------------


def _file_name(name: str, architecture: Architecture) -> str:
    """Return llama.cpp's name of a tensor of a Hugging Face folder. Raises ValueError."""
    module, _, kind = name.rpartition(".")
    for ours, published in TOP_NAMES.items():
        if module == published:
            return f"{ours}.{kind}"
    number, _, part = module.removeprefix("model.layers.").partition(".")
    for ours, published in architecture.names.items():
        if part == published:
            return f"blk.{number}.{ours}.{kind}"
    raise ValueError(f"GGUF has no name for its tensor {name}")


def _interleave_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Invert `_split_halves`."""
    pairs = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _rope_factors(theta: float, size: int, scaling: dict[str, Any]) -> np.ndarray:
    """Return Llama 3's factor for each rotary frequency of heads of this size."""
    waves = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return base and scaling of the rotation, from fields of older or newer folders."""
    newer = config.get("rope_parameters") or {}
    newer = newer.get("full_attention", newer)
    scaling = newer or config.get("rope_scaling") or {}
    return float(newer.get("rope_theta") or config.get("rope_theta") or 1e4), scaling


def _check_layers(config: dict[str, Any]) -> None:
    """Raise ValueError for settings that llama.cpp derives, if the folder has other ones."""
    if config["model_type"] == "qwen3" and config.get("attention_bias"):
        raise ValueError("llama.cpp has no biases in qwen3")
    if config["model_type"] != "gemma3_text":
        return
    if config.get("query_pre_attn_scalar", config["head_dim"]) != _query_scalar(config):
        raise ValueError(
            "llama.cpp knows no other query_pre_attn_scalar than the published models'"
        )
    layers = range(1, config["num_hidden_layers"] + 1)
    kinds = ["sliding_attention" if number % 6 else "full_attention" for number in layers]
    if config.get("layer_types", kinds) != kinds:
        raise ValueError("llama.cpp needs full attention in every sixth layer, and only there")


def _write_config(writer: Any, config: dict[str, Any]) -> None:
    _check_layers(config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta, scaling = _rope(config)
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(config["head_dim"])
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        writer.add_sliding_window(window)
    if config["model_type"] == "gemma3_text":
        newer = config.get("rope_parameters") or {}
        local = newer.get("sliding_attention", {}).get("rope_theta")
        writer.add_rope_freq_base_swa(float(local or config.get("rope_local_base_freq") or 1e4))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "linear":
        import gguf  # pyright: ignore[reportMissingImports]: an extra

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "llama3":
        writer.add_tensor(ROPE_FACTORS, _rope_factors(theta, config["head_dim"], scaling))
    elif kind != "default":
        raise ValueError(f"GGUF export does not know rope_scaling of type {kind!r}")


def _split_name(tokenizer: dict[str, Any]) -> str:
    """Return the key of `SPLITS` for a byte-level tokenizer.json. Raises ValueError."""
    pre = tokenizer["pre_tokenizer"]
    steps = pre.get("pretokenizers", [pre])
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    if any(step["type"] == "Digits" for step in steps):
        return "smollm"
    for name, pattern in SPLITS.items():
        if patterns == [pattern] or (not pattern and not patterns):
            return name
    raise ValueError("GGUF export does not know the splits of its tokenizer")


def _write_tokenizer(writer: Any, folder: pathlib.Path, vocab_size: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    added = {entry["id"]: entry for entry in tokenizer["added_tokens"]}
    by_id = {index: token for token, index in model["vocab"].items()}
    by_id |= {index: entry["content"] for index, entry in added.items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    types = [
        (CONTROL if added[i]["special"] else USER_DEFINED) if i in added else 1 if i in by_id else 5
        for i in range(vocab_size)
    ]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if model.get("byte_fallback"):
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", "", 1), rank)
        is_byte = [len(token) == 6 and token.startswith("<0x") for token in tokens]
        types = [6 if byte else kind for byte, kind in zip(is_byte, types, strict=True)]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(ranks.get(token, len(merges))) for token in tokens])
        prefix = '"Prepend"' in json.dumps(tokenizer.get("normalizer"))
        writer.add_add_space_prefix(prefix)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(tokenizer))
        writer.add_token_merges(merges)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _write_special_tokens(writer, folder, tokens, tokenizer)


def _write_special_tokens(
    writer: Any, folder: pathlib.Path, tokens: list[str], tokenizer: dict[str, Any]
) -> None:
    settings, generation = (
        json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        for name in ("tokenizer_config.json", "generation_config.json")
    )
    ends = generation.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        token = settings.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text in tokens:
            add(tokens.index(text))
        elif name == "eos" and ends:
            add(ends[0])
    if len(ends) > 1:
        writer.add_eot_token_id(ends[-1])
    if (pad := generation.get("pad_token_id")) is not None:
        writer.add_pad_token_id(pad)
    writer.add_add_bos_token('"TemplateProcessing"' in json.dumps(tokenizer.get("post_processor")))
    jinja = folder / "chat_template.jinja"
    template = jinja.read_text() if jinja.exists() else settings.get("chat_template")
    if isinstance(template, str):
        writer.add_chat_template(template)


def write(folder: pathlib.Path, path: pathlib.Path, dtype: str) -> None:
    """Write a Hugging Face folder as a GGUF file; raises ValueError for what GGUF cannot hold.

    Args:
        dtype: of matrices, 'f16' or 'q8_0'; vectors are float32.
    """
    import gguf  # pyright: ignore[reportMissingImports]: an extra
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    types = {a.model_type: name for name, a in ARCHITECTURES.items()} | {"mistral": "llama"}
    if config["model_type"] not in types:
        raise ValueError(f"model_type = {config['model_type']!r}: must be one of {[*types]}")
    name = types[config["model_type"]]
    architecture = ARCHITECTURES[name]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    writer = gguf.GGUFWriter(path, name)
    writer.add_name(path.stem)
    _write_config(writer, config)
    _write_tokenizer(writer, folder, config["vocab_size"])
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as stored:
            for published in stored.keys():  # noqa: SIM118
                array = np.asarray(stored.get_tensor(published), np.float32)
                target = _file_name(published, architecture)
                part = target.split(".")[-2]
                if architecture.is_rotary_interleaved and part in heads:
                    array = _interleave_halves(array, heads[part])
                if architecture.norm_offset and part.endswith("norm"):
                    array = array + np.float32(architecture.norm_offset)
                plain = array.ndim == 1 or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]
                of_type = gguf.GGMLQuantizationType.F32 if plain else kind
                writer.add_tensor(target, gguf.quants.quantize(array, of_type), raw_dtype=of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
