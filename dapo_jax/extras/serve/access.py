"""Who reaches the server: port, API key, `Host` and `Origin` headers, content type."""

import socket
from urllib.parse import urlsplit

from starlette.requests import Request

from dapo_jax.extras.serve.fields import RequestError
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.runtime.keys import LOOPBACK, has_key
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
        place = f"config.http_port = {config.http_port}: on {config.host}"
        raise ConfigError(f"{place}: {error}") from None


def check_access(http: Request, config: ServeConfig, key: str) -> None:
    """Raise `RequestError` unless a request may be served; an empty key lets all in.

    A page of another site can make a browser send a request, but can't choose these headers.
    """
    allowed_hosts = {name.strip().lower() for name in config.allowed_hosts.split(",")} - {""}
    hosts = {*LOOPBACK, config.host.strip("[]").lower()} | allowed_hosts
    headers, (address, *_) = http.headers, http.scope.get("server") or ("",)
    for field in ["host", "origin"] if "origin" in headers else ["host"]:
        value = headers.get(field, "")
        if not {"*", _host(value)} & (hosts | {address}):
            allowed = f"one of {', '.join(sorted(hosts))}"
            message = f"{field} = {value[:200]!r}: must be {allowed}"
            raise RequestError(f"{message}; the setting allowed_hosts adds others", status=403)
    bare = headers.get("x-api-key", "")  # where Tinker's SDK sends it
    if not has_key(f"Bearer {bare}" if bare else headers.get("authorization", ""), key):
        message = "the key is missing or wrong: send the header Authorization: Bearer KEY"
        raise RequestError(message, status=401, code="invalid_api_key")
    kind = headers.get("content-type", "")
    is_json = kind.partition(";")[0].strip().lower() == "application/json"
    if http.method == "POST" and not is_json and not config.tinker:  # whose bodies are binary, too
        message = f"content-type = {kind[:200]!r}: must be application/json"
        raise RequestError(message, status=415)


def _host(value: str) -> str | None:
    """Return the host of `HOST:PORT` or an origin; None if there is none."""
    try:
        return urlsplit(value if "//" in value else f"//{value}").hostname
    except ValueError:
        return None
