"""Console tables of an evaluation's report."""

from collections.abc import Iterable

from rich import box
from rich.markup import escape
from rich.table import Table

from dapo_jax.reporting.scores import Estimate, Report, Row
from dapo_jax.runtime.processes import printable

BAR = 24  # characters
EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float) -> str:
    """Return a horizontal bar of up to `BAR` characters."""
    whole, eighths = divmod(round(share * BAR * 8), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def interval(estimate: Estimate) -> str:
    """Return the bounds as text; empty for a single problem."""
    return "" if estimate.low is None else f"{estimate.low:.3f} to {estimate.high:.3f}"


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if 0 < place < len(columns) - 1 else "left")
    return table


def _headline(report: Report) -> Table:
    k = report.samples_per_problem
    rows = {f"[bold]avg@{k}": report.accuracy}
    rows |= {f"pass@{power}": value for power, value in report.pass_at_k.items() if power > 1}
    rows |= {f"maj@{k}": report.majority} if k > 1 else {}
    table = _table("", "", "score", "95 % interval", "")
    for name, estimate in rows.items():
        value, bold = estimate.value, "[bold]" if "bold" in name else ""
        table.add_row(name, f"{bold}{value:.3f}", interval(estimate), f"[cyan]{bar(value)}")
    return table


def _statistics(report: Report) -> Iterable[tuple[str, str]]:
    yield (
        "tokens",
        f"{report.response_tokens:.1f} on average: right "
        f"{_mean(report.response_tokens_right)}, wrong {_mean(report.response_tokens_wrong)}",
    )
    if report.turns is not None:
        yield "turns", f"{report.turns:.2f} of the policy on average"
    yield "cut off", f"{report.truncated_fraction:.1%} by the budget"
    yield "no answer", f"{report.answer_not_found_rate:.1%}"
    if report.verifier_failures:
        yield "verifier failed", f"on {report.verifier_failures}, counted as wrong"
    yield "repetition", f"{report.repetition:.1%} of 8-token windows"
    if report.entropy is not None:
        yield "-log p", f"{report.entropy:.3f} nats per token, before top_p"
    yield "reflection", f"{report.reflection_fraction:.1%} have a reflection word"
    if report.reflection is not None:
        reflection = report.reflection
        bounds = interval(reflection.difference)
        yield (
            "",
            f"accuracy {reflection.with_word.value:.3f} with, {reflection.without.value:.3f} "
            f"without, inside the {reflection.questions} questions\nthat have both; difference "
            f"{reflection.difference.value:+.3f}" + (f" ({bounds})" if bounds else ""),
        )


def _breakdown(title: str, rows: list[Row], k: int) -> Table:
    table = _table("", title, "problems", f"avg@{k}", "95 % interval", "")
    for row in rows:
        value = row.accuracy.value
        cells = str(row.problems), f"{value:.3f}", interval(row.accuracy), f"[cyan]{bar(value)}"
        table.add_row(escape(printable(row.name)), *cells)
    return table


def report_tables(report: Report) -> Iterable[Table]:
    """Yield tables of scores, response statistics, subjects and levels."""
    yield _headline(report)
    grid = Table.grid(padding=(0, 2))
    for name, text in _statistics(report):
        grid.add_row(name, text)
    yield grid
    for title, rows in ("subject", report.subjects), ("level", report.levels):
        if rows:
            yield _breakdown(title, rows, report.samples_per_problem)


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
