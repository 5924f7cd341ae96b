"""The console: a live line while collecting, a line per step, and now and then a group."""

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo_jax.advantages import normalise_in_groups
from dapo_jax.sampler.rollout import RolloutSampler
from dapo_jax.structs import Group

TAIL = 38  # characters of a response that a table shows


class Progress:
    """Speaks to a person; on a terminal the collecting line is redrawn in place."""

    def __init__(self):
        self.console = Console(highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text)

    def warn(self, text: str) -> None:
        self.console.print(f"[bold yellow]warning:[/] {text}")

    @contextlib.contextmanager
    def collecting(self, step: int, sampler: RolloutSampler) -> Iterator[Callable]:
        """Yields the callback that `filtering.collect` calls after every burst."""
        started = time.perf_counter()
        with self.console.status("") as status:

            def show(collection) -> None:
                speed = sampler.counts.tokens / (time.perf_counter() - started)
                status.update(f"step {step}: {collection.describe()} · {speed:,.0f} tokens/s")

            yield show

    def step(self, step: int, total: int, values: dict[str, float]) -> None:
        """The line that a step leaves."""
        heldout = values.get("heldout_accuracy")
        self.say(
            f"step {step:>3}/{total}  reward {values['reward']:+.2f}  "
            f"accuracy {values['accuracy']:.2f}  kept {values['kept_fraction']:.2f} "
            f"(all right {values['all_right_fraction']:.2f}, "
            f"all wrong {values['all_wrong_fraction']:.2f})  "
            f"entropy {values.get('entropy', 0):.3f}  "
            f"tokens {values['response_tokens_mean']:.0f} "
            f"(cut {values['truncated_fraction']:.0%})  "
            f"grad {values.get('gradient_norm', 0):.2f}  {values['seconds_step']:.1f} s"
            + ("" if heldout is None else f"  [bold]held-out {heldout:.3f}[/]")
        )

    def group(self, group: Group) -> None:
        """One group as a table: what was answered, and what the update makes of it."""
        advantages = normalise_in_groups(group.rewards, np.zeros(len(group.rewards), int))
        table = Table(
            title=f"{escape(group.prompt.text)}  (answer {escape(group.prompt.answer)})",
            title_justify="left",
        )
        for name in ("answer tail", "verdict", "advantage", "tokens", "cut"):
            table.add_column(name, justify="left" if name == "answer tail" else "right")
        for completion, verdict, advantage in zip(
            group.completions, group.verdicts, advantages, strict=True
        ):
            table.add_row(
                escape(completion.text[-TAIL:]),
                "[green]right[/]" if verdict.correct else "[red]wrong[/]",
                f"{advantage:+.2f}",
                str(len(completion)),
                "cut" if completion.truncated else "",
            )
        self.console.print(table)
