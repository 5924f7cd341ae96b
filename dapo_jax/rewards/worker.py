"""A reward worker: reads one JSON line per job, answers with one JSON line.

python -m dapo_jax.rewards.worker parts NAMES     reward functions, the user's among them
python -m dapo_jax.rewards.worker gym             scorers of reasoning-gym
"""

import math
import sys
from collections.abc import Callable

from dapo_jax.verifier.worker import serve


def make_parts(names: list[str]) -> Callable[[dict], dict]:
    """The function that answers `{"prompt", "response", "answer"}` with the parts' rewards."""
    from dapo_jax.rewards.functions import worker_parts

    parts = worker_parts(names)

    def answer(job: dict) -> dict:
        reply = {"parts": {}}
        for name, part in parts.items():
            try:
                value = float(part(**job))
                if not math.isfinite(value):
                    raise ValueError(f"returned {value}")
                reply["parts"][name] = value
            except Exception as error:
                reply.setdefault("broken", f"{name}: {error!r}")
        return reply

    return answer


def score_gym(job: dict) -> dict:
    """Answers `{"source", "metadata", "answer"}` with the score of the task's own scorer."""
    from dapo_jax.data.gym import PREFIX, gym_score

    task = job["source"].removeprefix(PREFIX)
    try:
        return {"score": gym_score(task, job["metadata"], job["answer"])}
    except Exception as error:  # some scorers raise where an answer is junk
        return {"score": 0.0, "failure": repr(error)[:200]}


def main() -> None:
    """Serves what the command line names."""
    kind, *names = sys.argv[1:]
    makers = {"gym": lambda: score_gym, "parts": lambda: make_parts(names)}
    serve(makers[kind])


if __name__ == "__main__":
    main()
