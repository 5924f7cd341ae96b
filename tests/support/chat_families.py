"""Small model folders whose chat templates have the structure of known families' own."""

import pathlib

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

TEMPLATES = pathlib.Path(__file__).parents[1] / "fixtures" / "chat_templates"
CHATML = ["<|im_end|>", "<|endoftext|>", "<|im_start|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>"]
# Special tokens, of which the first ends a turn, and added ones that are not special.
TOKENS = {
    "qwen": (CHATML, TAGS[:2]),
    "thinking": (CHATML, [*TAGS, "</think>"]),
    "hermes": ([*CHATML, "<|begin_of_text|>"], TAGS[:2]),
    "llama": (
        "<|eot_id|> <|eom_id|> <|begin_of_text|> <|python_tag|> <|start_header_id|> "
        "<|end_header_id|>".split(),
        [],
    ),
    "mistral": ("</s> <s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]".split(), []),
}
FAMILIES = {
    name: ((TEMPLATES / f"{name}.jinja").read_text(), *tokens) for name, tokens in TOKENS.items()
}

ASKED = {"role": "user", "content": "What is 17 + 25?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
TAGGED = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
BARE = '{"name": "add", "parameters": {"a": 17, "b": 25}}'
MISTRALS = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 17, "b": 25}}]'


def called(family: str) -> str:
    """Text of a call, as the family's model draws it."""
    return {"llama": BARE, "mistral": MISTRALS}.get(family, TAGGED)


def _user(content: str) -> dict:
    return {"role": "user", "content": content}


def _tools(*contents: str) -> list[dict]:
    ids = (f"{number:09}" for number in range(len(contents)))
    pairs = zip(contents, ids, strict=True)
    return [{"role": "tool", "content": text, "tool_call_id": i} for text, i in pairs]


def conversations(family: str) -> dict[str, list[dict]]:
    """Messages behind the question: turns of the policy, and what is observed behind each."""
    call = {"role": "assistant", "content": called(family)}
    answer = {"role": "assistant", "content": "It is 42 , I guess"}
    several = _tools('{"sum": 42}', "é ß  two\nlines", "")
    talks = {
        "a user": [answer, _user("No.\n\n Try again"), answer, _user("Once more")],
        "a tool": [call, *_tools("42")],
        "tools": [call, *several],
        "tools twice": [call, *several, call, *_tools("7")],
        "tools, then a user": [call, *_tools("42"), answer, _user("Sure?")],
    }
    if family != "mistral":
        system = {"role": "system", "content": "Be brief."}
        structured = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        talks["a system message"] = [answer, system, answer, system, _user("Go on")]
        talks["calls by fields"] = [structured, *_tools("42"), answer, _user("Sure?")]
    if family == "thinking":
        thought = {"role": "assistant", "content": f"<think>\nWell 17\n</think>\n\n{TAGGED}"}
        talks["thoughts"] = [thought, *several, thought, *_tools("7")]
    return talks


def make_backend(family: str) -> Backend:
    """Byte-level tokenizer with a few merges, so that it matters where a text is cut."""
    template, special, added = FAMILIES[family]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=500, **options)
    backend.train_from_iterator([template, str(conversations(family))] * 2, trainer)
    backend.add_tokens(added)
    return backend


def begin_token(family: str) -> str | None:
    known = {"hermes": "<|begin_of_text|>", "llama": "<|begin_of_text|>", "mistral": "<s>"}
    return known.get(family)
