"""Plugin of pytest: durations of a whole run in a file, and what follows from them.

`--write-durations` rewrites tests/durations.json; `--quick` keeps tests that take under a second
with their fixtures. Processes of xdist begin with new files, then the longest: none is left for the
end.
"""

import collections
import itertools
import json
import math
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


@pytest.hookimpl(trylast=True)  # after the marks have deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files = json.loads(FILE.read_text())
    known = {f"{path}::{name}": t for path, tests in files.items() for name, t in tests.items()}
    if config.getoption("quick"):
        chosen, spent = set(), 0.0
        for item in sorted(items, key=lambda item: known.get(item.nodeid, 0.0)):
            spent += known.get(item.nodeid, SHORT_SECONDS)
            if known.get(item.nodeid, 0.0) <= QUICK_SECONDS and spent <= ALL_QUICK_SECONDS:
                chosen.add(item)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if hasattr(config, "workerinput"):
        whole = {path: tests.get(WHOLE, SHORT_SECONDS) for path, tests in files.items()}
        items.sort(key=lambda item: -whole.get(item.nodeid.partition("::")[0], math.inf))


class Watch:
    """Adds to a test's report the seconds of its fixtures, also those that an earlier test made."""

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
        used = itertools.chain.from_iterable(item._fixtureinfo.name2fixturedefs.values())
        seconds = sum(self._fixtures[fixture] for fixture in used if fixture.scope != "function")
        item.user_properties.append(("shared_fixtures", seconds))


class Recorder:
    """Sums the durations of a run's reports by test and by file, and writes them at the end."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, float]] = collections.defaultdict(collections.Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, name = report.nodeid.partition("::")
        self._files[path][WHOLE] += report.duration
        if report.when == "call":
            shared = dict(report.user_properties).get("shared_fixtures", 0.0)
            self._files[path][name] += report.duration + shared

    def pytest_sessionfinish(self) -> None:
        kept = {
            path: {name: round(t, 1) for name, t in tests.items() if t >= WRITTEN_SECONDS}
            for path, tests in sorted(self._files.items())
        }
        FILE.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_durations"):
        config.pluginmanager.register(Watch())
        # Workers of xdist report to the process that started them.
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Recorder())
