"""Who reaches the server: port, API key, `Host` and `Origin` headers, content type."""

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from dapo_jax.extras.serve.errors import RequestError
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.runtime.keys import KEY_VARIABLE, LOOPBACK, has_key
from dapo_jax.types.errors import ConfigError, require

BACKLOG = 2048


def bind(config: ServeConfig) -> socket.socket:
    """Return a socket that listens on the port. Raise `ConfigError`."""
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, config.http_port), family=family, backlog=BACKLOG)
    except OSError as error:
        allowed = "a name or an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        is_resolved = (error.errno or 0) >= 0  # errors of getaddrinfo have negative numbers
        require(is_resolved, "host", config.host, allowed)
        raise ConfigError(
            f"config.http_port = {config.http_port}: on {config.host}: {error}"
        ) from None


def exposure_warning(config: ServeConfig, key: str) -> str:
    """Return a warning if other machines can use the server without a key, else empty."""
    if key or config.host.strip("[]") in LOOPBACK:
        return ""
    return (
        f"warning: anyone who can reach {config.host} can use the server: there is no API key "
        f"(--api_key_file=FILE, or {KEY_VARIABLE})"
    )


class Access:
    """Check of requests before their bodies are read; an empty `key` means that none is needed."""

    def __init__(self, config: ServeConfig, key: str):
        allowed = [name.strip().lower() for name in config.allowed_hosts.split(",")]
        self._allows_all = "*" in allowed
        self._hosts = {*LOOPBACK, config.host.strip("[]").lower(), *allowed} - {""}
        self._key = key

    def _check_host(self, field: str, value: str, local_address: str) -> None:
        """Raise `RequestError` unless `HOST:PORT` or an origin names this server."""
        try:
            host = urlsplit(value if "//" in value else f"//{value}").hostname
        except ValueError:
            host = None
        if not self._allows_all and host not in self._hosts | {local_address}:
            allowed = ", ".join(sorted(self._hosts))
            message = f"{field} = {value[:200]!r}: must be one of {allowed}"
            raise RequestError(f"{message}; the setting allowed_hosts adds others", status=403)

    def check(self, headers: Mapping[str, str], *, local_address: str, has_body: bool) -> None:
        """Raise `RequestError` unless an HTTP request may be served.

        A page of another site can make a browser send a request, but can't choose these headers.
        """
        self._check_host("host", headers.get("host", ""), local_address)
        if "origin" in headers:
            self._check_host("origin", headers["origin"], local_address)
        if not has_key(headers.get("authorization", ""), self._key):
            message = "the key is missing or wrong: send the header Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")
        kind = headers.get("content-type", "")
        if has_body and kind.partition(";")[0].strip().lower() != "application/json":
            message = f"content-type = {kind[:200]!r}: must be application/json"
            raise RequestError(message, status=415)
