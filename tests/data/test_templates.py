"""Prompt templates, the model's and a user's own included, and prompts that would be cut."""

import dataclasses
import io
import json

import pytest
from command_lines import RL, refusal
from conftest import heldout_prompts
from rich.console import Console
from row_files import CHATML, read_table, write_lines

from dapo_jax.config.experiment import Config, Data, Packing
from dapo_jax.data.prompt_stream import Lengths, PromptStream
from dapo_jax.data.prompts.templates import (
    TEMPLATES,
    VERIFIERS_OF,
    Beside,
    ChatTemplate,
    open_template,
    read_chat_template,
)
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.run.build import check_lengths
from dapo_jax.run.console import Progress
from dapo_jax.run.notices import announce_data
from dapo_jax.runtime.storage.downloads import local_folder
from dapo_jax.runtime.tool_calls import read_message
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Problem

EXAMPLES = (
    Problem("1", "What is 1+1?", "2", "x", solution="One and one: $\\boxed{2}$"),
    Problem("2", "What is 2+2?", "4", "x", solution="Twice two."),
    Problem("3", "What is 3+3?", "6", "x"),
)
BESIDE = Beside(ChatTemplate(CHATML), "Be brief.", EXAMPLES, shots=2)


def render(template: str, text: str, beside: Beside = BESIDE) -> str:
    return open_template(template).write(Problem("p", text, "", ""), beside)


def ask(text: str, system: str = "") -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": text}]


@pytest.mark.parametrize("template", [*TEMPLATES, "{problem}", "{{ problem }}"])
def test_templates_leave_braces_of_the_problem_alone(template):
    text = r"\frac{1}{2} {x} {problem} {{ level }} {% if %}"
    assert text in render(template, text)


def test_templates_ask_in_the_published_words():
    dapo = render("dapo", "1+1?")
    assert dapo.startswith("Solve the following math problem step by step. The last line of your")
    assert dapo.endswith('1+1?\n\nRemember to put your answer on its own line after "Answer:".')
    r1 = render("r1", "1+1?")
    assert r1.startswith("A conversation between User and Assistant. The user asks a question")
    assert r1.endswith("<answer> answer here </answer>.\nUser: 1+1?\nAssistant:")
    assert render("qwen_math", "1+1?") == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within "
        "\\boxed{}.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert set(VERIFIERS_OF) <= set(TEMPLATES)


def test_the_users_turn_has_its_own_wording_inside_a_chat(tiny_folder, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    tokenizer = Tokenizer.from_folder(tmp_path)
    (tmp_path / "user.txt").write_text("Compute {problem}\nAnswer:\n")
    wordings = {
        str(tmp_path / "user.txt"): "Compute {}\nAnswer:",
        "{problem}!": "{}!",
        "{{ level }}{{ problem }}{{ system }}": "{}Be brief.",
        "{{ messages[-1].content }}?": "{}?",
    }
    for user_template, expected in wordings.items():
        data = Data(template="chat", user_template=user_template, max_prompt_tokens=1024)
        data.system_prompt = "Be brief."
        prompt = next(PromptStream(data, 0, tokenizer))
        user = f"<|im_start|>user\n{expected.format(prompt.problem)}<|im_end|>\n"
        assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n" + user)
        assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_chat_templates_may_use_what_transformers_offers():
    text = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%d %b %Y') }}"
        "{% generation %}-{% endgeneration %}\n    {% if tools %}tools{% endif %}\n"
    )
    rendered = ChatTemplate(text, {"bos_token": "<s>"}).render(ask("<é>"))
    assert rendered == '<s>{"role": "user", "content": "<é>"}26 Jul 2024-'


@pytest.mark.parametrize(("template", "reason"), read_table(__file__, "fails"))
def test_a_template_that_fails_or_reaches_out_is_one_clear_line(template, reason):
    with pytest.raises(ConfigError, match=f"chat template fails.*: .*{reason}"):
        ChatTemplate(template).render(ask("Hi"))


def test_the_folder_says_which_template_and_tokens(tmp_path):
    assert read_chat_template(tmp_path) is None
    settings = {"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": "{{ 1 }}"}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(settings))
    assert read_chat_template(tmp_path).render([]) == "1"
    named = [{"name": "tool_use", "template": "2"}, {"name": "default", "template": "3"}]
    path.write_text(json.dumps(settings | {"chat_template": named}))
    assert read_chat_template(tmp_path).render([]) == "3"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}4{{ eos_token }}")
    assert read_chat_template(tmp_path).render([]) == "<s>4"


def test_prompts_of_a_folder_follow_its_chat_template(tiny_folder, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    data = Data(template="chat", heldout_problems=3)
    with pytest.raises(ConfigError, match="no chat template"):
        PromptStream(data, 0, Tokenizer.from_folder(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("=={{ messages[0].content }}<|end|>")
    tokenizer = Tokenizer.from_folder(tmp_path)
    for prompt in (next(PromptStream(data, 0, tokenizer)), heldout_prompts(data, 0, tokenizer)[0]):
        assert prompt.text == f"=={prompt.problem}<|end|>"
        assert prompt.tokens[-1] == 1  # the end token, not its letters


def test_few_shot_examples_are_training_problems_keyed_by_the_seed(tmp_path):
    sums = [f"{i}+{j}=" for i in range(10) for j in range(10) if i != j]
    rows = [{"problem": text, "answer": "0"} for text in sums]
    data = Data(
        source="arithmetic",
        heldout_source=write_lines(tmp_path / "sums.jsonl", rows),
        template="few_shot",
        few_shot=3,
        min_terms=2,
        max_terms=2,
        max_prompt_tokens=999,
    )

    def first(seed: int) -> str:
        return next(PromptStream(data, seed, arithmetic_tokenizer())).text

    assert first(1) == first(1) != first(2)
    held = heldout_prompts(data, 1, arithmetic_tokenizer())
    shown = first(1).split("Problem:\n")[1:4]
    assert all(part in prompt.text for part in shown for prompt in held)
    assert not {part.split("\n")[0] for part in shown} & {prompt.problem for prompt in held}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED = {"name": "add", "arguments": '{"a": 1}'}
CALLS = [{"id": "abcdefghi", "type": "function", "function": CALLED}]
SHOWS_TOOLS = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{{ messages[0].content }}"
)
SHOWS_CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments.a }}{% endfor %}"
    "{% endfor %}{{ tools | length if tools else '' }}"
)


def write_templates(folder, texts, files=False):
    """A folder with several templates, in files or in tokenizer_config.json."""
    named = [{"name": name, "template": text} for name, text in texts.items()]
    settings = {} if files else {"chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    for name, text in texts.items() if files else ():
        place = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
        (folder / f"{place}.jinja").write_text(text)


@pytest.mark.parametrize("files", [False, True])
def test_tools_are_shown_by_the_template_for_them(tmp_path, monkeypatch, files):
    write_templates(tmp_path, {"tool_use": SHOWS_TOOLS, "default": "-", "rag": "x"}, files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    for folder in (tmp_path, local_folder(tmp_path, weights=False)):  # and a bucket's copy
        chat = read_chat_template(folder)
        assert chat.render(ask("Hi")) == chat.render(ask("Hi"), tools=[]) == "-"
        assert chat.render(ask("Hi"), tools=[TOOL]) == "<add>Hi"
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    write_templates(tmp_path, {"tool_use": SHOWS_TOOLS})
    with pytest.raises(ConfigError, match="no 'default'"):
        read_chat_template(tmp_path).render(ask("Hi"))


def test_a_template_that_ignores_tools_or_their_calls_is_an_error():
    messages = [*ask("Hi"), {"role": "assistant", "content": None, "tool_calls": CALLS}]
    for template in ("{{ messages[0].content }}", "{# tools #}-", "{% if tools %}{% endif %}-"):
        with pytest.raises(ConfigError, match="does not use tools") as raised:
            ChatTemplate(template).render(ask("add"), tools=[TOOL])
        assert raised.value.field == "tools"
        with pytest.raises(ConfigError, match="does not use tool_calls"):
            ChatTemplate(template).render(messages)
    demands = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}-"
    assert ChatTemplate(demands).render(ask("Hi"), tools=[TOOL]) == "-"


def test_messages_reach_the_template_whole():
    asked = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": None}
    call = {"role": "assistant", "content": None, "tool_calls": CALLS, "thought": "hm"}
    read = [read_message(message) for message in (asked, call)]
    del call["content"]  # transformers too leaves out what is null
    function = {"name": "add", "arguments": {"a": 1}}
    assert read == [
        {"role": "user", "content": "ab"},
        call | {"tool_calls": [CALLS[0] | {"function": function}]},
    ]
    assert ChatTemplate(SHOWS_CALLS).render(read) == "user:abassistant:abcdefghi1"


@pytest.mark.parametrize(("settings", "names", "shown"), read_table(__file__, "special tokens"))
def test_special_tokens_are_those_of_any_file(tiny_folder, tmp_path, settings, names, shown):
    for name in ("config.json", "tokenizer.json"):
        content = json.loads((tiny_folder / name).read_text())
        (tmp_path / name).write_text(json.dumps(content))
    # The ids in config.json name none, as for transformers.
    settings = {"eos_token": "<|end|>"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% if x_token is defined %}{{ x_token }}{% endif %}{{ eos_token }}"
    )
    chat = Tokenizer.from_folder(tmp_path).chat
    if shown is None:
        with pytest.raises(ConfigError, match="fails: the model folder names no bos_token"):
            chat.render(ask("Hi"))
    else:
        assert chat.render(ask("Hi")) == shown


# --- templates of a user --------------------------------------------------------------------

PROBLEM = Problem("p", "1+1?", "2", "", "algebra", "3", turns=(("user", "Hi"), ("assistant", "Ho")))
MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# The template, and what it makes of PROBLEM with the system message 'S'.
OWN = {
    "Q: {problem} {x}\n\n": "Q: 1+1? {x}\n\n",
    "{{ problem }}\n": "1+1?",
    "{{ system }}|{{ subject }} {{ level }}|{{ problem | upper }}": "S|algebra 3|1+1?",
    "{% if level == '3' %}hard: {% endif %}\n{{ problem }}": "hard: 1+1?",
    MESSAGES: "<system>S<user>Hi<assistant>Ho<user>1+1?",
}


def write_own(setting: str, problem: Problem = PROBLEM) -> str:
    return open_template(setting).write(problem, Beside(ChatTemplate(CHATML), "S"))


@pytest.mark.parametrize(("text", "expected"), OWN.items())
def test_an_own_template_is_a_text_or_a_file(tmp_path, text, expected):
    assert write_own(text) == expected
    for end in ("\n", "\r\n"):  # of the last line, which an editor adds
        (tmp_path / "t.txt").write_bytes((text + end).encode())
        assert write_own(str(tmp_path / "t.txt")) == expected
    assert open_template(text).digest and not open_template("dapo").digest


def test_a_row_s_own_system_message_and_earlier_turns_come_first():
    own = dataclasses.replace(PROBLEM, system="Mine")
    expected = [("system", "Mine"), ("user", "Hi"), ("assistant", "Ho"), ("user", "1+1?")]
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in expected)
    assert write_own("chat", own) == shown + "<|im_start|>assistant\n"
    assert write_own("{{ system }}{{ problem }}", own) == "Mine1+1?"


@pytest.mark.parametrize(("text", "reason"), read_table(__file__, "templates"))
def test_a_template_that_is_none_stops_before_the_run(tmp_path, text, reason, capsys):
    (tmp_path / "empty.txt").write_text("Solve:\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff{problem}")
    text = text.replace("{tmp}", str(tmp_path))
    message = refusal(Config, [RL, f"--config.data.template={text}"], capsys)
    assert message.startswith("error: config.data.template = "), message
    assert all(part in message for part in reason.split(".*")), message


@pytest.fixture
def conversations(tmp_path):
    """Data settings over a file whose rows have a system message, one of them earlier turns."""
    turns = [[{"role": "system", "content": "0"}]] * 6
    turns[3] = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows = [
        {"messages": [*before, {"role": "user", "content": f"{i}+1="}], "answer": i + 1}
        for i, before in enumerate(turns)
    ]
    source = write_lines(tmp_path / "c.jsonl", rows)
    return Data(source=source, template=MESSAGES, max_prompt_tokens=99)


def test_conversations_need_a_template_that_shows_them(conversations):
    prompts = heldout_prompts(conversations, 0, arithmetic_tokenizer())
    stream = PromptStream(conversations, 0, arithmetic_tokenizer())
    shown = {
        prompt.problem: prompt.text for prompt in [*prompts, *(next(stream) for _ in range(5))]
    }
    assert len(shown) == 6
    (complaint,) = stream.warnings()  # the embedded task's tokenizer has no letters
    assert "vocabulary lacks '<>emrstuy'" in complaint
    for held in (0, 4):  # whether it is trained on or held out
        plain = dataclasses.replace(conversations, template="none", heldout_problems=held)
        with pytest.raises(ConfigError, match="template = 'none': must be chat.*1 rows .* as c-4"):
            PromptStream(plain, 0, arithmetic_tokenizer())


def announced(config: Config) -> str:
    """What the console says of the data."""
    progress = Progress()
    progress.console = Console(file=io.StringIO(), width=300)
    prompts = PromptStream(config.data, 0, arithmetic_tokenizer())
    check_lengths(config, prompts.lengths)
    announce_data(config, prompts, progress)
    return progress.console.file.getvalue()


@pytest.fixture
def sums(tmp_path):
    """A config over a file of ten prompts of 4 tokens and two of 10."""
    texts = [f"{i}+1=" for i in range(10)] + ["0+1+2+3+4=", "1+1+2+3+4="]
    source = write_lines(tmp_path / "sums.jsonl", [{"problem": t, "answer": 1} for t in texts])
    return Config(data=Data(source=source, heldout_problems=0, max_prompt_tokens=9))


def test_prompts_that_are_cut_raise_an_alarm(sums):
    shown = announced(sums)
    assert "prompts of more than 9 tokens lose their beginning" in shown
    assert "2 of 12 looked at, the longest of 10 tokens" in shown and "fit under 64" in shown
    sums.data.max_prompt_tokens = 10
    assert "lose" not in announced(sums)
    sums.data.max_prompt_tokens, sums.data.overlong_prompts = 9, "drop"
    shown = announced(sums)
    assert "dropped: 2 of 12 looked at" in shown and "fit under" not in shown
    sums.data.max_prompt_tokens = 3
    assert "prompts of more than 3 tokens are dropped" in announced(sums)


def test_a_run_on_prompts_most_of_which_are_cut_is_refused(sums):
    sums.data.max_prompt_tokens = 3
    with pytest.raises(ConfigError, match="max_prompt_tokens = 3: .*such as 64: .*12 of 12"):
        announced(sums)
    sums.data = Data(max_prompt_tokens=5)  # generated ones too
    with pytest.raises(ConfigError, match="arithmetic: 32 of 32"):
        announced(sums)
    sums.packing = Packing(row_tokens=100)
    with pytest.raises(ConfigError, match="such as 128 with packing.row_tokens of at least 224"):
        check_lengths(sums, [Lengths("x", 2, 2, 65)])
