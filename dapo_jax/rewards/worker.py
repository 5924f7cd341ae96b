"""A reward worker: reads one JSON line per response, answers with one JSON line."""

import json
import math
import os
import signal
import sys
from collections.abc import Callable

from dapo_jax.rewards.functions import worker_parts
from dapo_jax.rewards.verifier import VERIFIERS

READY = b'{"ready": true}\n'


def verdict(job: dict[str, str], verify: Callable, parts: dict[str, Callable]) -> dict:
    """The fields of a `Verdict`. A verifier's bug costs a response, a part's its whole group."""
    reply = {"correct": False, "extracted": None, "parts": {}}
    try:
        reply["correct"], reply["extracted"] = verify(job["response"], job["answer"])
    except Exception as error:
        reply["failure"] = f"{error!r}"
    for name, part in parts.items():
        try:
            value = float(
                part(prompt=job["prompt"], response=job["response"], answer=job["answer"])
            )
            if not math.isfinite(value):
                raise ValueError(f"returned {value}")
            reply["parts"][name] = value
        except Exception as error:
            reply.setdefault("broken", f"{name}: {error!r}")
    return reply


def main() -> None:
    """Serves standard input until it closes. Arguments: the verifier, then the parts' names.

    A signal to the whole process group is the trainer's to handle: a worker that died of it would
    turn the verdicts under way into wrong ones.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A reward function may print; the line to the trainer must stay clean.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    verify, parts = VERIFIERS[sys.argv[1]], worker_parts(sys.argv[2:])
    output.write(READY)
    output.flush()
    for line in sys.stdin.buffer:
        reply = verdict(json.loads(line), verify, parts)
        output.write(json.dumps(reply).encode() + b"\n")
        output.flush()


if __name__ == "__main__":
    main()
