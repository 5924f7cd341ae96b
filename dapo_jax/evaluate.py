"""Measures sampled accuracy on the held-out problems of a config; prints one JSON line.

    python -m dapo_jax.evaluate --config=configs/arithmetic.py

evaluates the newest checkpoint in run_dir or, where there is none, the model folder.
"""

import json
import sys

from dapo_jax import cli
from dapo_jax.config import Config


def main() -> int:
    """The exit code."""
    config = cli.load(Config, __doc__)
    from dapo_jax.evaluation import evaluate_newest

    return cli.guarded(lambda: print(json.dumps(evaluate_newest(config))))


if __name__ == "__main__":
    sys.exit(main())
