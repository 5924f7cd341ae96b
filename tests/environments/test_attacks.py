"""Attacks of environments and of turns: each costs at most its own trajectory, and wins nothing.

What happens to each is in test_attacks.txt.
"""

import textwrap

import pytest
from conftest import make_prompt
from row_files import read_table

from dapo_jax.config.experiment import Environment
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.rollout.environments import sessions
from dapo_jax.rollout.environments.sessions import Environments
from dapo_jax.rollout.environments.tools import ToolUse

TOKENIZER = arithmetic_tokenizer()
# A turn is the name of an attack; `count` shows that a trajectory is served as if it were alone.
HOSTILE = textwrap.dedent(
    """
    import itertools, os, signal, sys, threading, time
    from dapo_jax import Observation

    class Rude(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def deep(n=0):
        return deep(n + 1)

    def flood():
        while True:
            os.write(1, b'{"id": 1, "reply": {}}\\n' * 100)

    def raise_(error):
        raise error

    def fork():
        os.fork()
        return Observation("5")

    ATTACKS = dict(
        hang=lambda: time.sleep(3600),
        spin=lambda: spin(),
        stop=lambda: os.kill(os.getpid(), signal.SIGSTOP),
        kill=lambda: os.kill(os.getpid(), signal.SIGKILL),
        exit=lambda: sys.exit(0),
        leave=lambda: os._exit(0),
        interrupt=lambda: raise_(KeyboardInterrupt()),
        rude=lambda: raise_(Rude()),
        deep=deep,
        memory=lambda: bytearray(1 << 60),
        nan=lambda: Observation("1", reward=float("nan")),
        infinite=lambda: Observation("1", reward=float("inf")),
        huge=lambda: Observation("1", reward=1e300),
        word=lambda: Observation("1", reward="lots"),
        array=lambda: Observation("1", reward=[1, 2]),
        bytes=lambda: b"8",
        number=lambda: Observation(8),
        roleless=lambda: Observation(messages=[{"content": "8"}]),
        endless=lambda: Observation(messages=({"role": "user"} for _ in itertools.count())),
        flood=lambda: Observation("9" * 10_000_000),
        print=lambda: (print("x" * 10_000_000), Observation("2"))[1],
        thread=lambda: (threading.Thread(target=flood, daemon=True).start(), Observation("2"))[1],
        close=lambda: os.closerange(0, 256),
        fork=fork,
        special=lambda: Observation("<|end|><|pad|>1"),
        surrogate=lambda: Observation("1\\ud800"),
    )

    def spin():
        while True:
            pass

    class Hostile:
        steps = 0

        def step(self, text):
            self.steps += 1
            return Observation(str(self.steps), reward=1) if text == "count" else ATTACKS[text]()
    """
)


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile_attacks.py").write_text(HOSTILE)
    settings = Environment(
        name="hostile_attacks:Hostile", workers=1, step_seconds=0.5, max_observation_tokens=50
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sessions, "LATE_FACTOR", 1)
        made = Environments(settings, TOKENIZER, chat=False)
        yield made
        made.close()


def step(environments, turns, index):
    failed = [""] * (len(turns) - 1)
    (reply,) = environments.steps(
        [environments.submit(make_prompt(index, [3, 4]), 7, turns, failed)]
    )
    return reply


RAISED = "exit interrupt deep memory".split()  # of which the place is said
QUICK = "hang kill exit nan bytes flood print fork special".split()


@pytest.mark.parametrize(
    ("attack", "outcome", "words"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row[0] not in QUICK))
        for row in read_table(__file__, "environments")
    ],
)
def test_an_environment_breaks_its_own_trajectory_at_most(environments, attack, outcome, words):
    assert step(environments, ["count"], 1).text == step(environments, ["count"], 2).text == "1"
    reply = step(environments, ["count", attack], 2)
    assert words in reply.failure and reply.late == words.startswith("no reply")
    assert ("hostile_attacks.py:" in reply.failure) == (attack in RAISED)
    assert reply.reward == 0 and reply.lost == (outcome == "no reward")
    if outcome == "no reward":
        assert not reply.tokens
    else:
        assert len(reply.tokens) <= 50 and not set(reply.tokens) & set(TOKENIZER.end_ids)
        assert reply.cut == (outcome == "cut")
    after = step(environments, ["count", "count"], 1)
    assert (after.text, after.reward, after.failure) == ("2", 1.0, "")


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.mark.parametrize(("turn", "contents"), read_table(__file__, "turns"))
def test_a_turn_forges_no_result_of_a_tool(turn, contents):
    reply = ToolUse([add]).step(turn)
    shown = [str(message["content"]) for message in reply.messages]
    assert {message["role"] for message in reply.messages} <= {"tool"}
    assert len(shown) == len(contents)
    assert all(text.startswith(start) for text, start in zip(shown, contents, strict=True))
