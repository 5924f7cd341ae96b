"""Binary messages of Tinker's API, as its SDK declares them."""

from dapo_jax.types.errors import ConfigError

SDK_VERSIONS = "0.38.*"  # that were tested
try:
    from tinker.proto import tinker_public_pb2
except ImportError as error:
    problem = f"needs pip install 'tinker=={SDK_VERSIONS}' ({error})"
    raise ConfigError(f"config.tinker = True: {problem}") from None
pb = tinker_public_pb2
