"""Access control of the server: API key, `Host` and `Origin` headers, content type."""

import hmac
import ipaddress
import os
import pathlib
from collections.abc import Mapping
from urllib.parse import urlsplit

from dapo_jax.config.experiment import ServeConfig
from dapo_jax.runtime.settings import ConfigError

KEY_VARIABLE = "DAPO_API_KEY"
ALL_HOSTS = "*"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class RequestError(Exception):
    """Rejection of a request.

    Attributes:
        param: name of the wrong field.
        status: HTTP status code.
        code: OpenAI's machine-readable error code.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


def read_key(config: ServeConfig) -> str:
    """Return the API key from `api_key_file` or the environment; empty: no key is required.

    Raises:
        ConfigError: the file can't be read, or holds no key.
    """
    if config.api_key_file:
        source = f"config.api_key_file = {config.api_key_file!r}"
        try:
            key = pathlib.Path(config.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: can't be read: {error}") from None
    else:
        source = f"the environment variable {KEY_VARIABLE}"
        key = os.environ.get(KEY_VARIABLE, "").strip()
    if (config.api_key_file and not key) or not (key.isascii() and key.isprintable()):
        # No message contains the key itself.
        raise ConfigError(f"{source}: must hold a key: one line of printable ASCII")
    return key


def exposure_warning(config: ServeConfig, key: str) -> str:
    """Return a warning if other machines can use the server without a key, else empty."""
    try:
        is_local = ipaddress.ip_address(config.host.strip("[]")).is_loopback
    except ValueError:
        is_local = config.host == "localhost"
    if key or is_local:
        return ""
    return (
        f"warning: anyone who can reach {config.host} can use the server: there is no API key "
        f"(--api_key_file=FILE, or {KEY_VARIABLE})"
    )


def _host_name(address: str) -> str:
    """Return the lower-case host of `HOST:PORT` or of an origin; empty if there is none."""
    try:
        return urlsplit(address if "//" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""


class Access:
    """Check of requests before their bodies are read.

    Args:
        config: `host` and `allowed_hosts` are the host names that clients may use.
        key: API key that clients must send; empty: none.
    """

    def __init__(self, config: ServeConfig, key: str):
        allowed = [name.strip().lower() for name in config.allowed_hosts.split(",")]
        self._allows_all = ALL_HOSTS in allowed
        self._hosts = {*LOOPBACK, config.host.strip("[]").lower(), *allowed} - {""}
        self._key = key

    def has_key(self, authorization: str) -> bool:
        """Return True if an `authorization` header holds the key, or no key is required."""
        sent = authorization.partition(" ")[2].strip()
        return not self._key or hmac.compare_digest(sent.encode(), self._key.encode())

    def check(self, headers: Mapping[str, str], *, local_address: str, has_body: bool) -> None:
        """Raise `RequestError` unless an HTTP request may be served.

        A page of another site can make a browser send a request, but can't choose these headers.

        Args:
            headers: by lower-case name.
            local_address: address of this machine at which the request arrived.
        """
        for field in ("host", "origin"):
            if self._allows_all or (field == "origin" and field not in headers):
                continue
            value = headers.get(field, "")
            if _host_name(value) not in self._hosts | {local_address}:
                allowed = ", ".join(sorted(self._hosts))
                message = f"{field} = {value[:200]!r}: must be one of {allowed}"
                raise RequestError(f"{message}; the setting allowed_hosts adds others", status=403)
        if not self.has_key(headers.get("authorization", "")):
            message = "the key is missing or wrong: send the header Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")
        kind = headers.get("content-type", "")
        if has_body and kind.partition(";")[0].strip().lower() != "application/json":
            message = f"content-type = {kind[:200]!r}: must be application/json"
            raise RequestError(message, status=415)
