"""Prompt templates, by name or the user's."""

import dataclasses
import hashlib
import json
import pathlib
import re
import reprlib
from collections.abc import Callable
from typing import Any

from etils import epath

from dapo_jax.data.prompts import sandbox
from dapo_jax.runtime.text_files import check_utf8, read_file, read_json
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import Problem, present

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
QUESTION: Messages = [{"role": "user", "content": "?"}]
DEFAULT, TOOL_USE = "default", "tool_use"  # names of chat templates; the second shows tools

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


class ChatTemplate:
    """Chat templates of a model by name: from messages to the text of a prompt."""

    def __init__(self, texts: str | dict[str, str], special_tokens: dict[str, str] | None = None):
        self._texts = {DEFAULT: texts} if isinstance(texts, str) else texts
        self._special_tokens = special_tokens or {}

    def render(
        self,
        messages: Messages,
        field: str = "config.data.template = 'chat'",
        open_answer: bool = True,
        tools: Tools = None,
    ) -> str:
        """Return the text of the prompt; raise `ConfigError` about `field` if the template fails.

        Also if the template ignores the tools, or their calls.

        Args:
            messages: each with `role`, `content` and what else the template reads.
            open_answer: end with the beginning of the assistant's turn.
            tools: functions that the model may call, in the format of OpenAI's API.
        """
        name = TOOL_USE if tools and TOOL_USE in self._texts else DEFAULT
        if name not in self._texts:
            raise ConfigError(f"{field}: there are chat templates {[*self._texts]}, no {name!r}")

        def write(messages: Messages, tools: Tools) -> str:
            values = {"messages": messages, "tools": tools or None, "documents": None}
            values |= {"add_generation_prompt": open_answer, **self._special_tokens}
            subject = f"{field}: the model's chat template"
            return sandbox.render(subject, self._texts[name], False, values)

        text = write(messages, tools)

        def ignores(talk: Messages, silent: Messages, tools_too: Tools) -> bool:
            try:
                return write(talk, tools) == write(silent, tools_too)
            except ConfigError:  # it demands them
                return False

        silent = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
        # Some templates show tools only if the user's message is the last.
        is_silent = tools and all(ignores(talk, talk, None) for talk in (messages, QUESTION))
        ignored = "tools" if is_silent else ""
        if silent != messages and ignores(messages, silent, tools):
            ignored = "tool_calls"
        if ignored:
            raise ConfigError(f"{field}: the model's chat template does not use {ignored}", ignored)
        return text

    def reads(self, name: str) -> bool:
        """Return True if a template holds this name."""
        return any(name in text for text in self._texts.values())


def read_chat_template(folder: pathlib.Path, field: str = "model.folder") -> ChatTemplate | None:
    """Read the templates of a folder's files, else of tokenizer_config.json; else return None.

    Special tokens are those that a file of the tokenizer names, as for transformers: an id in
    config.json names none.
    """

    def read(name: str) -> dict[str, Any]:
        return read_json(folder / name, field) if (folder / name).exists() else {}

    settings = read("tokenizer_config.json")
    texts: Any = settings.get("chat_template") or {}
    if isinstance(texts, list):
        entries = [entry for entry in texts if isinstance(entry, dict)]
        texts = {str(entry.get("name")): entry.get("template") for entry in entries}
    elif not isinstance(texts, dict):
        texts = {DEFAULT: texts}
    paths = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").exists():
        paths[DEFAULT], texts = folder / "chat_template.jinja", {}
    texts = texts | {name: read_file(path, field) for name, path in paths.items()}
    extra = settings.get("extra_special_tokens")
    settings |= extra if isinstance(extra, dict) else {}
    settings |= {k: v for k, v in read("special_tokens_map.json").items() if v is not None}
    special: dict[str, Any] = {}
    for name, token in settings.items():
        if name.endswith("_token") and not isinstance(token, bool):
            token = token.get("content") if isinstance(token, dict) else token
            special[name] = "" if token is None else token
    shown = {f"chat_template {name}".removesuffix(f" {DEFAULT}"): texts[name] for name in texts}
    for name, value in (shown | special).items():
        if not isinstance(value, str):
            problem = f"{name} = {reprlib.repr(value)}: must be text"
            raise ConfigError(f"config.{field}: {folder}: {problem}", field)
    return ChatTemplate(texts, special) if texts else None


@dataclasses.dataclass(frozen=True)
class Beside:
    """Parts that a template may show next to the problem."""

    chat: ChatTemplate | None = None
    system_prompt: str = ""
    examples: tuple[Problem, ...] = ()  # one more than `shots`: the problem itself is left out
    shots: int = 0
    tools: Tools = None  # functions that the policy may call
    write_user: "Write | None" = None  # the user's turn in a chat; None: the problem


Write = Callable[[Problem, Beside], str]


def _wording(text: str) -> Write:
    return lambda problem, _: text.replace("{problem}", problem.text)


def _worked(problem: Problem) -> str:
    """Return the solution of a problem, ending with the answer in a box."""
    if "\\boxed" in problem.solution or not problem.answer:
        return problem.solution
    solution = f"{problem.solution}\n" if problem.solution else ""
    return f"{solution}The answer is $\\boxed{{{problem.answer}}}$."


def few_shot(problem: Problem, beside: Beside) -> str:
    """Write worked examples, then the problem in the same form."""
    others = [e for e in beside.examples if e.fingerprint != problem.fingerprint]
    shown = [f"Problem:\n{e.text}\n\nSolution:\n{_worked(e)}" for e in others[: beside.shots]]
    return "\n\n\n".join([*shown, f"Problem:\n{problem.text}\n\nSolution:"])


def _messages(problem: Problem, beside: Beside) -> Messages:
    """Return the messages of a problem, after its own system message or else the config's."""
    system = problem.system or beside.system_prompt
    user = problem.text
    if beside.write_user:
        user = beside.write_user(problem, dataclasses.replace(beside, write_user=None))
    turns = [*problem.turns, ("user", user)]
    messages = [{"role": role, "content": content} for role, content in turns]
    if problem.messages:
        messages = json.loads(problem.messages)
        asked = max(i for i, message in enumerate(messages) if message["role"] == "user")
        messages[asked]["content"] = user  # an environment may have changed it
    return [*([{"role": "system", "content": system}] if system else []), *messages]


def _tools(problem: Problem, beside: Beside) -> Messages:
    return [*(beside.tools or ()), *json.loads(problem.tools or "[]")]


def chat(problem: Problem, beside: Beside) -> str:
    template = present(beside.chat, "chat template")
    return template.render(_messages(problem, beside), tools=_tools(problem, beside))


TEMPLATES: dict[str, Write] = {
    "none": _wording("{problem}"),
    "dapo": _wording(DAPO),
    "r1": _wording(R1),
    "qwen_math": _wording(QWEN_MATH),
    "few_shot": few_shot,
    "chat": chat,
}

# Templates that ask for an answer format, and the verifiers that read it: other verifiers would
# never find an answer.
VERIFIERS_OF = {
    "dapo": ("dapo", "math_label", "math"),
    "r1": ("math", "math_label"),
    "qwen_math": ("math", "math_box"),
    "few_shot": ("math", "math_label", "final_number"),
}

READABLE = {"problem", "system", "subject", "level", "messages", "tools"}  # names in a user's jinja
MAX_SHOWN_CHARACTERS = 60


@dataclasses.dataclass(frozen=True)
class Template:
    """Prompt template."""

    write: Write
    reads: frozenset[str]  # names of `READABLE` that it shows
    digest: str = ""  # of a user's text; empty for a named template

    def shows(self, problem: Problem) -> bool:
        """Return True if the template reads the turns and the tools that a problem has."""
        needs = {"messages": problem.turns or problem.messages, "tools": problem.tools}
        return all(name in self.reads for name, value in needs.items() if value)

    @property
    def shows_system(self) -> bool:
        return not self.reads.isdisjoint({"system", "messages"})


def check_chat(setting: str, chat_template: ChatTemplate | None) -> None:
    """Raise `ConfigError` if `data.template` is 'chat' and the model folder has no template."""
    if setting == "chat" and chat_template is None:
        raise ConfigError(
            "config.data.template = 'chat': the model folder has no chat template, neither in "
            "tokenizer_config.json nor as chat_template.jinja"
        )


def open_template(setting: str) -> Template:
    """Return the template of `data.template`: a name, a text, or a file with a text."""
    if setting in TEMPLATES:
        more = {"system", "messages", "tools"} if setting == "chat" else set()
        return Template(TEMPLATES[setting], frozenset({"problem"} | more))
    return open_text(setting)


def open_text(setting: str, field: str = "data.template") -> Template:
    """Return the template that is a text or a file with a text."""
    text = setting if re.search(r"{[{%#]|{problem}", setting) else _read(setting, field)
    is_cut = len(setting) > MAX_SHOWN_CHARACTERS
    shown = setting[:MAX_SHOWN_CHARACTERS] + "..." if is_cut else setting
    is_jinja = any(sign in text for sign in ("{{", "{%", "{#"))
    # Placeholders that would reach the model unfilled.
    unfilled = set(re.findall(r"(?<!{){(\w+)}(?!})", text)) & READABLE
    unfilled -= set() if is_jinja else {"problem"}
    first = min(unfilled, default="")
    allowed = f"jinja, {{{{ {first} }}}}, in place of {{{first}}}"
    require(not unfilled, field, shown, allowed)
    reads = set(re.findall(r"{(problem)}", text))
    if is_jinja:
        reads = sandbox.read_names(f"config.{field} = {shown!r}: the jinja", text)
        unknown = ", ".join(sorted(reads - READABLE))
        allowed = f"jinja that reads {', '.join(sorted(READABLE))}; {unknown} is none of these"
        require(not unknown, field, shown, allowed)
    allowed = "a text with {problem}, or jinja with {{ problem }}, in place of the problem"
    require(not {"problem", "messages"}.isdisjoint(reads), field, shown, allowed)
    write = _jinja(text, f"config.{field} = {shown!r}: the jinja") if is_jinja else _wording(text)
    return Template(write, frozenset(reads), hashlib.sha256(text.encode()).hexdigest()[:16])


def check_system(template: str, system_prompt: str, fields: str) -> None:
    """Raise `ConfigError` for a system message that the template does not show.

    `fields` is `data.fields` if it names a system field, else empty.
    """
    shows_system = open_template(template).shows_system
    allowed = f"without a system message with data.template = {template!r}: it shows none"
    for field, value in {"data.system_prompt": system_prompt, "data.fields": fields}.items():
        require(shows_system or not value, field, value, allowed)


def _read(setting: str, field: str) -> str:
    """Read a file without the newline that editors add at its end."""
    path = epath.Path(setting)
    try:
        if path.is_file():
            content = path.read_bytes()
            check_utf8(content)
            return content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except Exception as error:  # from the file system, the encoding or a bucket's client
        raise ConfigError(f"config.{field} = {setting!r}: can't be read: {error}") from None
    names = f"{', '.join(TEMPLATES)}, or " * (field == "data.template")
    allowed = f"{names}a text with {{problem}} in it, or a file of it (there is no such file)"
    raise ConfigError(f"config.{field} = {setting!r}: must be {allowed}")


def _jinja(text: str, subject: str) -> Write:
    """Return the writer of a jinja text, after a trial."""

    def write(problem: Problem, beside: Beside) -> str:
        values = {
            "problem": problem.text,
            "system": problem.system or beside.system_prompt,
            "subject": problem.subject,
            "level": problem.level,
            "messages": _messages(problem, beside),
            "tools": _tools(problem, beside),
        }
        return sandbox.render(subject, text, True, values)

    write(Problem("", "1+1", "", ""), Beside())
    return write
