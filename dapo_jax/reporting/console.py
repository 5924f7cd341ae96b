"""Console: a live line of the activity, two lines per step, and now and then a group.

A file or a pipe gets no live line, and a line of its own only about a slow activity.
"""

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dapo_jax.contracts import Sampler
from dapo_jax.reporting.compile_seconds import PROGRAMS, CompileSeconds
from dapo_jax.reporting.scores import Report, Response
from dapo_jax.reporting.tables import describe_problems, report_tables
from dapo_jax.runtime import processes
from dapo_jax.runtime.processes import printable
from dapo_jax.runtime.streams import BrokenPipeSafeStream
from dapo_jax.structs import Completion, Group, Turn

WIDTH = 80  # columns of a step's lines
ANSWER_TAIL, PROMPT_TAIL = 38, 300  # characters that a table shows of a response and of its prompt
SHOWN_SECONDS, SLOW_SECONDS = 0.5, 3.0  # until the live line shows it; until a line stays
COMPILING_SECONDS = 1.0  # until a line stays that something compiles: the cache answers sooner
ETA_STEPS = 10  # steps whose mean duration the ETA assumes

# Events of jax for every program that is lowered, then found in the cache or compiled.
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
FOUND = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"


def duration(seconds: float) -> str:
    """Seconds in words: 45 s, 12 min, 12.3 h, 5.1 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 99.5:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 99.95 else f"{hours / 24:.1f} days"


def fit(parts: Iterable[str], indent: int = 2) -> str:
    """Parts side by side, on as many lines of `WIDTH` columns as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(" " * indent * bool(lines) + part)
    return "\n".join(lines)


def one_line(text: str, tail: int) -> str:
    """End of a text from a model or a file, safe to show in a table."""
    return escape(printable(" ".join(text[-tail:].split())))


def remaining(ends: Sequence[float], steps: int) -> float | None:
    """Estimated seconds of the next `steps`; None before two steps have ended.

    Args:
        ends: times, in seconds, when the last steps ended. The first step of a process compiles,
            so its end only begins the count.
    """
    if len(ends) < 2 or steps <= 0:
        return None
    return steps * (ends[-1] - ends[0]) / (len(ends) - 1)


def step_lines(
    step: int, total: int, values: dict[str, float], eta: float | None = None
) -> list[str]:
    """Console lines of a step: two, and one about an evaluation where there was one.

    Args:
        eta: seconds to the end of the run.
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


class _Activity:
    """Text of an activity and when it began."""

    def __init__(self, text: str, shown_after: float):
        self.text, self.shown_after, self._since = text, shown_after, time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._since

    def describe(self) -> str:
        """Text of the live line."""
        return f"{self.text} · {self.seconds():.0f} s"


class _Compilation(_Activity):
    """Activity whose seconds the last time are known, or not: None."""

    def __init__(self, program: str, usual: float | None):
        expected = "longer the first time" if usual is None else f"about {duration(usual)}"
        super().__init__(f"compiling {program}: {expected}", SHOWN_SECONDS)
        self._program, self._usual = program, usual

    def describe(self) -> str:
        left = (self._usual or 0) - self.seconds()
        if self._usual is None or left < 0:
            return super().describe()
        return f"compiling {self._program}: {left:.0f} s left of about {duration(self._usual)}"


def _turns(completion: Completion) -> Text:
    """End of a trajectory, observations dim and in brackets; else that of the response."""
    parts = []
    for turn in completion.turns or (Turn(True, 0, completion.text),):
        text = printable(" ".join(turn.text[-ANSWER_TAIL:].split()))
        parts.append(Text(text) if turn.drawn else Text(f"[{text}]", "dim italic"))
    return Text(" | ").join(parts)[-ANSWER_TAIL:]


class Progress:
    """Console of a run; on a terminal with a live line that is redrawn in place.

    Of several processes the first one prints. Control characters of a text are written out, and no
    text ends the run because an encoding lacks a character.

    Args:
        speaks: False for a silent one.
    """

    def __init__(self, speaks: bool = True):
        if reconfigure := getattr(sys.stdout, "reconfigure", None):  # a notebook's has none
            reconfigure(errors="backslashreplace")
        quiet = not (speaks and processes.is_first())
        output: Any = BrokenPipeSafeStream("stdout")
        options: Any = {"file": output, "highlight": False, "soft_wrap": True, "quiet": quiet}
        self.console = Console(**options)
        if self.console.is_jupyter:  # lines of text, where rich would make HTML of each
            self.console = Console(**options, force_jupyter=False, force_terminal=False)
        self._activities: list[_Activity] = []
        self._ends: collections.deque[float] = collections.deque(maxlen=ETA_STEPS + 1)

    def say(self, text: str) -> None:
        """Prints a text with rich's markup."""
        self.console.print(printable(text))

    def warn(self, text: str) -> None:
        """Prints a warning with rich's markup."""
        self.say(f"[bold yellow]warning:[/] {text}")

    def alarm(self, title: str, text: str) -> None:
        """Prints a warning in a panel, its texts without markup."""
        title = f"[bold]warning: {escape(printable(title))}[/]"
        panel = Panel(escape(printable(text)), title=title, border_style="bold yellow")
        self.console.print(panel, soft_wrap=False)

    def __rich__(self) -> Text:
        """Live line: the innermost activity that has lasted long enough to be shown."""
        outer, *inner = self._activities
        shown = (work for work in reversed(inner) if work.seconds() >= work.shown_after)
        activity = next(shown, outer)
        return Text(printable(activity.describe()), no_wrap=True, overflow="ellipsis")

    @contextlib.contextmanager
    def working(
        self,
        text: str | _Activity,
        *,
        stays: bool = True,
        shown_after: float = 0.0,
        said_after: float | None = None,
    ) -> Iterator[_Activity]:
        """Shows an activity while the block lasts; the yielded object's text may be changed.

        Args:
            stays: whether a slow one gets a line where there is no live line.
            shown_after: seconds until the live line shows it instead of the activity around it.
            said_after: seconds until it is slow; None: `SLOW_SECONDS`.
        """
        activity = _Activity(text, shown_after) if isinstance(text, str) else text
        slow, line = SLOW_SECONDS if said_after is None else said_after, escape(activity.text)
        late = threading.Timer(slow, lambda: self.say(f"{line} ..."))
        late.daemon = True
        if stays and not self.console.is_interactive:
            late.start()
        self._activities.append(activity)
        live = len(self._activities) == 1 and self.console.is_interactive
        try:
            with self.console.status(self) if live else contextlib.nullcontext():
                yield activity
        finally:
            late.cancel()
            self._activities.remove(activity)

    @contextlib.contextmanager
    def compilation(self, model: str) -> Iterator[None]:
        """Shows compilations while the block lasts: the time to go, and how long slow ones took.

        Args:
            model: the folder; its programs' seconds are remembered.
        """
        open_programs: dict[str, tuple[contextlib.ExitStack, _Activity]] = {}
        remembered, found = CompileSeconds(model), set[int]()  # threads that found a program

        def hear_found(event: str, **_: str | int) -> None:
            if event == FOUND:
                found.add(threading.get_ident())

        def hear(event: str, duration_secs: float, **about: str | int) -> None:
            if event not in (LOWERED, COMPILED):
                return
            fun_name = str(about.get("fun_name", ""))
            program = PROGRAMS.get(fun_name, fun_name)
            if fun_name in open_programs:
                stack, activity = open_programs.pop(fun_name)
                stack.close()
                was_found = event == COMPILED and threading.get_ident() in found
                if (seconds := activity.seconds()) >= SLOW_SECONDS and not was_found:
                    self.say(f"compiled {escape(program)} in {duration(seconds)}")
                    remembered.keep(fun_name, seconds)
                found.discard(threading.get_ident())
            if event == LOWERED:
                stack = contextlib.ExitStack()
                activity = _Compilation(program, remembered.last(fun_name))
                working = self.working(activity, said_after=COMPILING_SECONDS)
                open_programs[fun_name] = stack, stack.enter_context(working)

        jax.monitoring.register_event_duration_secs_listener(hear)
        jax.monitoring.register_event_listener(hear_found)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(hear)
            jax.monitoring.unregister_event_listener(hear_found)
            for stack, _ in open_programs.values():  # programs that failed to compile
                stack.close()

    @contextlib.contextmanager
    def collecting(self, step: int, sampler: Sampler) -> Iterator[Callable]:
        """Shows a collection of groups; yields the callback for its state after each burst."""
        with self.working(f"step {step}: sampling", stays=False) as activity:

            def show(collection) -> None:
                speed = sampler.counts.tokens / activity.seconds()
                activity.text = f"step {step}: {collection.describe()} · {speed:,.0f} tokens/s"

            yield show

    @contextlib.contextmanager
    def evaluating(self, done: int, total: int) -> Iterator[Callable[[Response], None]]:
        """Shows an evaluation; yields the callback for every new response.

        A file or a pipe gets a line per tenth instead of the live one.

        Args:
            done: responses of an earlier start, of `total`.
        """
        new, right = 0, 0
        with self.working("evaluating", stays=False) as activity:

            def show(response: Response) -> None:
                nonlocal new, right
                new, right = new + 1, right + response.correct
                speed = new / activity.seconds()
                text = (
                    f"{done + new} of {total} responses · {speed:.1f}/s · {right / new:.2f} right"
                )
                activity.text = f"evaluating: {text}"
                tenths = 10 * (done + new) // total
                if not self.console.is_terminal and tenths > 10 * (done + new - 1) // total:
                    self.say(text)

            yield show

    def report(self, report: Report, marks: Mapping[str, object]) -> None:
        """Prints the scores of an evaluation.

        Args:
            marks: policy, data, temperature, top_p and template, by name.
        """
        self.say(
            f"\n[bold]{escape(str(marks['data']))}[/] · {escape(str(marks['policy']))} · "
            f"T {marks['temperature']:g} · top_p {marks['top_p']:g} · "
            f"template {escape(str(marks['template']))}"
        )
        self.say(describe_problems(report))
        for table in report_tables(report):
            self.console.print(table, soft_wrap=False)

    def step(self, step: int, total: int, values: dict[str, float]) -> None:
        """Prints the lines of a step, of `WIDTH` columns at most."""
        self._ends.append(time.perf_counter())
        for line in step_lines(step, total, values, remaining(self._ends, total - step)):
            self.say(line)

    def group(self, group: Group) -> None:
        """Prints a group as a table: answers, verdicts, rewards, lengths."""
        prompt, answer = group.prompt.text, group.prompt.answer
        table = Table(
            title=f"{one_line(prompt, PROMPT_TAIL)}  (answer {one_line(answer, ANSWER_TAIL)})",
            title_justify="left",
        )
        turns = r" \[environment]" * any(completion.turns for completion in group.completions)
        for name in (f"answer tail{turns}", "verdict", "reward", "tokens", "cut"):
            table.add_column(name, justify="left" if name.startswith("answer") else "right")
        for completion, right, reward in zip(
            group.completions, group.correct, group.rewards, strict=True
        ):
            table.add_row(
                _turns(completion),
                "[green]right[/]" if right else "[red]wrong[/]",
                f"{reward:+.2f}",
                str(len(completion)),
                "cut" if completion.truncated else "",
            )
        self.console.print(table, soft_wrap=False)
