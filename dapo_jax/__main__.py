"""`python -m dapo_jax COMMAND` is `dapo-jax COMMAND`."""

import sys

from dapo_jax.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
