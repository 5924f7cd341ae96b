"""Plugin of pytest: durations of a whole run in a file, and what follows from them.

`--write-durations` rewrites tests/durations.json; `--quick` keeps tests that take under a second
with their fixtures. Processes of xdist begin with the longest files: none is left for the end.
"""

import collections
import json
import pathlib
import time
from collections.abc import Iterator

import pytest

FILE = pathlib.Path(__file__).parents[1] / "durations.json"
WRITTEN_SECONDS = 0.3  # what takes less, or is new, is not in the file
SHORT_SECONDS = 0.05  # about what one of those takes
QUICK_SECONDS = 1.0
ALL_QUICK_SECONDS = 150.0  # of all together, in one process
WHOLE = "the whole file"  # whose fixtures are made once


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption("--quick", action="store_true", help="tests that took less than a second")
    group.addoption("--write-durations", action="store_true", help=f"to tests/{FILE.name}")


def read() -> dict[str, float]:
    """Seconds of a test with all its fixtures, by node id."""
    by_file = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {
        f"{path}::{name}": seconds
        for path, tests in by_file.items()
        for name, seconds in tests.items()
    }


def quick(known: dict[str, float], nodes: list[str]) -> set[str]:
    """Node ids under the limit, the shortest first, as many as the whole may take."""
    chosen, spent = set(), 0.0
    for node in sorted(nodes, key=lambda node: known.get(node, 0.0)):
        spent += known.get(node, SHORT_SECONDS)
        if known.get(node, 0.0) <= QUICK_SECONDS and spent <= ALL_QUICK_SECONDS:
            chosen.add(node)
    return chosen


@pytest.hookimpl(trylast=True)  # after the marks have deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = read()
    if config.getoption("quick"):
        chosen = quick(known, [item.nodeid for item in items])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
    if hasattr(config, "workerinput"):
        files = {item.nodeid: item.nodeid.partition("::")[0] for item in items}
        items.sort(key=lambda item: -known.get(f"{files[item.nodeid]}::{WHOLE}", SHORT_SECONDS))


class Watch:
    """Tells with a test's report what its fixtures took, also those that an earlier test made."""

    def __init__(self) -> None:
        self._fixtures: dict[object, float] = collections.defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef) -> Iterator[None]:
        began = time.monotonic()
        made = yield
        self._fixtures[fixturedef] += time.monotonic() - began
        return made

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Function) -> None:
        used = item._fixtureinfo.name2fixturedefs.values()
        shared = [one for found in used for one in found if one.scope != "function"]
        seconds = sum(self._fixtures[one] for one in shared)
        item.user_properties.append(("shared_fixtures", seconds))


class Recorder:
    """Sums the durations of a run's reports by test and by file, and writes them at the end."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, float]] = collections.defaultdict(collections.Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, name = report.nodeid.partition("::")
        self._files[path][WHOLE] += report.duration
        self._files[path][name] += report.duration if report.when == "call" else 0.0
        if report.when == "call":
            self._files[path][name] += dict(report.user_properties).get("shared_fixtures", 0.0)

    def pytest_sessionfinish(self) -> None:
        kept = {
            path: {
                name: round(taken, 1) for name, taken in tests.items() if taken >= WRITTEN_SECONDS
            }
            for path, tests in sorted(self._files.items())
        }
        FILE.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_durations"):
        config.pluginmanager.register(Watch())
        # Workers of xdist report to the process that started them.
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Recorder())
