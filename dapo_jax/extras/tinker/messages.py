"""Binary messages of Tinker's API, as its SDK declares them; nothing else of it is imported."""

import importlib.metadata
import runpy
from types import SimpleNamespace

from dapo_jax.types.errors import ConfigError

SDK_RELEASE = "0.38."  # that was tested: another may number the fields in another way
INSTALL = f"pip install 'tinker=={SDK_RELEASE}*'"
installed = importlib.metadata.distributions(name="tinker")
sdk = next((each for each in installed if each.version.startswith(SDK_RELEASE)), None)
if sdk is None:
    raise ConfigError(f"config.tinker = True: needs {INSTALL}")
pb = SimpleNamespace(**runpy.run_path(str(sdk.locate_file("tinker/proto/tinker_public_pb2.py"))))
