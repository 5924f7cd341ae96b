"""Console of a run: a live line with the current activity, two lines per step, sampled groups.

A file or a pipe gets no live line; a slow activity is printed once instead.
"""

import collections
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dapo_jax.run.scores import HELDOUT, Response
from dapo_jax.runtime import processes
from dapo_jax.runtime.processes import printable
from dapo_jax.runtime.streams import BrokenPipeSafeStream
from dapo_jax.types.structs import Completion, Group, SamplerCounts, Turn

WIDTH = 80  # columns of the lines of a step
ANSWER_TAIL = 38  # characters of a response shown in a table
PROMPT_TAIL = 300
SHOWN_SECONDS = 0.5  # the live line shows a compilation after this time
SLOW_SECONDS = 3.0  # a slow activity is printed after this time
COMPILING_SECONDS = 1.0  # a program in the cache takes less
GIVEN_STEPS = 10  # of a run on given groups are printed, with the metrics that begin in one of:
OF_GIVEN = ("policy_nll", "preference_", "heldout_")
ETA_STEPS = 10  # the ETA assumes the mean duration of this many steps
PROGRAMS = {
    "jit(_empty)": "the empty cache",
    "jit(_fresh_state)": "the optimizer's state",
    "jit(_generate)": "the decode step",
    "jit(_prefill)": "the prefill",
    "jit(_score_fn)": "the score pass",
    "jit(_unstack)": "the copy of the weights for decoding",
    "jit(_update_fn)": "the update",
    "jit(_start_responses)": "the start of responses",
}
# jax reports that a program was lowered, and then that it was found in the cache or compiled.
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"


# --- texts ----------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Return seconds as a text such as 45 s, 12 min, 12.3 h, 5.1 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 99.95 else f"{hours / 24:.1f} days"


def fit(parts: Iterable[str], indent: int = 2) -> str:
    """Join parts into as many lines of `WIDTH` columns as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(" " * indent * bool(lines) + part)
    return "\n".join(lines)


def _tail(text: str, characters: int) -> str:
    """Return the end of a text on one line, without control characters."""
    return printable(" ".join(text[-characters:].split()))


def remaining(ends: Sequence[float], steps: int) -> float | None:
    """Return the estimated seconds of the next `steps`; None before two steps have ended.

    Args:
        ends: times in seconds at which the last steps ended. The first step of a process
            compiles, so its duration is not counted.
    """
    if len(ends) < 2 or steps <= 0:
        return None
    return steps * (ends[-1] - ends[0]) / (len(ends) - 1)


def _describe_kept(values: dict[str, float], reward_leads: bool) -> str:
    kept = values["kept_fraction"]
    if reward_leads:
        flat = values.get("no_spread_fraction", 1 - kept)  # missing in rows of earlier versions
        return f"  kept {1 - flat:.2f} (no spread {flat:.2f})"
    right, wrong = values["all_right_fraction"], values["all_wrong_fraction"]
    return f"  kept {kept:.2f} (all right {right:.2f}, all wrong {wrong:.2f})"


def _heldout_lines(values: dict[str, float], reward_leads: bool) -> Iterator[str]:
    """Yield a line per held-out score, the one that leads in bold."""
    names = HELDOUT[reward_leads:2]
    for name in names:
        if (value := values.get(f"heldout_{name}")) is not None:
            low, high = (values.get(f"heldout_{name}_{end}") for end in ("low", "high"))
            bounds = "" if low is None else f"  (95 %: {low:.3f} to {high:.3f})"
            text = f"held-out {name} {value:.3f}"
            yield f"  {f'[bold]{text}[/]' if name == names[0] else text}{bounds}"


def step_lines(
    step: int,
    total: int,
    values: dict[str, float],
    eta: float | None = None,
    reward_leads: bool = False,
) -> list[str]:
    """Return the two console lines of a step, and those of its evaluation.

    Args:
        eta: seconds to the end of the run.
        reward_leads: True if no response counts as correct.
    """
    name = f"step {step:>{len(str(total))}}/{total}"
    if "reward" not in values:  # given groups
        if step % max(1, total // GIVEN_STEPS) and step < total:
            return []
        shown = [name, *(f"{n} {v:.3f}" for n, v in values.items() if n.startswith(OF_GIVEN))]
        shown.append(f"{values['seconds_step']:.2g} s")
        shown += [] if eta is None else [f"ETA {duration(eta)}"]
        return [fit(shown).replace("_", " ")]
    first = [name, f"reward {values['reward']:+.2f}"]
    first += [] if reward_leads else [f"accuracy {values['accuracy']:.2f}"]
    second = [
        _describe_kept(values, reward_leads),
        f"tokens {values['response_tokens_mean']:.0f} ({values['truncated_fraction']:.0%} cut)",
    ]
    if "entropy" in values:
        entropy, gradient = values["entropy"], values["gradient_norm"]
        first.append(f"entropy {entropy:.3f}" if entropy < 10 else f"entropy {entropy:.2f}")
        second.append(f"grad {gradient:.2f}" if gradient < 1000 else f"grad {gradient:.0e}")
    elif "explained_variance" in values:
        first.append("critic only")
        second.append(f"explains {values['explained_variance']:.2f}")
    else:
        first.append("no update")
    seconds = values["seconds_step"]
    first.append(f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s")
    first += [] if eta is None else [f"ETA {duration(eta)}"]
    return [fit(first), fit(second), *_heldout_lines(values, reward_leads)]


# --- tables ---------------------------------------------------------------------------------


def describe_turns(completion: Completion) -> Text:
    """Return the end of a trajectory with dim observations in brackets, or of a response."""
    parts = []
    for turn in completion.turns or (Turn(True, 0, completion.text),):
        text = _tail(turn.text, ANSWER_TAIL)
        parts.append(Text(text) if turn.is_sampled else Text(f"[{text}]", "dim italic"))
    return Text(" | ").join(parts)[-ANSWER_TAIL:]


def _group_table(group: Group, reward_leads: bool) -> Table:
    prompt = escape(_tail(group.prompt.text, PROMPT_TAIL))
    answer = escape(_tail(group.prompt.answer, ANSWER_TAIL))
    table = Table(title=f"{prompt}  (answer {answer})", title_justify="left")
    turns = r" \[environment]" * any(completion.turns for completion in group.completions)
    table.add_column(f"end of response{turns}")
    for name in ("verdict",) * (not reward_leads) + ("reward", "tokens", "cut"):
        table.add_column(name, justify="right")
    for completion, correct, reward in zip(
        group.completions, group.correct, group.rewards, strict=True
    ):
        verdict = "[green]right[/]" if correct else "[red]wrong[/]"
        table.add_row(
            describe_turns(completion),
            *[verdict] * (not reward_leads),
            f"{reward:+.2f}",
            str(len(completion)),
            "cut" if completion.truncated else "",
        )
    return table


# --- the console ----------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Activity:
    """The text of an activity and the time since it began; shown after some seconds."""

    text: str
    shown_after: float = 0.0
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        return time.perf_counter() - self.began


class Progress:
    """Console of a run; on a terminal with a live line that is redrawn in place.

    Only the first process prints. Control characters in texts are escaped, and characters that
    the encoding lacks do not end the run.

    Args:
        speaks: False for a silent console.
        reward_leads: True if no response counts as correct: scores are rewards.
    """

    def __init__(self, speaks: bool = True, reward_leads: bool = False):
        self.reward_leads = reward_leads
        if reconfigure := getattr(sys.stdout, "reconfigure", None):  # missing in a notebook
            reconfigure(errors="backslashreplace")
        quiet = not (speaks and processes.is_first())
        output: Any = BrokenPipeSafeStream("stdout")
        options: Any = {"file": output, "highlight": False, "soft_wrap": True, "quiet": quiet}
        self.console = Console(**options)
        if self.console.is_jupyter:  # print lines of text; rich would make HTML of each
            self.console = Console(**options, force_jupyter=False, force_terminal=False)
        self._activities: list[Activity] = []
        self._shapes = collections.Counter[str]()  # compiled so far, by program
        self._step_ends: collections.deque[float] = collections.deque(maxlen=ETA_STEPS + 1)

    def say(self, text: str) -> None:
        """Print a text with rich's markup."""
        self.console.print(printable(text))

    def warn(self, text: str) -> None:
        """Print a warning with rich's markup."""
        self.say(f"[bold yellow]warning:[/] {text}")

    def alarm(self, title: str, text: str) -> None:
        """Print a warning in a panel; title and text have no markup."""
        title = f"[bold]warning: {escape(printable(title))}[/]"
        panel = Panel(escape(printable(text)), title=title, border_style="bold yellow")
        self.console.print(panel, soft_wrap=False)

    def __rich__(self) -> Text:
        """Return the live line: the innermost activity that has lasted long enough."""
        outer, *inner = self._activities
        shown = [activity for activity in inner if activity.seconds() >= activity.shown_after]
        activity = shown[-1] if shown else outer
        text = printable(f"{activity.text} · {activity.seconds():.0f} s")
        return Text(text, no_wrap=True, overflow="ellipsis")

    @contextlib.contextmanager
    def working(
        self,
        text: str,
        *,
        stays: bool = True,
        shown_after: float = 0.0,
        slow_after: float | None = None,
    ) -> Iterator[Activity]:
        """Show an activity during the block; the text of the yielded object may be changed.

        Args:
            stays: print the activity if it is slow and there is no live line.
            shown_after: seconds until the live line shows it instead of the outer activity.
            slow_after: seconds until it is slow; None: `SLOW_SECONDS`.
        """
        activity = Activity(text, shown_after)
        slow = SLOW_SECONDS if slow_after is None else slow_after
        timer = threading.Timer(slow, lambda: self.say(f"{escape(text)} ..."))
        timer.daemon = True
        if stays and not self.console.is_interactive:
            timer.start()
        self._activities.append(activity)
        is_live = len(self._activities) == 1 and self.console.is_interactive
        try:
            with self.console.status(self) if is_live else contextlib.nullcontext():
                yield activity
        finally:
            timer.cancel()
            self._activities.remove(activity)

    @contextlib.contextmanager
    def compilation(self) -> Iterator[None]:
        """Show compilations during the block, and the seconds of slow ones."""
        compiling: dict[str, tuple[contextlib.ExitStack, Activity]] = {}
        cache_hits = set[int]()  # threads

        def on_event(event: str, **_: str | int) -> None:
            if event == CACHE_HIT:
                cache_hits.add(threading.get_ident())

        def on_duration(event: str, duration_secs: float, **about: str | int) -> None:
            if event not in (LOWERED, COMPILED):
                return
            fun_name = str(about.get("fun_name", ""))
            program = PROGRAMS.get(fun_name, "a small program")
            if fun_name in compiling:
                stack, activity = compiling.pop(fun_name)
                stack.close()
                was_cached = event == COMPILED and threading.get_ident() in cache_hits
                if (seconds := activity.seconds()) >= SLOW_SECONDS and not was_cached:
                    text = f"compiled {escape(program)} in {duration(seconds)}"
                    shape = self._shapes[fun_name] = self._shapes[fun_name] + 1
                    self.say(text + f" (shape {shape})" * (shape > 1))
                cache_hits.discard(threading.get_ident())
            if event == LOWERED:
                stack = contextlib.ExitStack()
                working = self.working(
                    f"compiling {program} (kept for later runs)",
                    shown_after=SHOWN_SECONDS,
                    slow_after=COMPILING_SECONDS,
                )
                compiling[fun_name] = stack, stack.enter_context(working)

        jax.monitoring.register_event_duration_secs_listener(on_duration)
        jax.monitoring.register_event_listener(on_event)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(on_duration)
            jax.monitoring.unregister_event_listener(on_event)
            for stack, _ in compiling.values():  # programs that failed to compile
                stack.close()

    @contextlib.contextmanager
    def collecting(self, step: int, counts: SamplerCounts) -> Iterator[Callable]:
        """Show the collection of groups; yield the callback for its state after each burst."""
        with self.working(f"step {step}: sampling", stays=False) as activity:

            def show(collection) -> None:
                speed = counts.tokens / activity.seconds()
                activity.text = f"step {step}: {collection.describe()} · {speed:,.0f} tokens/s"

            yield show

    @contextlib.contextmanager
    def evaluating(
        self, done: int, total: int, every_seconds: float = 0.0
    ) -> Iterator[Callable[[Response], None]]:
        """Show an evaluation; yield the callback for every new response.

        A file or a pipe gets a line after each tenth.

        Args:
            done: responses of an earlier process, of `total`.
            every_seconds: least time between two lines.
        """
        new = 0
        total_score = shown = 0.0
        with self.working("evaluating", stays=False) as activity:

            def show(response: Response) -> None:
                nonlocal new, total_score, shown
                new += 1
                total_score += (response.reward or 0.0) if self.reward_leads else response.correct
                name = "reward" if self.reward_leads else "right"
                seconds, left = activity.seconds(), total - done - new
                eta = f" · ETA {duration(left * seconds / new)}" if left else ""
                share = f"{new / seconds:.1f}/s · {total_score / new:.2f} {name}"
                text = f"{done + new} of {total} responses · {share}{eta}"
                activity.text = f"evaluating: {text}"
                is_tenth = 10 * (done + new) // total > 10 * (done + new - 1) // total
                is_due = is_tenth and seconds >= shown + every_seconds
                if is_due and not self.console.is_terminal:
                    shown = seconds
                    self.say(text)

            yield show

    def step(self, step: int, total: int, values: dict[str, float]) -> None:
        """Print the lines of a step."""
        self._step_ends.append(time.perf_counter())
        eta = remaining(self._step_ends, total - step)
        for line in step_lines(step, total, values, eta, self.reward_leads):
            self.say(line)

    def group(self, group: Group) -> None:
        """Print a group as a table of answers, verdicts, rewards and lengths."""
        self.console.print(_group_table(group, self.reward_leads), soft_wrap=False)
