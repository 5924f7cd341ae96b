"""The tokenizer of a model folder, and the one of the embedded task.

Text and ids go through the `tokenizers` library; this file only knows which ids end a response.
"""

import pathlib
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dapo_jax.data.prompts.chat_template import ChatTemplate, read_chat_template
from dapo_jax.runtime.settings import ConfigError, read_json

VOCAB_MULTIPLE = 32
BROKEN_CHARACTER = "\ufffd"


class Ends(Protocol):
    """What an engine asks of a tokenizer before anything is encoded or decoded."""

    @property
    def end_ids(self) -> tuple[int, ...]: ...

    @property
    def pad_id(self) -> int: ...


class Decodes(Ends, Protocol):
    """What a sampler asks of one: the text of what was drawn, too."""

    def decode(self, ids: list[int]) -> str: ...


class Tokenizer:
    """Encodes prompts and decodes responses of one model folder.

    Attributes:
        end_ids: ids that end a response (`eos_token_id` of generation_config.json or config.json).
        pad_id: fills the places that no token uses.
        chat: the model's chat template, where it has one.
        begin_ids: what prompts begin with; empty for most models.
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
        begun = ids[: len(self.begin_ids)] == self.begin_ids  # a chat template has done it
        return ids if begun else self.begin_ids + ids

    def check_fits(self, vocab: int, field: str, folder: str | pathlib.Path) -> None:
        """Raises `ConfigError` where an id is none of a model with `vocab` of them."""
        largest = max(self.backend.get_vocab().values())
        named = f"config.{field} = {str(folder)!r}"
        if largest >= vocab:
            raise ConfigError(
                f"{named}: tokenizer.json has the id {largest}, but the model has {vocab} tokens"
            )
        if not all(0 <= end < vocab for end in self.end_ids):
            ends = list(self.end_ids)
            raise ConfigError(f"{named}: eos_token_id = {ends}: must be from 0 to {vocab - 1}")

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return self.backend.decode(ids, skip_special_tokens=True)

    @property
    def longest_token(self) -> int:
        """Bytes of a text that one token can stand for; at most."""
        return max(len(piece.encode()) for piece in self.backend.get_vocab())

    @property
    def padded_vocab(self) -> int:
        """Vocabulary rounded up so that a mesh can cut it."""
        return -(-self.backend.get_vocab_size() // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @classmethod
    def from_folder(cls, folder: str | pathlib.Path, field: str = "model.folder") -> "Tokenizer":
        """Reads tokenizer.json and the end ids.

        Raises `ConfigError` naming the setting `field`, the folder and what it lacks.
        """
        folder = pathlib.Path(folder)
        named = f"config.{field} = {str(folder)!r}"
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{named}: has no tokenizer.json")
        settings: dict = {}
        for name in ("config.json", "generation_config.json"):  # the second has the last word
            if (folder / name).exists():
                found = read_json(folder / name, field)
                settings |= {key: value for key, value in found.items() if value is not None}
        end = settings.get("eos_token_id", [])
        end_ids = tuple(end) if isinstance(end, list) else (end,)
        if not end_ids or not all(type(one) is int for one in end_ids):
            raise ConfigError(
                f"{named}: eos_token_id = {end!r} in generation_config.json or else config.json: "
                "must be an id or a list of ids, or no response could end"
            )
        pad_id = settings.get("pad_token_id", end_ids[0])
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises no class of its own
            raise ConfigError(f"{named}: tokenizer.json can't be read: {error}") from None
        return cls(backend, end_ids, pad_id, read_chat_template(folder, field))


class TextStream:
    """The text of a response whose tokens come one by one; the pieces joined are the whole text.

    A token may end inside a character, which is shown once it is complete, and what a token adds
    may depend on the one before: so each piece is decoded together with the piece before it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        self._ids: list[int] = []  # those of the piece before, then those not shown yet
        self._shown_ids = self._shown_characters = 0  # of `_ids` and of their text

    def add(self, ids: list[int]) -> str:
        """What these ids add; empty while they end inside a character."""
        self._ids.extend(ids)
        text = self._decode(self._ids)
        piece = text[self._shown_characters :]
        if not piece or text.endswith(BROKEN_CHARACTER):
            return ""
        self._ids = self._ids[self._shown_ids :]
        self._shown_ids, self._shown_characters = len(self._ids), len(self._decode(self._ids))
        return piece

    def rest(self) -> str:
        """What is left at the end of the response: a character that was never completed."""
        return self._decode(self._ids)[self._shown_characters :]


class UntilStop:
    """Text up to the first of some strings, which is left out; what may begin one is held back.

    Attributes:
        stopped: whether one has come.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.stopped = stops, "", False

    def add(self, text: str, *, last: bool = False) -> str:
        """What may be shown now. `last`: nothing more comes, so that nothing is held back."""
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
        """How many of the last characters are the most with which one of the strings begins."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


PAD, END = "<|pad|>", "<|end|>"


def arithmetic_tokenizer() -> Tokenizer:
    """Characters as tokens, with `####` and the word `again` whole; id 0 pads, id 1 ends."""
    pieces = [PAD, END, "####", "again", *"0123456789+=,? "]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, PAD))
    backend.add_special_tokens([PAD, END])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("####|again|."), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, end_ids=(1,), pad_id=0)
