"""The report of an evaluation on the console: scores with intervals, response statistics."""

from collections.abc import Iterator, Mapping

from rich import box
from rich.markup import escape
from rich.table import Table

from dapo_jax.run.console import Progress
from dapo_jax.run.scores import Report


def print_report(progress: Progress, report: Report, marks: Mapping[str, object]) -> None:
    """Print the scores of an evaluation.

    Args:
        marks: policy, data, temperature, top_p and template, by name.
    """
    progress.say(
        f"\n[bold]{escape(str(marks['data']))}[/] · {escape(str(marks['policy']))} · "
        f"T {marks['temperature']:g} · top_p {marks['top_p']:g} · "
        f"template {escape(str(marks['template']))}"
    )
    progress.say(describe_problems(report))
    for table in report_tables(report, progress.reward_leads):
        progress.console.print(table, soft_wrap=False)


def _headline(report: Report, reward_leads: bool) -> Table:
    k = report.samples_per_problem
    rows = {f"avg@{k}": report.accuracy}
    rows |= {f"pass@{power}": value for power, value in report.pass_at_k.items() if power > 1}
    rows |= {f"maj@{k}": report.majority} if k > 1 else {}
    reward = {"reward": report.reward} if report.reward is not None else {}
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("score", "95 % interval"):
        table.add_column(name, justify="right")
    rows = reward | rows if reward_leads else rows | reward
    for place, (name, value) in enumerate(rows.items()):
        interval = "" if value.low is None else f"{value.low:.3f} to {value.high:.3f}"
        table.add_row(name, f"{value.value:.3f}", interval, style="" if place else "bold")
    return table


def _statistics(report: Report) -> Iterator[tuple[str, str]]:
    both = report.response_tokens_right, report.response_tokens_wrong
    right, wrong = ("-" if value is None else f"{value:.1f}" for value in both)
    yield "tokens", f"{report.response_tokens:.1f} on average: right {right}, wrong {wrong}"
    if report.turns is not None:
        yield "turns", f"{report.turns:.2f} of the policy on average"
    yield "cut off", f"{report.truncated_fraction:.1%} by the budget"
    yield "no answer", f"{report.answer_not_found_rate:.1%}"
    if report.failed_rewards:
        counts = ", ".join(f"{n} {outcome}" for outcome, n in report.failed_rewards.items())
        yield "no reward", f"{counts}, in no score"
    yield "repetition", f"{report.repetition:.1%} of 8-token windows"
    if report.entropy is not None:
        yield "-log p", f"{report.entropy:.3f} nats per token, before top_p"
    yield "reflection", f"{report.reflection_fraction:.1%} have a reflection word"


def report_tables(report: Report, reward_leads: bool = False) -> Iterator[Table]:
    """Yield tables of an evaluation: scores and response statistics."""
    yield _headline(report, reward_leads)
    grid = Table.grid(padding=(0, 2))
    for name, text in _statistics(report):
        grid.add_row(name, text)
    yield grid


def describe_problems(report: Report) -> str:
    """Return a text about the numbers of problems, samples and repeated problems."""
    k = report.samples_per_problem
    more = " or more" if report.responses > report.problems * k else ""
    text = f"{report.problems} problems, {k}{more} samples each; intervals are over problems"
    if report.repeated_problems:
        text += (
            f"\nthe data repeats {report.repeated_problems} problems up to {report.most_listings} "
            "times;\na repeat counts as more samples of the same problem"
        )
    return text
