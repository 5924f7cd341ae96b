"""Rendering of templates in a process of its own, which is killed where one takes too long."""

from typing import Any

from dapo_jax.runtime.workers.parent import RestartingWorker

WORKER = "dapo_jax.data.prompts.template_worker"
WAIT_SECONDS = 60.0  # for a reply, on a machine so busy that the worker gets no time to compute one
LONGEST_REPLY = 8 << 20  # bytes: more than the longest text, each character escaped
TOO_MUCH = "it computes for over 2 s, or needs too much memory"


class TemplateFails(Exception):
    """Failure of a template.

    Attributes:
        line: line of the template, where it is known.
        late: whether the template takes too long, or too much memory.
    """

    def __init__(self, message: str, line: int | None = None, late: bool = False):
        super().__init__(message)
        self.line, self.late = line, late


_worker = RestartingWorker(WORKER, max_reply_bytes=LONGEST_REPLY)


def _ask(template: str, strict: bool, **job: Any) -> dict:
    try:
        reply = _worker.ask({"template": template, "strict": strict} | job, WAIT_SECONDS)
    except (OSError, ValueError):
        raise TemplateFails(TOO_MUCH, late=True) from None
    if "error" in reply:
        raise TemplateFails(reply["error"], reply["line"])
    return reply


def render(template: str, values: dict[str, Any], *, strict: bool = False) -> str:
    """Text that a template makes of values, which are such as JSON has.

    Args:
        strict: whether a name without a value is an error, where it would write nothing.

    Raises:
        TemplateFails: the template is broken, refuses the values or takes too long.
    """
    return _ask(template, strict, values=values)["text"]


def names_read(template: str) -> frozenset[str]:
    """Names of values that a template reads. Raises `TemplateFails` where it is broken."""
    return frozenset(_ask(template, True)["reads"])
