"""Groups of a step that was killed are read back, and make the step that they would have made."""

import dataclasses
import functools
import glob
import pathlib
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from kept_groups import SETTINGS, differing, make_kept, used, without_costs
from small_runs import make_groups, make_quick_config, read_rows

from dapo_jax.run.loop import train
from dapo_jax.run.store import JOURNAL, RolloutJournal
from dapo_jax.runtime.storage.files import Storage


class Killed(BaseException):
    """Stands for a SIGKILL, which leaves no time to save."""


ROOT = pathlib.Path(__file__).parents[2]


def opened(folder, identity="of this run", storage=None) -> RolloutJournal:
    return RolloutJournal(folder, identity, storage or Storage())


def begun(folder, *identity, step=0) -> RolloutJournal:
    journal = opened(folder, *identity)
    journal.begin(step)
    return journal


def write(folder, *batches) -> None:
    """A file for each batch of groups, as where none is judged while one is written."""
    storage = Storage()
    kept = opened(folder, storage=storage)
    kept.begin(0)
    assert not kept.finished
    for groups in batches:
        kept.add(groups)
        storage.drain()


@pytest.fixture
def groups(tiny_folder, tmp_path):
    return make_groups(make_quick_config(tiny_folder, tmp_path / "run"))


def test_what_was_kept_is_read_back_whole(groups, tmp_path):
    write(tmp_path, groups[:1], groups[1:])
    known = begun(tmp_path)
    assert sorted(known.finished) == [group.prompt.index for group in groups]
    for group in groups:
        found = known.recall(group.prompt)
        assert found is not None and found.prompt is group.prompt
        assert found.verdicts == group.verdicts and not found.failed
        for name in "rewards", "raw_rewards", "correct":
            np.testing.assert_array_equal(getattr(found, name), getattr(group, name))
        for one, other in zip(found.completions, group.completions, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.sampler_logprobs, other.sampler_logprobs)
            assert one.sampled_by == other.sampled_by and one.truncated == other.truncated
    assert not begun(tmp_path, step=1).finished


def test_a_damaged_file_another_run_and_another_prompt_are_left_alone(groups, tmp_path):
    write(tmp_path, groups[:1], groups[1:])
    assert not begun(tmp_path, "of another run").finished
    first, second = sorted((tmp_path / JOURNAL).rglob("*.groups"))
    content = bytearray(first.read_bytes())
    for place in range(40, len(content), len(content) // 25):
        changed = bytearray(content)
        changed[place] ^= 4
        first.write_bytes(changed)
        known = begun(tmp_path).finished
        found = known.get(groups[0].prompt.index)
        # A flipped bit in the header changes nothing that is read.
        assert found is None or found[1].verdicts == groups[0].verdicts
        assert len(known) >= len(groups) - 1
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:200])
    assert not begun(tmp_path).finished
    first.write_bytes(content)
    known = begun(tmp_path)
    assert known.recall(groups[0].prompt) and known.recall(groups[1].prompt) is None
    other = dataclasses.replace(groups[0].prompt, tokens=groups[0].prompt.tokens + 1)
    assert known.recall(other) is None


def test_groups_go_when_a_checkpoint_has_their_step(groups, tmp_path):
    storage = Storage()
    kept = opened(tmp_path, storage=storage)
    for step in range(3):
        kept.begin(step)
        kept.add(groups)
    kept.forget(2)
    storage.drain()
    assert [path.name for path in (tmp_path / JOURNAL).iterdir()] == ["step_000002"]


def files_of(folder) -> list[str]:
    return sorted(path.name for path in (folder / JOURNAL).rglob("*.groups"))


@pytest.mark.parametrize(
    ("setting", "kills"),
    [("staleness", 1), pytest.param("experts", 3, marks=pytest.mark.slow)],
)
def test_a_step_that_kept_groups_ends_with_the_same_bits(
    setting, kills, tiny_folder, moe_folder, score_folder, tmp_path, monkeypatch, alone
):
    """Windows would have grown, and what waits and runs is another each time."""
    policy = moe_folder if setting == "experts" else tiny_folder
    make = functools.partial(make_kept, setting, policy, score_folder)
    train(make(tmp_path / "whole"))
    add = RolloutJournal.add

    def add_or_stop(self, groups):
        """End the run as a kill does, once a group more is in a file."""
        before = files_of(tmp_path / "run")
        add(self, groups)
        if not groups:
            return
        ends = time.monotonic() + 20
        while files_of(tmp_path / "run") == before:
            assert time.monotonic() < ends, "no group was written"
            time.sleep(0.05)
        raise Killed

    for _ in range(kills):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(RolloutJournal, "add", add_or_stop)
            train(make(tmp_path / "run"))
    train(make(tmp_path / "run"))
    assert differing(tmp_path / "run", tmp_path / "whole") == []
    assert without_costs(tmp_path / "run") == without_costs(tmp_path / "whole")
    assert used(tmp_path / "run") == used(tmp_path / "whole")
    assert not (tmp_path / "run" / JOURNAL).exists()
    prefills, whole = (read_rows(tmp_path / name)[-2]["prefills"] for name in ("run", "whole"))
    assert prefills < whole  # finished groups are not sampled again


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_forty_kills_over_settings_change_no_bit(
    setting, tiny_folder, moe_folder, score_folder, tmp_path
):
    policy = str(moe_folder if setting == "experts" else tiny_folder)
    count = "2" if setting == "two devices" else "1"
    code = (
        "import sys\n"
        "from conftest import first_devices\n"
        "from kept_groups import make_kept\n"
        "from dapo_jax.run.loop import train\n"
        "setting, *folders, count = sys.argv[1:]\n"
        "with first_devices(int(count)):\n"
        "    train(make_kept(setting, *folders, total_steps=3))\n"
    )

    def start(run_dir: pathlib.Path) -> subprocess.Popen:
        arguments = [setting, policy, str(score_folder), str(run_dir), count]
        return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT)

    assert start(tmp_path / "whole").wait() == 0
    rng = random.Random(setting)
    run_dir = tmp_path / "run"
    written = f"{run_dir}/{JOURNAL}/*/*.groups"
    kills = 0
    while kills < 5:
        child = start(run_dir)
        wanted = rng.randint(1, 7)
        known = set(glob.glob(written))
        while child.poll() is None:  # until some groups were written, and a moment longer
            if len(set(glob.glob(written)) - known) >= wanted:
                time.sleep(rng.uniform(0, 0.2))
                child.kill()
                break
            time.sleep(0.005)
        if child.wait() == 0:  # it finished before the kill
            shutil.rmtree(run_dir)
        else:
            kills += 1
    assert start(run_dir).wait() == 0
    assert differing(run_dir, tmp_path / "whole") == []
    assert without_costs(run_dir) == without_costs(tmp_path / "whole")
    assert used(run_dir) == used(tmp_path / "whole")
