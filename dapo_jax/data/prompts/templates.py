"""Prompt templates, by name or a user's own: from a problem to the policy's prompt."""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from dapo_jax.data.prompts.chat_template import ChatTemplate
from dapo_jax.data.prompts.template_process import TemplateFails, names_read, render
from dapo_jax.runtime.settings import ConfigError, check_utf8, require
from dapo_jax.structs import Problem, present

# The wording of DAPO's released data (arXiv 2503.14476).
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be "
    "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
    '\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".'
)
# DeepSeek-R1-Zero (arXiv 2501.12948, table 1).
R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves "
    "it. The assistant first thinks about the reasoning process in the mind and then provides the "
    "user with the answer. The reasoning process and answer are enclosed within <think> </think> "
    "and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
    "<answer> answer here </answer>.\nUser: {problem}\nAssistant:"
)
# Qwen2.5-Math's chat, with the system message that it was trained on (arXiv 2409.12122).
QWEN_MATH = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}."
    "<|im_end|>\n<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclasses.dataclass(frozen=True)
class Beside:
    """Parts that a template may show beside the problem.

    Attributes:
        examples: one more than `shots`, so that the asked problem can be left out.
        tools: that the policy may call, for the chat template.
    """

    chat: ChatTemplate | None = None
    system_prompt: str = ""
    examples: tuple[Problem, ...] = ()
    shots: int = 0
    tools: list[dict[str, Any]] | None = None


def _wording(text: str) -> Callable[[Problem, Beside], str]:
    """Braces inside the problem, or elsewhere in the wording, are left alone."""
    return lambda problem, _: text.replace("{problem}", problem.text)


def _worked(problem: Problem) -> str:
    """Solution of a problem, ending in the answer in a box."""
    if "\\boxed" in problem.solution or not problem.answer:
        return problem.solution
    return f"{problem.solution}\nThe answer is $\\boxed{{{problem.answer}}}$.".strip()


def few_shot(problem: Problem, beside: Beside) -> str:
    """Worked examples, then the problem in the same form."""
    others = [e for e in beside.examples if e.fingerprint != problem.fingerprint]
    shown = [f"Problem:\n{e.text}\n\nSolution:\n{_worked(e)}" for e in others[: beside.shots]]
    return "\n\n\n".join([*shown, f"Problem:\n{problem.text}\n\nSolution:"])


def _messages(problem: Problem, beside: Beside) -> list[dict[str, str]]:
    """Messages of a problem, with its own system message, else the config's, if any."""
    system = problem.system or beside.system_prompt
    turns = [*([("system", system)] if system else []), *problem.turns, ("user", problem.text)]
    return [{"role": role, "content": content} for role, content in turns]


def chat(problem: Problem, beside: Beside) -> str:
    """Prompt by the model's own chat template."""
    messages = _messages(problem, beside)
    return present(beside.chat, "chat template").render(messages, tools=beside.tools)


TEMPLATES: dict[str, Callable[[Problem, Beside], str]] = {
    "none": _wording("{problem}"),
    "dapo": _wording(DAPO),
    "r1": _wording(R1),
    "qwen_math": _wording(QWEN_MATH),
    "few_shot": few_shot,
    "chat": chat,
}

# A prompt that asks for one format and a verifier that reads another reward nothing: templates that
# ask for a format name the verifiers that read it.
VERIFIERS_OF = {
    "dapo": ("dapo", "math_label", "math"),
    "r1": ("math", "math_label"),
    "qwen_math": ("math", "math_box"),
    "few_shot": ("math", "math_label", "final_number"),
}


# Names that a user's own jinja may read.
READABLE = {"problem", "system", "subject", "level", "messages"}
SHOWN_OF_TEXT = 60  # characters


@dataclasses.dataclass(frozen=True)
class Template:
    """Prompt template.

    Attributes:
        write: makes the prompt of a problem.
        reads: names of `READABLE` that the template shows.
        digest: digest of a user's own text; else empty.
    """

    write: Callable[[Problem, Beside], str]
    reads: frozenset[str]
    digest: str = ""

    @property
    def shows_system(self) -> bool:
        """True where prompts show a system message."""
        return not self.reads.isdisjoint({"system", "messages"})


def check_chat(setting: str, chat_template: ChatTemplate | None) -> None:
    """Raises `ConfigError` where `data.template` is 'chat' and the model folder has none."""
    if setting == "chat" and chat_template is None:
        raise ConfigError(
            "config.data.template = 'chat': the model folder has no chat template, neither in "
            "tokenizer_config.json nor as chat_template.jinja"
        )


def open_template(setting: str) -> Template:
    """Template of `data.template`: a name, a text of one's own, or a file that holds one.

    Raises:
        ConfigError: the setting is none of these, or the text is broken or shows no problem.
    """
    if setting in TEMPLATES:
        reads = {"problem", "system", "messages"} if setting == "chat" else {"problem"}
        return Template(TEMPLATES[setting], frozenset(reads))
    text = setting if re.search(r"{[{%#]|{problem}", setting) else _read(setting)
    shown = setting if len(setting) <= SHOWN_OF_TEXT else setting[:SHOWN_OF_TEXT] + "..."
    is_jinja = any(sign in text for sign in ("{{", "{%", "{#"))
    # What would reach the model as it stands, though it looks like a place to fill.
    left = set(re.findall(r"(?<!{){(\w+)}(?!})", text)) & READABLE - (
        {"problem"} if not is_jinja else set()
    )
    first = min(left, default="")
    allowed = f"jinja, {{{{ {first} }}}}, in place of {{{first}}}"
    require(not left, "data.template", shown, allowed)
    if is_jinja:
        write, reads = _jinja(text, shown)
    else:
        write, reads = _wording(text), frozenset({"problem"} if "{problem}" in text else ())
    require(
        not reads.isdisjoint({"problem", "messages"}),
        "data.template",
        shown,
        "a text with {problem}, or jinja with {{ problem }}, where the problem goes",
    )
    return Template(write, reads, hashlib.sha256(text.encode()).hexdigest()[:16])


def _read(setting: str) -> str:
    """Text of a file, without the line's end that editors put at its end."""
    path = epath.Path(setting)
    try:
        if path.is_file():
            content = path.read_bytes()
            check_utf8(content)
            return content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except Exception as error:  # of the file, of its encoding, or of a bucket's client
        raise ConfigError(f"config.data.template = {setting!r}: can't be read: {error}") from None
    names = ", ".join(TEMPLATES)
    allowed = f"{names}, or a text with {{problem}} in it, or a file of it (there is no such file)"
    raise ConfigError(f"config.data.template = {setting!r}: must be {allowed}")


def _jinja(text: str, shown: str) -> tuple[Callable[[Problem, Beside], str], frozenset[str]]:
    """Writer of a jinja text, and the names it reads. One problem is written as a trial."""

    @contextlib.contextmanager
    def explained() -> Iterator[None]:
        try:
            yield
        except TemplateFails as error:
            line = "" if error.line is None else f", line {error.line}"
            reason = " ".join(str(error).split())
            message = f"config.data.template = {shown!r}: the jinja fails{line}: {reason}"
            raise ConfigError(message) from None

    with explained():
        reads = names_read(text)
    unknown = ", ".join(sorted(reads - READABLE))
    allowed = f"jinja that reads {', '.join(sorted(READABLE))}; {unknown} is none of these"
    require(not unknown, "data.template", shown, allowed)

    def write(problem: Problem, beside: Beside) -> str:
        values = {
            "problem": problem.text,
            "system": problem.system or beside.system_prompt,
            "subject": problem.subject,
            "level": problem.level,
            "messages": _messages(problem, beside),
        }
        with explained():
            return render(text, values, strict=True)

    write(Problem("", "1+1", "", ""), Beside())
    return write, reads
