"""Tokenizers of a model folder and of the embedded task.

The `tokenizers` library turns text into ids; this file adds the ids that end a response.
"""

import pathlib
import reprlib
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dapo_jax.data.policies import model_path
from dapo_jax.data.prompts.chat_template import ChatTemplate, read_chat_template
from dapo_jax.runtime.settings import ConfigError, check_regular, read_json

VOCAB_MULTIPLE = 32
NO_PAD = -1  # pad_token_id of Llama's first folders, which have none
BROKEN_CHARACTER = "\ufffd"


class Ends(Protocol):
    """Special ids that an engine needs."""

    @property
    def end_ids(self) -> tuple[int, ...]: ...

    @property
    def pad_id(self) -> int: ...


class Decodes(Ends, Protocol):
    """Special ids and decoding that a sampler needs."""

    def decode_all(self, rows: list[list[int]]) -> list[str]: ...


class Tokenizer:
    """Tokenizer of one model folder: encodes prompts and decodes responses.

    Attributes:
        end_ids: ids that end a response (`eos_token_id` of generation_config.json or config.json).
        pad_id: fills the places that no token uses.
        chat: the model's chat template; None where it has none.
        begin_ids: ids that begin a prompt; empty for most models.
    """

    def __init__(
        self,
        backend: Backend,
        end_ids: tuple[int, ...],
        pad_id: int,
        chat: ChatTemplate | None = None,
    ):
        self.backend = backend
        self.end_ids = end_ids
        self.pad_id = pad_id
        self.chat = chat
        # What the tokenizer itself puts before a text; `=` is one that any vocabulary can write.
        marked = backend.encode("=")
        self.begin_ids = marked.ids[: [*marked.special_tokens_mask, 0].index(0)]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special tokens added."""
        # Unlike `encode`, this lets other threads run meanwhile.
        (encoded,) = self.backend.encode_batch([text], add_special_tokens=False)
        return encoded.ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of `text`, which begins as the model knows prompts to (Llama's begin_of_text)."""
        ids = self.encode(text)
        has_begin = ids[: len(self.begin_ids)] == self.begin_ids  # a chat template has done it
        return ids if has_begin else self.begin_ids + ids

    def check_fits(self, vocab: int, field: str, folder: str | pathlib.Path) -> None:
        """Raises `ConfigError` where an id is none of a model with `vocab` of them."""
        largest = max(self.backend.get_vocab().values())
        named = f"config.{field} = {str(folder)!r}"
        if largest >= vocab:
            raise ConfigError(
                f"{named}: tokenizer.json has the id {largest}, but the model has {vocab} tokens"
            )
        ids = {
            "eos_token_id": self.end_ids,
            "pad_token_id": (self.pad_id,),
            "the tokens that begin a prompt": self.begin_ids,
        }
        for name, own in ids.items():
            if not all(0 <= one < vocab for one in own):
                raise ConfigError(f"{named}: {name} = {list(own)}: must be from 0 to {vocab - 1}")

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def decode_all(self, rows: list[list[int]]) -> list[str]:
        """Text of each row of ids, by all cores."""
        return self.backend.decode_batch(rows, skip_special_tokens=True)

    def split(self, ids: Sequence[int]) -> list[str]:
        """Texts that the tokens of a response add, one each; joined they are its text.

        A character of several tokens is the text of the last of them.
        """
        stream = TextStream(self)
        texts = [stream.add([token]) for token in ids]
        texts[-1:] = [text + stream.rest() for text in texts[-1:]]
        return texts

    @property
    def longest_token(self) -> int:
        """Most bytes of a text that one token can stand for."""
        return max(len(piece.encode()) for piece in self.backend.get_vocab())

    @property
    def padded_vocab(self) -> int:
        """Size of the vocabulary, rounded up so that a mesh can cut it."""
        return -(-self.backend.get_vocab_size() // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @classmethod
    def from_folder(cls, folder: str | pathlib.Path, field: str = "model.folder") -> "Tokenizer":
        """Tokenizer of a folder's tokenizer.json, with the end ids of its config files.

        Raises:
            ConfigError: the folder lacks a file or an id; the message names the setting `field`.
        """
        named = f"config.{field} = {str(folder)!r}"
        folder = model_path(folder, field)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{named}: has no tokenizer.json")
        settings: dict = {}
        for name in ("config.json", "generation_config.json"):  # the second has the last word
            if (folder / name).exists():
                values = read_json(folder / name, field)
                settings |= {key: value for key, value in values.items() if value is not None}
        end = settings.get("eos_token_id", [])
        end_ids = tuple(end) if isinstance(end, list) else (end,)
        if not end_ids or not all(type(end_id) is int for end_id in end_ids):
            raise ConfigError(
                f"{named}: eos_token_id = {end!r} in generation_config.json or else config.json: "
                "must be an id or a list of ids, or no response could end"
            )
        pad_id = settings.get("pad_token_id", NO_PAD)
        if type(pad_id) is not int:
            raise ConfigError(f"{named}: pad_token_id = {reprlib.repr(pad_id)}: must be an id")
        try:
            check_regular(path)
            backend = Backend.from_file(str(path))
            backend.no_padding()  # the folder's lengths are those of another program
            backend.no_truncation()
            own = cls(backend, end_ids, end_ids[0] if pad_id == NO_PAD else pad_id)
            if not backend.get_vocab():
                raise ValueError("it knows no token")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises no class of its own, and may panic
            raise ConfigError(f"{named}: tokenizer.json can't be read: {error}") from None
        own.chat = read_chat_template(folder, field)
        return own


class TextStream:
    """Incremental decoder: text of a response whose tokens come one by one.

    The pieces joined are the whole text.

    A token may end inside a character, which is shown once it is complete, and what a token adds
    may depend on the one before: so each piece is decoded together with the piece before it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        self._ids: list[int] = []  # those of the piece before, then those not shown yet
        self._shown_ids = self._shown_characters = 0  # of `_ids` and of their text

    def add(self, ids: list[int]) -> str:
        """Text that these ids add; empty while they end inside a character."""
        self._ids.extend(ids)
        text = self._decode(self._ids)
        piece = text[self._shown_characters :]
        if not piece or text.endswith(BROKEN_CHARACTER):
            return ""
        self._ids = self._ids[self._shown_ids :]
        self._shown_ids, self._shown_characters = len(self._ids), len(self._decode(self._ids))
        return piece

    def rest(self) -> str:
        """Rest of the text at the end of the response: a character that was never completed."""
        return self._decode(self._ids)[self._shown_characters :]


class UntilStop:
    """Filter of a text up to the first stop string; a possible beginning of one is held back.

    Attributes:
        stopped: true once a stop string has come.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.stopped = stops, "", False

    def add(self, text: str, *, last: bool = False) -> str:
        """Text that may be shown now. `last`: no more text comes, so that none is held back."""
        if self.stopped:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            return self._held[: min(places)]
        begins = 0 if last else self._begins()
        shown = self._held[: len(self._held) - begins]
        self._held = self._held[len(shown) :]
        return shown

    def _begins(self) -> int:
        """Count of last characters with which a stop string may begin, the most."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


PAD, END = "<|pad|>", "<|end|>"


def arithmetic_tokenizer() -> Tokenizer:
    """Tokenizer of the embedded task: characters, `####` and `again`; id 0 pads, id 1 ends."""
    pieces = [PAD, END, "####", "again", *"0123456789+=,? "]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, PAD))
    backend.add_special_tokens([PAD, END])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("####|again|."), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, end_ids=(1,), pad_id=0)
