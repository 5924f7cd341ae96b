"""The console: a live line while something goes on, two lines per step, and now and then a group.

A file or a pipe gets no live line, and one that stays only of what is slow.
"""

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dapo_jax.reporting.scores import Report, Response
from dapo_jax.reporting.tables import describe_problems, report_tables
from dapo_jax.runtime import processes
from dapo_jax.runtime.processes import printable
from dapo_jax.structs import Group

if TYPE_CHECKING:  # it brings TensorFlow, and the first word comes before that
    from dapo_jax.rollout.scheduler import Scheduler

WIDTH = 80  # columns of a step's lines
ANSWER_TAIL, PROMPT_TAIL = 38, 300  # characters that a table shows of a response and of its prompt
SHOWN_SECONDS, SLOW_SECONDS = 0.5, 3.0  # until the live line says it; until a line stays
ETA_STEPS = 10  # by whose mean the ETA goes

# What jax says of every program, once it is lowered and once it is compiled; ours by name.
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
PROGRAMS = {
    "jit(_generate_fn)": "the decode step",
    "jit(prefill_prefix)": "the prefill",
    "jit(_score_fn)": "the score pass",
    "jit(_unstack)": "the copy of the weights for decoding",
    "jit(_update_fn)": "the update",
    "jit(start_responses)": "the start of responses",
}


def duration(seconds: float) -> str:
    """As 45 s, 12 min, 12.3 h, 5.1 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 99.5:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 99.95 else f"{hours / 24:.1f} days"


def fit(parts: Iterable[str], indent: int = 2) -> str:
    """The parts side by side, on as many lines of `WIDTH` columns as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(" " * indent * bool(lines) + part)
    return "\n".join(lines)


def one_line(text: str, tail: int) -> str:
    """The end of a text that a model wrote or a file holds, safe to show in a table."""
    return escape(printable(" ".join(text[-tail:].split())))


def remaining(ends: Sequence[float], steps: int) -> float | None:
    """Seconds that so many steps will take, by when the last ones ended; None if nothing tells.

    The first step of a process only begins the count: it compiles.
    """
    if len(ends) < 2 or steps <= 0:
        return None
    return steps * (ends[-1] - ends[0]) / (len(ends) - 1)


def step_lines(
    step: int, total: int, values: dict[str, float], eta: float | None = None
) -> list[str]:
    """What a step leaves on the console: two lines, and one of the evaluation where there was one.

    A value too wide for its line goes on the next.
    """
    name = f"step {step:>{len(str(total))}}/{total}"
    row = [name, f"reward {values['reward']:+.2f}", f"accuracy {values['accuracy']:.2f}"]
    below = [
        f"  kept {values['kept_fraction']:.2f} (all right {values['all_right_fraction']:.2f}, "
        f"all wrong {values['all_wrong_fraction']:.2f})",
        f"tokens {values['response_tokens_mean']:.0f} ({values['truncated_fraction']:.0%} cut)",
    ]
    if "entropy" in values:
        entropy, gradient = values["entropy"], values["gradient_norm"]
        row.append(f"entropy {entropy:.3f}" if entropy < 10 else f"entropy {entropy:.2f}")
        below.append(f"grad {gradient:.2f}" if gradient < 1000 else f"grad {gradient:.0e}")
    elif "explained_variance" in values:
        row.append("critic alone")
        below.append(f"explains {values['explained_variance']:.2f}")
    else:
        row.append("no update")
    seconds = values["seconds_step"]
    row.append(f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s")
    row += [] if eta is None else [f"ETA {duration(eta)}"]
    lines = [fit(row), fit(below)]
    if "heldout_accuracy" in values:
        low, high = (values.get(f"heldout_accuracy_{end}") for end in ("low", "high"))
        bounds = "" if low is None else f"  (95 %: {low:.3f} to {high:.3f})"
        lines.append(f"  [bold]held-out accuracy {values['heldout_accuracy']:.3f}[/]{bounds}")
    return lines


class _Doing:
    """Something that goes on."""

    def __init__(self, text: str, shown_after: float):
        self.text, self.shown_after, self._since = text, shown_after, time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._since


class Progress:
    """Speaks to a person; on a terminal the live line is redrawn in place.

    Of several processes the first one speaks. No text can make it write what a terminal obeys, or
    end the run because an encoding lacks a character.

    Args:
        speaks: without it nothing is said.
    """

    def __init__(self, speaks: bool = True):
        if reconfigure := getattr(sys.stdout, "reconfigure", None):  # a notebook's has none
            reconfigure(errors="backslashreplace")
        quiet = not (speaks and processes.is_first())
        self.console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._doing: list[_Doing] = []
        self._ends: collections.deque[float] = collections.deque(maxlen=ETA_STEPS + 1)

    def say(self, text: str) -> None:
        self.console.print(printable(text))

    def warn(self, text: str) -> None:
        self.say(f"[bold yellow]warning:[/] {text}")

    def alarm(self, title: str, text: str) -> None:
        """A warning that nobody overlooks."""
        title = f"[bold]warning: {escape(printable(title))}[/]"
        panel = Panel(escape(printable(text)), title=title, border_style="bold yellow")
        self.console.print(panel, soft_wrap=False)

    def __rich__(self) -> Text:
        """The live line as it is now: the innermost of what goes on."""
        outer, *inner = self._doing
        long = (one for one in reversed(inner) if one.seconds() >= one.shown_after)
        doing = next(long, outer)
        text = printable(f"{doing.text} · {doing.seconds():.0f} s")
        return Text(text, no_wrap=True, overflow="ellipsis")

    @contextlib.contextmanager
    def working(
        self, text: str, *, stays: bool = True, shown_after: float = 0.0
    ) -> Iterator[_Doing]:
        """The live line says so while the block lasts; what it yields may change the text.

        Args:
            stays: where there is no live line, a line says it once it is slow.
            shown_after: seconds for which the live line says what goes on around it.
        """
        doing = _Doing(text, shown_after)
        late = threading.Timer(SLOW_SECONDS, lambda: self.say(f"{escape(text)} ..."))
        late.daemon = True
        if stays and not self.console.is_interactive:
            late.start()
        self._doing.append(doing)
        # A notebook is no terminal: each live line would leave an empty widget in the cell.
        live = len(self._doing) == 1 and self.console.is_interactive
        try:
            with self.console.status(self) if live else contextlib.nullcontext():
                yield doing
        finally:
            late.cancel()
            self._doing.remove(doing)

    @contextlib.contextmanager
    def compilation(self) -> Iterator[None]:
        """Says while the block lasts which programs are compiled, and how long slow ones took."""
        going_on: dict[str, tuple[contextlib.ExitStack, _Doing]] = {}

        def hear(event: str, duration_secs: float, **about: str | int) -> None:
            if event not in (LOWERED, COMPILED):
                return
            fun_name = str(about.get("fun_name", ""))
            program = PROGRAMS.get(fun_name, fun_name)
            if fun_name in going_on:
                stack, doing = going_on.pop(fun_name)
                stack.close()
                if (seconds := doing.seconds()) >= SLOW_SECONDS:
                    self.say(f"compiled {escape(program)} in {duration(seconds)}")
            if event == LOWERED:
                stack = contextlib.ExitStack()
                working = self.working(f"compiling {program}", shown_after=SHOWN_SECONDS)
                going_on[fun_name] = stack, stack.enter_context(working)

        jax.monitoring.register_event_duration_secs_listener(hear)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(hear)
            for stack, _ in going_on.values():  # programs that were refused
                stack.close()

    @contextlib.contextmanager
    def collecting(self, step: int, sampler: "Scheduler") -> Iterator[Callable]:
        """Yields the callback that `filtering.collect` calls after every burst."""
        with self.working(f"step {step}: sampling", stays=False) as doing:

            def show(collection) -> None:
                speed = sampler.counts.tokens / doing.seconds()
                doing.text = f"step {step}: {collection.describe()} · {speed:,.0f} tokens/s"

            yield show

    @contextlib.contextmanager
    def evaluating(self, done: int, total: int) -> Iterator[Callable[[Response], None]]:
        """Yields what is called with every new response; `done` were there before.

        A log file gets a line per tenth instead of the live one.
        """
        new, right = 0, 0
        with self.working("evaluating", stays=False) as doing:

            def show(response: Response) -> None:
                nonlocal new, right
                new, right = new + 1, right + response.correct
                speed = new / doing.seconds()
                text = (
                    f"{done + new} of {total} responses · {speed:.1f}/s · {right / new:.2f} right"
                )
                doing.text = f"evaluating: {text}"
                tenths = 10 * (done + new) // total
                if not self.console.is_terminal and tenths > 10 * (done + new - 1) // total:
                    self.say(text)

            yield show

    def report(self, report: Report, marks: Mapping[str, object]) -> None:
        """An evaluation's scores. `marks` says what was evaluated, and how."""
        self.say(
            f"\n[bold]{escape(str(marks['data']))}[/] · {escape(str(marks['policy']))} · "
            f"T {marks['temperature']:g} · top_p {marks['top_p']:g} · "
            f"template {escape(str(marks['template']))}"
        )
        self.say(describe_problems(report))
        for table in report_tables(report):
            self.console.print(table, soft_wrap=False)

    def step(self, step: int, total: int, values: dict[str, float]) -> None:
        """The lines that a step leaves, of `WIDTH` columns at most."""
        self._ends.append(time.perf_counter())
        for line in step_lines(step, total, values, remaining(self._ends, total - step)):
            self.say(line)

    def group(self, group: Group) -> None:
        """One group as a table: what was answered, and what it earned."""
        prompt, answer = group.prompt.text, group.prompt.answer
        table = Table(
            title=f"{one_line(prompt, PROMPT_TAIL)}  (answer {one_line(answer, ANSWER_TAIL)})",
            title_justify="left",
        )
        for name in ("answer tail", "verdict", "reward", "tokens", "cut"):
            table.add_column(name, justify="left" if name == "answer tail" else "right")
        for completion, right, reward in zip(
            group.completions, group.correct, group.rewards, strict=True
        ):
            table.add_row(
                one_line(completion.text, ANSWER_TAIL),
                "[green]right[/]" if right else "[red]wrong[/]",
                f"{reward:+.2f}",
                str(len(completion)),
                "cut" if completion.truncated else "",
            )
        self.console.print(table, soft_wrap=False)
