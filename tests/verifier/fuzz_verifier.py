"""Throws made-up responses at the verifier for some minutes; stops at the first that does harm.

    python tests/verifier/fuzz_verifier.py --minutes 10

Harm is an exception, a verdict that takes seconds, a worker that had to be killed, a file that
text made appear, or a response that is right and wrong.
Needs the package `hypothesis`.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dapo_jax.extras.math import is_equivalent

HERE = pathlib.Path(__file__).parent
MARKER = pathlib.Path(tempfile.gettempdir()) / "dapo_jax_fuzz_marker"
LONGEST_SECONDS = 15.0  # the clock only kills; a busy machine may stall a healthy verdict
CASES = [
    case
    for name in ("verifier_cases.jsonl", "verifier_readings.jsonl", "verifier_hostile.jsonl")
    for line in (HERE / name).read_text().splitlines()
    if "prediction" in (case := json.loads(line))
]
PIECES = (HERE / "fuzz_verifier.txt").read_text().split()
CODE = f"__import__('pathlib').Path({str(MARKER)!r}).touch()"
EXTRA = (" ", "", "\n", "\x00", "\ud800", "\u202e", "\u200b", CODE)

fragments = st.lists(st.sampled_from((*PIECES, *EXTRA)), max_size=40).map("".join)
known = st.sampled_from([case["prediction"] for case in CASES])
golds = st.sampled_from([case["answer"] for case in CASES])


@st.composite
def spliced(draw) -> str:
    """Two known responses cut and joined, with something between."""
    left, right = draw(known), draw(known)
    i, j = draw(st.integers(0, len(left))), draw(st.integers(0, len(right)))
    return left[:i] + draw(fragments) + right[j:]


@st.composite
def repeated(draw) -> str:
    """A fragment many times over, perhaps closed as often."""
    times = draw(st.integers(2, 400))
    return draw(fragments) * times + draw(st.sampled_from(["", "}", ")", "]", r"\}"])) * times


responses = st.one_of(fragments, spliced(), repeated(), st.text(max_size=200))
wrapped = st.builds(
    lambda shape, text: shape % text if "%s" in shape else text,
    st.sampled_from(["", r"\boxed{%s}", "Answer: %s", "<answer>%s</answer>", "#### %s"]),
    responses,
)


def judge(response: str, answer: str) -> bool:
    from test_verifier import worker_of  # beside this script

    worker = worker_of(os.getpid())
    started = time.monotonic()
    verdict = is_equivalent(response, answer)
    seconds = time.monotonic() - started
    assert seconds < LONGEST_SECONDS, f"{seconds:.1f} s"
    assert not MARKER.exists(), "a file was made"
    assert worker_of(os.getpid()) == worker, "a worker was killed"
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    until = time.monotonic() + 60 * parser.parse_args().minutes
    MARKER.unlink(missing_ok=True)
    is_equivalent(r"\sqrt{8}", "1")  # starts the worker
    tried = right = 0

    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking what takes seconds would take hours
        suppress_health_check=list(HealthCheck),
    )
    @given(wrapped, golds)
    def attack(response: str, answer: str) -> None:
        nonlocal tried, right
        tried += 1
        verdict = judge(response, answer)
        right += verdict
        assert judge(response, answer) is verdict, "right and wrong"

    while time.monotonic() < until:
        attack()
    print(f"{tried} responses, {right} of them right, nothing did harm")


if __name__ == "__main__":
    main()
