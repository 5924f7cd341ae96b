"""The report of an evaluation on the console: scores with intervals, response statistics."""

from collections.abc import Iterator, Mapping

from rich import box
from rich.markup import escape
from rich.table import Table

from dapo_jax.run.console import Progress
from dapo_jax.run.scores import Estimate, Report

BAR = 24  # characters of a bar of a score
EIGHTHS = " ▏▎▍▌▋▊▉"  # of a character


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


def _interval(estimate: Estimate) -> str:
    return "" if estimate.low is None else f"{estimate.low:.3f} to {estimate.high:.3f}"


def _score_cells(estimate: Estimate) -> tuple[str, str, str]:
    whole, eighths = divmod(round(estimate.value * BAR * 8), 8)
    bar = "█" * whole + EIGHTHS[eighths].strip()
    return f"{estimate.value:.3f}", _interval(estimate), f"[cyan]{bar}"


def _headline(report: Report, reward_leads: bool) -> Table:
    k = report.samples_per_problem
    rows = {f"avg@{k}": report.accuracy}
    rows |= {f"pass@{power}": value for power, value in report.pass_at_k.items() if power > 1}
    rows |= {f"maj@{k}": report.majority} if k > 1 else {}
    lines = [(name, *_score_cells(estimate)) for name, estimate in rows.items()]
    if report.reward is not None:  # without a bar, since rewards have no common scale
        line = ("reward", f"{report.reward.value:.3f}", _interval(report.reward), "")
        lines.insert(0 if reward_leads else len(lines), line)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "score", "95 % interval", ""):
        table.add_column(name, justify="right" if name else "left")
    for place, line in enumerate(lines):
        table.add_row(*line, style="" if place else "bold")
    return table


def _statistics(report: Report) -> Iterator[tuple[str, str]]:
    right, wrong = (
        "-" if value is None else f"{value:.1f}"
        for value in (report.response_tokens_right, report.response_tokens_wrong)
    )
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
