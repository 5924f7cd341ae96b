"""A reward worker: reads one JSON line per response, answers with one JSON line."""

import json
import signal
import sys

from dapo_jax.rewards.verifier import VERIFIERS

READY = b'{"ready": true}\n'


def main() -> None:
    """Serves standard input until it closes.

    A signal to the whole process group is the trainer's to handle: a worker that died of it would
    turn the verdicts under way into wrong ones.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    verify = VERIFIERS[sys.argv[1]]
    output = sys.stdout.buffer
    output.write(READY)
    output.flush()
    for line in sys.stdin.buffer:
        job = json.loads(line)
        try:
            correct, extracted = verify(job["text"], job["answer"])
            reply = {"correct": correct, "extracted": extracted}
        except Exception as error:  # a verifier's bug must cost one response, not the worker
            reply = {"correct": False, "extracted": None, "failure": f"{error!r}"}
        output.write(json.dumps(reply).encode() + b"\n")
        output.flush()


if __name__ == "__main__":
    main()
