"""Small tokenizers that mark the starts of words, as SentencePiece does, and one over bytes."""

import pathlib

from served import byte_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dapo_jax.data.prompts.tokenizer import Tokenizer

WORDS = ("▁hello", "▁world", "▁return", "hello", "▁▁", "▁x")
CHARACTERS = "▁abcdefghijklmnopqrstuvwxyz0123456789=+?.:()<>|"
SPECIAL = ("<unk>", "<s>", "</s>")
END = 2
KINDS = ("llama", "metaspace", "gemma", "bytes")


def _model() -> models.BPE:
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS]
    merges = []
    for word in WORDS:
        for size in range(2, len(word) + 1):
            if word[:size] not in pieces:
                pieces.append(word[:size])
                merges.append((word[: size - 1], word[size - 1]))
    vocab = {piece: number for number, piece in enumerate(pieces)}
    return models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def make_backend(kind: str) -> Backend:
    """Return a tokenizer as published with Llama 2, by Metaspace alone, or as Gemma's."""
    backend = Backend(_model())
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prefix = [normalizers.Prepend("▁")] if kind == "llama" else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [] if kind == "gemma" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([*steps, *strip])
    backend.add_special_tokens([*SPECIAL])
    return backend


def make_tokenizer(kind: str) -> Tokenizer:
    return byte_tokenizer() if kind == "bytes" else Tokenizer(make_backend(kind), (END,), 0)


def save(kind: str, folder: pathlib.Path) -> None:
    make_tokenizer(kind).backend.save(str(folder / "tokenizer.json"))
