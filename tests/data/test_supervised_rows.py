"""Rows of a user's own examples and pairs: their tokens, and what is wrong with some."""

import numpy as np
import pytest
from row_files import read_table, write_lines
from served import byte_tokenizer
from tokenizers import processors

from dapo_jax.config.experiment import Data
from dapo_jax.data.files import MalformedRow
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.prompts.templates import ChatTemplate
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.extras.sft.rows import Writer, endless_order, read_examples
from dapo_jax.extras.sft.settings import OwnData
from dapo_jax.types.errors import ConfigError

PLAIN_CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As models that think: what came before the bar is not shown again in later turns.
FORGETTING_CHAT = PLAIN_CHAT.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('|')[-1] }}"
)
TALK = read_table(__file__, "talk")


def tokenizer_with(chat: str = PLAIN_CHAT, begin: bool = False):
    tokenizer = byte_tokenizer()
    if begin:
        tokenizer.backend.post_processor = processors.TemplateProcessing(
            single="<|end|> $A", special_tokens=[("<|end|>", 256)]
        )
        tokenizer = type(tokenizer)(tokenizer.backend, (256,), 0)
    tokenizer.chat = ChatTemplate(chat) if chat else None
    return tokenizer


def own(path="", **changes) -> OwnData:
    return OwnData(source=str(path), **{"heldout_examples": 0, "bad_rows_limit": 0} | changes)


def write(row, kind="examples", tokenizer=None, **changes):
    """(prompt, response, mask of trained tokens) of each answer of a row."""
    groups = Writer(own(**changes), tokenizer or tokenizer_with(), kind).write(row)
    return [(g.prompt.tokens, c.tokens, c.is_sampled) for g in groups for c in g.completions]


def prompts_of(examples) -> list[str]:
    return [groups[0].prompt.text for groups in examples]


def text_of(tokens) -> str:
    return byte_tokenizer().backend.decode(list(tokens), skip_special_tokens=False)


@pytest.mark.parametrize(("chat", "parts"), [(PLAIN_CHAT, 1), (FORGETTING_CHAT, 2)])
@pytest.mark.parametrize("begin", [False, True])
def test_every_answer_is_learned_behind_what_the_sampler_sees(chat, parts, begin):
    tokenizer = tokenizer_with(chat, begin)
    turns = write({"messages": TALK}, tokenizer=tokenizer)
    assert len(turns) == parts
    found = []
    for prompt, response, trained in turns:
        whole, learned = np.concatenate([prompt, response]).tolist(), np.append(False, trained)
        starts = np.flatnonzero(learned[1:] & ~learned[:-1]) + len(prompt)
        ends = np.flatnonzero(learned[:-1] & ~learned[1:]) + len(prompt)
        ends = [*ends, len(whole)][: len(starts)]
        found += [
            (whole[:start], whole[start:end]) for start, end in zip(starts, ends, strict=True)
        ]
    expected = [
        (
            tokenizer.encode_prompt(tokenizer.chat.render(TALK[:place])),
            [*tokenizer.encode(TALK[place]["content"]), 256],
        )
        for place in (2, 4)
    ]
    assert found == expected


ROW = {"prompt": " 1+1? ", "response": "2"}
SAME_ROWS = dict(read_table(__file__, "same_rows")) | {
    "fields": (
        {"q": "1+1?", "meta": {"gold": "2"}, "messages": TALK},
        {"fields": "prompt=q,response=meta.gold"},
    )
}
SAME_CHATS = dict(read_table(__file__, "same_chats"))


@pytest.mark.parametrize("template", ["none", "chat"])
def test_one_example_in_every_form_is_the_same_tokens(template):
    rows = SAME_ROWS if template == "none" else SAME_CHATS
    prompt = "1+1?" if template == "none" else "<user>1+1?<|end|>\n<assistant>"
    for name, (row, changes) in rows.items():
        ((before, response, trained),) = write(row, **{"template": template} | changes)
        assert (text_of(before), text_of(response)) == (prompt, "2<|end|>"), name
        assert trained.all()


def test_a_system_message_is_the_rows_own_or_that_of_the_config():
    chat = {"template": "chat", "system_prompt": "Config."}
    for row, system, changes in read_table(__file__, "system"):
        text = text_of(write(row, **chat | changes)[0][0])
        assert text.startswith(f"<system>{system}<|end|>\n<user>") and text.count("<system>") == 1


OWN_TEMPLATES = ["Q: {problem}\nA:", "{{ system }}|{{ problem }}"]


@pytest.mark.parametrize("template", ["none", "dapo", "r1", "qwen_math", "chat", *OWN_TEMPLATES])
@pytest.mark.parametrize("begin", [False, True])
def test_prompts_are_those_of_reinforcement_learning(template, begin, tmp_path):
    rows = [{"problem": f" {i}+1=? ", "solution": "so", "answer": "1"} for i in range(5)]
    source = write_lines(tmp_path / "own.jsonl", rows)
    shown = {
        "template": template,
        "system_prompt": "Hi." if template in ("chat", OWN_TEMPLATES[1]) else "",
    }
    tokenizer = tokenizer_with(begin=begin)
    data = Data(source=source, heldout_problems=0, max_prompt_tokens=999, **shown)
    stream = PromptStream(data, 0, tokenizer)
    theirs = {tuple(next(stream).tokens) for _ in rows}
    mine = read_examples(own(source, **shown), tokenizer, 999, "examples").training
    assert {tuple(group.prompt.tokens) for (group,) in mine} == theirs and len(theirs) == 5


SAME_PAIRS = dict(read_table(__file__, "same_pairs"))


@pytest.mark.parametrize("name", SAME_PAIRS)
def test_one_pair_in_every_form_is_the_same_tokens(name):
    row, changes = SAME_PAIRS[name]
    (prompt, chosen, _), (same, rejected, _) = write(row, "pairs", **changes)
    assert text_of(prompt) == text_of(same) == "<user>1+1?<|end|>\n<assistant>"
    assert (text_of(chosen), text_of(rejected)) == ("2<|end|>", "22<|end|>")


MALFORMED = read_table(__file__, "malformed")
MALFORMED_PAIRS = read_table(__file__, "malformed_pairs")


@pytest.mark.parametrize(("row", "words", "changes"), MALFORMED + MALFORMED_PAIRS)
def test_a_malformed_row_says_why(row, words, changes):
    is_pair = (row, words, changes) in MALFORMED_PAIRS
    with pytest.raises(MalformedRow) as raised:
        write(row, "pairs" if is_pair else "examples", **changes)
    assert words in str(raised.value)


def test_templates_that_can_not_show_an_answer_make_malformed_rows():
    for chat, words in read_table(__file__, "templates"):
        with pytest.raises(MalformedRow, match=words):
            write({"messages": TALK}, tokenizer=tokenizer_with(chat))
    with pytest.raises(MalformedRow, match="letters that the tokenizer has no token for"):
        write({"prompt": "1+1=", "response": "two"}, tokenizer=arithmetic_tokenizer())
    with pytest.raises(ConfigError, match="data.template = 'chat': the model folder has no chat"):
        Writer(own(template="chat"), tokenizer_with(""), "examples")


def test_bad_rows_are_named_up_to_a_limit_and_long_ones_counted(tmp_path):
    rows = [{"prompt": f"{i}", "response": "12345678"[: i + 1]} for i in range(8)]
    source = write_lines(tmp_path / "own.jsonl", [*rows[:2], '{"prompt": 1', *rows[2:]])
    with pytest.raises(ConfigError) as raised:
        read_examples(own(source), tokenizer_with(), 99, "examples")
    message = str(raised.value)
    assert (
        "config.data.bad_rows_limit = 0" in message and f"{source} line 3: is not JSON" in message
    )
    data = own(source, bad_rows_limit=1)
    found = read_examples(data, tokenizer_with(), 6, "examples")  # prompt, answer and end token
    assert prompts_of(found.training) == ["0", "1", "2", "3"]
    assert "4 examples of 9 rows (1 malformed), 14 tokens to learn. Held out: 0" in found.notes
    assert "line 3" in found.messages[0]
    assert "4 of 9 examples exceed packing.row_tokens = 6 and are dropped" in found.messages[1]
    assert "the longest has 10 tokens" in found.messages[1]
    for row_tokens in (2, 1):
        with pytest.raises(ConfigError, match="holds no examples: .*line 3.*8 of 9 examples exc"):
            read_examples(data, tokenizer_with(), row_tokens, "examples")


def test_held_out_prompts_are_never_trained_on_whatever_the_order(tmp_path):
    rows = [{"prompt": f"{i % 60} ?", "response": str(i)} for i in range(100)]  # 40 prompts twice
    rows[70]["prompt"] = " 10  ? "  # the same but for blanks
    found = []
    for order in (rows, rows[::-1]):
        source = write_lines(tmp_path / "own.jsonl", order)
        one = read_examples(own(source, heldout_examples=30), tokenizer_with(), 99, "examples")
        parts = one.training, one.evaluation
        training, heldout = ({t.replace(" ", "") for t in prompts_of(part)} for part in parts)
        assert not training & heldout and [*map(len, parts)] == [70, 30]
        found.append(heldout)
    assert found[0] == found[1]
    sizes = {count: (own(source, heldout_examples=count)) for count in (-1, 99, 100)}
    assert len(read_examples(sizes[-1], tokenizer_with(), 99, "examples").evaluation) == 5
    assert read_examples(sizes[99], tokenizer_with(), 99, "examples").training
    with pytest.raises(ConfigError, match="heldout_examples = 100: must be below the 100 examples"):
        read_examples(sizes[100], tokenizer_with(), 99, "examples")
    source = write_lines(tmp_path / "same.jsonl", [ROW] * 40)
    same = read_examples(own(source, heldout_examples=-1), tokenizer_with(), 99, "examples")
    assert not same.evaluation


def test_every_pass_has_each_example_once_in_an_order_of_its_own():
    order, again, other = endless_order(50, 1), endless_order(50, 1), endless_order(50, 2)
    passes = [[order(place) for place in range(50 * n, 50 * n + 50)] for n in range(3)]
    assert all(sorted(one) == list(range(50)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert [again(place) for place in range(149, 99, -1)][::-1] == passes[2]  # by place alone
    assert [other(place) for place in range(50)] != passes[0]


TOOL_CHAT = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def talk_with_tools(content, arguments='{"a": 1}') -> list[dict]:
    function = {"name": "add", "arguments": arguments}
    calls = [{"id": "x", "type": "function", "function": function}]
    return [
        {"role": "user", "content": " 1+1? ", "tool_calls": None},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": "", "tool_call_id": "x"},
        {"role": "assistant", "content": "2\n"},
    ]


@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("tools", [TOOLS, '[{"function": {"name": "add"}}]'])
def test_rows_with_tools_are_trained_with_their_schemas(content, tools):
    talk = talk_with_tools(content)
    tokenizer = tokenizer_with(TOOL_CHAT)
    rows = [
        ({"messages": talk, "tools": tools}, {}),
        ({"prompt": talk[:1], "completion": talk[1:], "Tools": tools}, {"template": "chat"}),
        ({"t": talk, "f": tools}, {"fields": "messages=t,tools=f"}),
        ({"t": talk, "tools": tools}, {"fields": "messages=t"}),
    ]
    for row, changes in rows:
        ((prompt, response, trained),) = write(row, tokenizer=tokenizer, **changes)
        assert text_of(prompt) == "[add]<user> 1+1? <|end|>\n<assistant>"
        assert text_of(response[trained]) == 'x{"a": 1}<|end|>2\n<|end|>'
        assert text_of(response[~trained]) == "\n<tool><|end|>\n<assistant>"
    pair = {"prompt": talk[:3], "chosen": talk[3:], "rejected": talk[1:2], "tools": tools}
    (prompt, _, _), (same, rejected, _) = write(pair, "pairs", tokenizer=tokenizer)
    assert text_of(prompt) == text_of(same) and "[add]" in text_of(prompt)
    assert text_of(rejected) == 'x{"a": 1}<|end|>'


def test_tools_that_are_not_shown_make_malformed_rows():
    talk = talk_with_tools("")
    for row, chat, words in (
        ({"messages": talk}, PLAIN_CHAT, "does not use tool_calls"),
        ({"messages": TALK, "tools": TOOLS}, PLAIN_CHAT, "does not use tools"),
        (ROW | {"tools": TOOLS}, TOOL_CHAT, "offers tools, not for data.template = 'none'"),
        (ROW | {"tools": "add"}, TOOL_CHAT, "tools is 'add': must be a list"),
        ({"messages": talk_with_tools("", '{"a": "<|end|>"}')}, TOOL_CHAT, "before its end"),
        ({"messages": talk_with_tools("", "{")}, TOOL_CHAT, "an object of arguments"),
        ({"messages": talk_with_tools("", '{"a": "\\ud800"}')}, TOOL_CHAT, "surrogate"),
    ):
        with pytest.raises(MalformedRow, match=words):
            write(row, tokenizer=tokenizer_with(chat))
    shown = "{% for t in tools %}{{ t.function.name }}{% endfor %}: {{ problem }}"
    ((prompt, *_),) = write(ROW | {"tools": TOOLS}, template=shown, tokenizer=tokenizer_with(""))
    assert text_of(prompt) == "add:  1+1? "
