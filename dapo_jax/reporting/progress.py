"""The console: a live line while collecting, a line per step, and now and then a group."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from dapo_jax import processes
from dapo_jax.evaluation.scores import Report, Response
from dapo_jax.reporting.tables import describe_problems, report_tables
from dapo_jax.sampler.rollout import RolloutSampler
from dapo_jax.structs import Group

TAIL = 38  # characters of a response that a table shows


class Progress:
    """Speaks to a person; on a terminal the collecting line is redrawn in place.

    Of several processes the first one speaks.
    """

    def __init__(self):
        quiet = not processes.is_first()
        self.console = Console(highlight=False, soft_wrap=True, quiet=quiet)

    def say(self, text: str) -> None:
        self.console.print(text)

    def warn(self, text: str) -> None:
        self.console.print(f"[bold yellow]warning:[/] {text}")

    def alarm(self, title: str, text: str) -> None:
        """A warning that nobody overlooks."""
        title = f"[bold]warning: {escape(title)}[/]"
        panel = Panel(escape(text), title=title, border_style="bold yellow")
        self.console.print(panel, soft_wrap=False)

    @contextlib.contextmanager
    def collecting(self, step: int, sampler: RolloutSampler) -> Iterator[Callable]:
        """Yields the callback that `filtering.collect` calls after every burst."""
        started = time.perf_counter()
        with self.console.status("") as status:

            def show(collection) -> None:
                speed = sampler.counts.tokens / (time.perf_counter() - started)
                status.update(f"step {step}: {collection.describe()} · {speed:,.0f} tokens/s")

            yield show

    @contextlib.contextmanager
    def evaluating(self, done: int, total: int) -> Iterator[Callable[[Response], None]]:
        """Yields what is called with every new response; `done` were there before.

        A log file gets a line per tenth instead of the live one.
        """
        started, new, right = time.perf_counter(), 0, 0
        with self.console.status("") as status:

            def show(response: Response) -> None:
                nonlocal new, right
                new, right = new + 1, right + response.correct
                speed = new / (time.perf_counter() - started)
                text = (
                    f"{done + new} of {total} responses · {speed:.1f}/s · {right / new:.2f} right"
                )
                status.update(f"evaluating: {text}")
                tenths = 10 * (done + new) // total
                if not self.console.is_terminal and tenths > 10 * (done + new - 1) // total:
                    self.say(text)

            yield show

    def report(self, report: Report, marks: dict[str, object]) -> None:
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
        """The line that a step leaves."""
        heldout = values.get("heldout_accuracy")
        if "entropy" in values:
            update = f"entropy {values['entropy']:.3f}  grad {values['gradient_norm']:.2f}"
        elif "explained_variance" in values:
            update = f"critic alone, explains {values['explained_variance']:.2f}"
        else:
            update = "no update"
        self.say(
            f"step {step:>3}/{total}  reward {values['reward']:+.2f}  "
            f"accuracy {values['accuracy']:.2f}  kept {values['kept_fraction']:.2f} "
            f"(all right {values['all_right_fraction']:.2f}, "
            f"all wrong {values['all_wrong_fraction']:.2f})  "
            f"tokens {values['response_tokens_mean']:.0f} "
            f"(cut {values['truncated_fraction']:.0%})  "
            f"{update}  {values['seconds_step']:.1f} s"
            + ("" if heldout is None else f"  [bold]held-out {heldout:.3f}[/]")
        )

    def group(self, group: Group) -> None:
        """One group as a table: what was answered, and what it earned."""
        table = Table(
            title=f"{escape(group.prompt.text)}  (answer {escape(group.prompt.answer)})",
            title_justify="left",
        )
        for name in ("answer tail", "verdict", "reward", "tokens", "cut"):
            table.add_column(name, justify="left" if name == "answer tail" else "right")
        for completion, right, reward in zip(
            group.completions, group.correct, group.rewards, strict=True
        ):
            table.add_row(
                escape(completion.text[-TAIL:]),
                "[green]right[/]" if right else "[red]wrong[/]",
                f"{reward:+.2f}",
                str(len(completion)),
                "cut" if completion.truncated else "",
            )
        self.console.print(table)
