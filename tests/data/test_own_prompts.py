"""Templates of a user's own, prompts that would be cut, and a run on a file of one's own."""

import dataclasses
import io
import json

import pytest
from command_lines import RL, refusal
from conftest import heldout_prompts
from rich.console import Console
from row_files import CHATML, read_table

from dapo_jax.config.experiment import Config, Data, Packing
from dapo_jax.data.prompt_stream import Lengths, PromptStream
from dapo_jax.data.prompts.templates import Beside, ChatTemplate, open_template
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.reporting.console import Progress
from dapo_jax.run.build import check_lengths
from dapo_jax.run.notices import announce_data
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Problem

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


def write(setting: str, problem: Problem = PROBLEM) -> str:
    return open_template(setting).write(problem, Beside(ChatTemplate(CHATML), "S"))


@pytest.mark.parametrize(("text", "expected"), OWN.items())
def test_an_own_template_is_a_text_or_a_file(tmp_path, text, expected):
    assert write(text) == expected
    for end in ("\n", "\r\n"):  # of the last line, which an editor adds
        (tmp_path / "t.txt").write_bytes((text + end).encode())
        assert write(str(tmp_path / "t.txt")) == expected
    assert open_template(text).digest and not open_template("dapo").digest


def test_a_problems_text_is_never_a_template():
    text = "{problem} {{ level }} {% if %}"
    for template in ("{problem}", "{{ problem }}", MESSAGES):
        assert write(template, dataclasses.replace(PROBLEM, text=text)).endswith(text)


def test_a_row_s_own_system_message_and_earlier_turns_come_first():
    own = dataclasses.replace(PROBLEM, system="Mine")
    expected = [("system", "Mine"), ("user", "Hi"), ("assistant", "Ho"), ("user", "1+1?")]
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in expected)
    assert write("chat", own) == shown + "<|im_start|>assistant\n"
    assert write("{{ system }}{{ problem }}", own) == "Mine1+1?"


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
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Data(source=str(tmp_path / "c.jsonl"), template=MESSAGES, max_prompt_tokens=99)


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
    rows = (json.dumps({"problem": text, "answer": 1}) for text in texts)
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    data = Data(source=str(tmp_path / "sums.jsonl"), heldout_problems=0, max_prompt_tokens=9)
    return Config(data=data)


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
