"""Binary messages of Tinker's API, as its SDK declares them; nothing else of it is imported."""

import importlib.metadata
import runpy
from types import SimpleNamespace

from dapo_jax.types.errors import ConfigError

SDK_VERSIONS = "0.38.*"  # that were tested
try:
    sdk = importlib.metadata.distribution("tinker")
except ImportError as error:
    problem = f"needs pip install 'tinker=={SDK_VERSIONS}' ({error})"
    raise ConfigError(f"config.tinker = True: {problem}") from None
pb = SimpleNamespace(**runpy.run_path(str(sdk.locate_file("tinker/proto/tinker_public_pb2.py"))))
