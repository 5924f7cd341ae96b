"""Messages to a server over HTTP, and the keys that it shares with its clients."""

import hmac
import http.client
import os
import pathlib
import urllib.error
import urllib.request

from dapo_jax.types.errors import ConfigError

KEY_VARIABLE = "DAPO_API_KEY"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_key(file: str, field: str) -> str:
    """Return the key in a file, the value of setting `field`, or in the environment; or "".

    Raises `ConfigError`.
    """
    source = f"the environment variable {KEY_VARIABLE}"
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if file:
        source = f"config.{field} = {file!r}"
        try:
            key = pathlib.Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: can't be read: {error}") from None
    if (file and not key) or not (key.isascii() and key.isprintable()):
        # No message contains the key itself.
        raise ConfigError(f"{source}: must hold a key: one line of printable ASCII")
    return key


def has_key(authorization: str, key: str) -> bool:
    """Return True if an `authorization` header holds the key, or the key is empty."""
    sent = authorization.partition(" ")[2].strip()
    return not key or hmac.compare_digest(sent.encode(), key.encode())


def post(url: str, body: bytes, headers: dict[str, str], seconds: float) -> bytes:
    """Return the answer to a message; machines of one run need no proxy.

    Raises `urllib.error.HTTPError` for a refusal, another OSError if nobody answers.
    """
    request = urllib.request.Request(url, body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=seconds) as response:
            return response.read()
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r}") from error
