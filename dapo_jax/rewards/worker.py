"""A reward worker: reads one JSON line per response, answers with one JSON line."""

import json
import sys

from dapo_jax.rewards.verifier import VERIFIERS


def main() -> None:
    """Serves standard input until it closes."""
    verify = VERIFIERS[sys.argv[1]]
    for line in sys.stdin.buffer:
        job = json.loads(line)
        try:
            correct, extracted = verify(job["text"], job["answer"])
            reply = {"correct": correct, "extracted": extracted}
        except Exception as error:  # a verifier's bug must cost one response, not the worker
            reply = {"correct": False, "extracted": None, "failure": f"error: {error}"}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
