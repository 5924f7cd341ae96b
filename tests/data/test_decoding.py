"""Texts of tokens after other tokens, for vocabularies over bytes and such that mark words."""

import itertools

import pytest
from conftest import make_prompt
from served import byte_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dapo_jax.data.prompts.templates import ChatTemplate
from dapo_jax.data.prompts.tokenizer import TextStream, Tokenizer
from dapo_jax.extras.serve.logprobs import Score, chat_logprobs, completion_logprobs
from dapo_jax.extras.sft.rows import Writer
from dapo_jax.extras.sft.settings import OwnData
from dapo_jax.rollout.environments.transcript import Transcript
from dapo_jax.rollout.requests import Reader
from dapo_jax.types.structs import NewTokens, Request, Stop

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


TEXTS = ("hello world", "def f(x):\n    return x", "  hello  world ", "x 你🙂 é\n", "hello hello")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_stream_and_pieces_are_the_rest_of_the_whole(kind, text):
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode(text)
    text = tokenizer.decode(ids)  # Metaspace loses a blank at the start
    for place in range(len(ids) + 1):
        before, after = ids[:place], ids[place:]
        stream = TextStream(tokenizer, before)
        streamed = "".join([*(stream.add([token]) for token in after), stream.rest()])
        head = tokenizer.decode(before)
        assert "\ufffd" not in streamed
        if head and "\ufffd" not in head:
            assert head + streamed == text
            assert tokenizer.decode_all([after]) == [streamed] == ["".join(tokenizer.split(after))]
        assert TextStream(tokenizer, before).rest(after) == streamed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("echo", [False, True])
def test_tokens_and_offsets_are_places_in_the_text(kind, echo):
    tokenizer = make_tokenizer(kind)
    for text in TEXTS:
        ids = [1, *tokenizer.encode(text)] if kind != "bytes" else tokenizer.encode(text)
        first = 0 if echo else 3
        before, after = ids[:first], ids[first:]
        shown = TextStream(tokenizer, before).rest(after)
        scores = [Score(token, -1.0, [(token, -1.0)]) for token in after]
        fields = completion_logprobs(tokenizer, before, scores)
        places = zip(fields["tokens"], fields["text_offset"], strict=True)
        for token, (name, at) in zip(after, places, strict=True):
            is_hidden = name.startswith("token_id:") or token in tokenizer.special
            assert is_hidden or shown[at : at + len(name)] == name
        assert not any(name.startswith("token_id:") for name in fields["tokens"]) or "你" in text


def test_different_candidates_have_different_names():
    tokenizer = make_tokenizer("llama")
    spell = tokenizer.backend.token_to_id
    before = tokenizer.encode("x")
    same = (spell("x"), spell("<0x78>"))  # the letter, and its byte
    pairs = itertools.pairwise([*same, spell("▁hello"), spell("hello"), spell("▁"), END := 2])
    for first, second in pairs:
        score = Score(first, -1.0, [(second, -0.5), (first, -1.0)])
        (top,) = completion_logprobs(tokenizer, before, [score])["top_logprobs"]
        (entry,) = chat_logprobs(tokenizer, before, [score])["content"]
        assert sorted(top.values()) == [-1.0, -0.5] and entry["token"] in top
    names = [tokenizer.split([token])[0] for token in same]
    assert (
        names == ["x", "x"]
        and f"token_id:{same[1]}"
        in completion_logprobs(tokenizer, before, [Score(same[0], -1.0, [(same[1], -2.0)])])[
            "top_logprobs"
        ][0]
    )
    assert completion_logprobs(tokenizer, before, [Score(END, -1.0, [])])["tokens"] == [SPECIAL[2]]


PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_an_answer_follows_its_prompt_without_another_blank(kind):
    tokenizer = make_tokenizer(kind)
    tokenizer.chat = ChatTemplate(PLAIN)
    for answer in ("return x", " return x", "  x", "\nx", "x\n"):
        for prompt in ("def f(x):\n    ", "x: ", "x"):
            row = {"prompt": prompt, "completion": answer}
            for template, shown in (("none", prompt), ("chat", f"user:{prompt}assistant:")):
                writer = Writer(OwnData(template=template), tokenizer, "examples")
                (group,) = writer.write(row)
                whole = [*group.prompt.tokens.tolist(), *group.completions[0].tokens.tolist()]
                assert tokenizer.decode(whole) == shown + answer
    tokens, _ = Transcript(tokenizer, chat=False).tokens([{"role": "user", "content": "x"}], 9)
    assert tokenizer.decode([*tokenizer.encode("hello"), *tokens]) == "hellox"


def read_stop(tokenizer, ids, *texts, ends=()) -> list[NewTokens]:
    """Return what is shown of tokens that come one by one, up to a stop text."""
    shown = []
    request = Request(make_prompt(0, [5]), [0], stop=Stop(texts), watch=shown.append)
    reader = Reader(tokenizer, request, ends)
    for at, token in enumerate(ids, 1):
        if reader.read(0, [token], last=at == len(ids)):
            break
    return shown


def test_a_stop_text_may_begin_with_the_blank_of_a_first_word():
    tokenizer = make_tokenizer("llama")
    ids = [tokenizer.backend.token_to_id(piece) for piece in ("▁world", "hello")]
    assert [new.stopped for new in read_stop(tokenizer, ids, " world")] == [True]


def test_a_stop_text_is_found_across_tokens_and_held_back_until_it_is_sure():
    tokenizer = make_tokenizer("bytes")
    for text, stops, shown in (
        ("ab--c-->d", ["-->"], "ab--c"),
        ("ab--c", ["-->"], "ab--c"),
        ("x你🙂 é", ["🙂 ", "é"], "x你"),
        ("aaab", ["ab", "b"], "aa"),
    ):
        news = read_stop(tokenizer, tokenizer.encode(text), *stops)
        assert "".join(new.text for new in news) == shown
        assert news[-1].ended and news[-1].stopped == (shown != text)


def test_a_special_token_is_a_stop_text_too_and_else_shows_nothing():
    tokenizer = make_tokenizer("llama")
    word, special = tokenizer.encode("hello")[-1], 2
    ids = [word, special, word]
    (_, second, *_) = news = read_stop(tokenizer, ids, SPECIAL[special])
    assert second.stopped and len(news) == 2
    assert "".join(new.text for new in read_stop(tokenizer, ids, "z")) == "".join(
        new.text for new in read_stop(tokenizer, [word, word], "z")
    )
    assert read_stop(tokenizer, ids, ends=(special,))[-1] == NewTokens(0, [special], "", True, True)
