"""Tokenizer of a model folder, with the ids that end a response."""

import contextlib
import functools
import pathlib
import reprlib
import sys
import unicodedata
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend

from dapo_jax.data.prompts.templates import ChatTemplate, read_chat_template
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.text_files import check_regular, read_json
from dapo_jax.types.errors import ConfigError

NO_PAD = -1  # pad_token_id in the first Llama folders: there is no such token
BROKEN_CHARACTER = "\ufffd"
CONTEXT_TOKENS = 32  # before a response; a character has fewer
BEFORE = "="  # a text, which every vocabulary can encode
MARKER = "\n"  # a text that merges with none after it, where words are marked


class Tokenizer:
    """Tokenizer of a model folder.

    Attributes:
        end_ids: ids that end a response (`eos_token_id` of generation_config.json or config.json).
        chat: the model's chat template, if it has one.
        begin_ids: ids that begin a prompt; empty for most models.
        special: texts of special tokens by id.
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
        self.rows = sys.maxsize  # of the model's vocabulary, set by `check_fits`
        # The tokenizer may put tokens before a text.
        marked = backend.encode(BEFORE)
        self.begin_ids = marked.ids[: [*marked.special_tokens_mask, 0].index(0)]
        added = backend.get_added_tokens_decoder().items()
        self.special = {token: entry.content for token, entry in added if entry.special}
        self._before = self.encode(BEFORE)
        self._marker: list[int] = []
        with contextlib.suppress(Exception):  # a vocabulary that has no token for the marker
            marker = self.encode(MARKER)
            # SentencePiece puts a blank before a text, but not into it.
            if self.encode(MARKER + BEFORE) != marker + self._before:
                self._marker = marker

    def encode(self, text: str, inside: bool = False) -> list[int]:
        """Return the ids of `text` without special tokens; `inside`: it follows another text.

        Raises `ConfigError` for a token that the model has no row for.
        """
        if inside and self._marker:
            ids = self.encode(MARKER + text)
            if ids[: len(self._marker)] == self._marker:
                return ids[len(self._marker) :]
        # Unlike the library's `encode`, `encode_batch` releases the GIL.
        (encoded,) = self.backend.encode_batch([text], add_special_tokens=False)
        if max(encoded.ids, default=0) >= self.rows:
            token = self.backend.id_to_token(max(encoded.ids))
            raise ConfigError(f"a text holds {token!r}, which the model has no row for")
        return encoded.ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of `text` after the model's begin ids (Llama's begin_of_text)."""
        ids = self.encode(text)
        has_begin = ids[: len(self.begin_ids)] == self.begin_ids  # from a chat template
        return ids if has_begin else self.begin_ids + ids

    def unspelled(self, text: str) -> str:
        """Return the characters of `text` that are lost by encoding and decoding, sorted."""
        unknown = self.backend.token_to_id(getattr(self.backend.model, "unk_token", None) or "")
        ids = [token for token in self.encode(text) if token != unknown]
        decoded = self.backend.decode(ids, skip_special_tokens=False)
        before, after = (
            {*unicodedata.normalize("NFKC", version).casefold()} for version in (text, decoded)
        )
        return "".join(sorted(char for char in before - after if not char.isspace()))

    def check_fits(self, vocab: int, field: str, folder: str | pathlib.Path) -> None:
        """Raise `ConfigError` if an id is outside a model's vocabulary of `vocab` tokens.

        Added tokens may be outside (images, padding); `encode` then rejects texts with them.
        """
        added = self.backend.get_added_tokens_decoder()
        self.rows = vocab
        if self.pad_id in added and self.pad_id >= vocab:
            self.pad_id = self.end_ids[0]
        learned = set(self.backend.get_vocab().values()) - added.keys()
        ids = {
            "largest id of tokenizer.json": [max(learned, default=0)],
            "eos_token_id": [*self.end_ids],
            "pad_token_id": [self.pad_id],
            "the tokens that begin a prompt": self.begin_ids,
        }
        for name, values in ids.items():
            if not all(0 <= token < vocab for token in values):
                allowed = f"must be from 0 to {vocab - 1}, as the model has {vocab} tokens"
                raise ConfigError(f"config.{field} = {str(folder)!r}: {name} = {values}: {allowed}")

    def decode(self, ids: list[int], special: bool = False) -> str:
        """Return the text of `ids`, without special tokens unless `special`."""
        return self.backend.decode(ids, skip_special_tokens=not special)

    def decode_all(self, rows: list[list[int]]) -> list[str]:
        """Return the text that each row of ids adds to a text before it, decoded on all cores."""
        rows = [self._before, *(self._before + ids for ids in rows)]
        before, *texts = self.backend.decode_batch(rows, skip_special_tokens=True)
        return [text[len(before) :] for text in texts]

    def split(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token of a response; a split character is its last token's."""
        stream = TextStream(self, self._before)
        texts = [stream.add([token]) for token in ids]
        texts[-1:] = [text + stream.rest() for text in texts[-1:]]
        return texts

    @classmethod
    def from_folder(cls, folder: str | pathlib.Path, field: str = "model.folder") -> "Tokenizer":
        """Read tokenizer.json and the end ids of a folder; may raise `ConfigError`."""
        named = f"config.{field} = {str(folder)!r}"
        folder = model_path(folder, field)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{named}: has no tokenizer.json")
        files = (folder / name for name in ("config.json", "generation_config.json"))
        outer, generation = (read_json(file, field) if file.exists() else {} for file in files)
        text = outer.get("text_config")  # of a multimodal model
        settings: dict = {}
        tables = [text if isinstance(text, dict) else {}, outer, generation]
        for table in tables:  # later ones take precedence
            settings |= {key: value for key, value in table.items() if value is not None}
        inner, beside, decided = (table.get("eos_token_id") for table in tables)
        if decided is None and None not in (inner, beside) and inner != beside:
            differ = f"text_config.eos_token_id = {inner!r} and eos_token_id = {beside!r}"
            raise ConfigError(f"{named}: {differ} in config.json: must be equal")
        end = settings.get("eos_token_id", [])
        end_ids = tuple(end) if isinstance(end, list) else (end,)
        if not end_ids or not all(type(end_id) is int for end_id in end_ids):
            place = "in generation_config.json or else config.json"
            allowed = "must be an id or a list of ids, or no response could end"
            raise ConfigError(f"{named}: eos_token_id = {end!r} {place}: {allowed}")
        pad_id = settings.get("pad_token_id", NO_PAD)
        if type(pad_id) is not int:
            raise ConfigError(f"{named}: pad_token_id = {reprlib.repr(pad_id)}: must be an id")
        try:
            check_regular(path)
            backend = Backend.from_file(str(path))
            backend.no_padding()  # the lengths in the folder are for other programs
            backend.no_truncation()
            tokenizer = cls(backend, end_ids, end_ids[0] if pad_id == NO_PAD else pad_id)
            if not backend.get_vocab():
                raise ValueError("it has no tokens")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain exceptions, and may panic
            raise ConfigError(f"{named}: tokenizer.json can't be read: {error}") from None
        tokenizer.chat = read_chat_template(folder, field)
        return tokenizer


class TextStream:
    """Incremental decoder of the ids after `before`; a piece is decoded with the one before it."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), special: bool = False):
        self._decode = functools.partial(tokenizer.decode, special=special)
        self._ids: list[int] = []  # the piece before, then ids that are not shown yet
        self._shown_ids = 0
        self._shown_characters = 0
        for token in before[-CONTEXT_TOKENS:]:
            self.add([token])

    def add(self, ids: list[int]) -> str:
        """Return the text that these ids add; empty while they end inside a character."""
        piece = self.rest(ids)
        self._ids.extend(ids)
        if not piece or piece.endswith(BROKEN_CHARACTER):
            return ""
        self._ids = self._ids[self._shown_ids :]
        self._shown_ids = len(self._ids)
        self._shown_characters = len(self._decode(self._ids))
        return piece

    def rest(self, ids: Sequence[int] = ()) -> str:
        """Return the text that is not shown yet, if the response ends with these ids."""
        return self._decode([*self._ids, *ids])[self._shown_characters :]
