"""Access to a served policy: hosts and origins of HTTP, the type of a body, the key of clients."""

import hmac
import ipaddress
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from dapo_jax.config.experiment import ServeConfig
from dapo_jax.runtime.settings import ConfigError

KEY_VARIABLE = "DAPO_API_KEY"
ALL_HOSTS = "*"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Refusal(NamedTuple):
    """Refusal of a request: status code of HTTP, message, OpenAI's name of the error."""

    status: int
    message: str
    code: str | None = None


def read_key(config: ServeConfig) -> str:
    """Key that clients must send: of `api_key_file`, else of the environment; empty: none.

    Raises:
        ConfigError: the file can't be read, or holds no key.
    """
    if not config.api_key_file:
        named, key = f"the environment variable {KEY_VARIABLE}", os.environ.get(KEY_VARIABLE, "")
    else:
        named = f"config.api_key_file = {config.api_key_file!r}"
        try:
            key = pathlib.Path(config.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{named}: can't be read: {error}") from None
    key = key.strip()
    if config.api_key_file and not key or not (key.isascii() and key.isprintable()):
        # The key itself is in no message.
        raise ConfigError(f"{named}: must hold a key: one line of printable ASCII")
    return key


def is_local(host: str) -> bool:
    """True for an address or name of this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def exposure(config: ServeConfig, key: str) -> str:
    """Warning where others than this machine may use the server without a key, else empty."""
    if key or is_local(config.host):
        return ""
    return (
        f"warning: who reaches {config.host} may use the server: there is no API key "
        f"(--api_key_file=FILE, or {KEY_VARIABLE})"
    )


def _name(address: str) -> str:
    """Host of `HOST:PORT` or of an origin, in lower case; empty where it is none."""
    try:
        return urlsplit(address if "//" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""


class Access:
    """Check of requests before their bodies are read.

    Args:
        config: its `host` and `allowed_hosts` are names by which clients may call.
        key: that clients must send; empty: none.
    """

    def __init__(self, config: ServeConfig, key: str):
        more = [name.strip().lower() for name in config.allowed_hosts.split(",")]
        self._any = ALL_HOSTS in more
        self._hosts = {*LOOPBACK, config.host.strip("[]").lower(), *more} - {""}
        self._key = key

    def has_key(self, authorization: str) -> bool:
        """True where a header or metadatum `authorization` holds the key, or none is asked for."""
        sent = authorization.partition(" ")[2].strip() if authorization else ""
        return not self._key or hmac.compare_digest(sent.encode(), self._key.encode())

    def refusal(self, headers: Mapping[str, str], *, local: str, has_body: bool) -> Refusal | None:
        """Reason to refuse a request of HTTP; None: it is let in.

        A page of another site can make a browser send a request, but not choose these headers.

        Args:
            headers: by name in lower case.
            local: address of this machine at which the request has arrived.
        """
        for field in "host", "origin":
            sent = headers.get(field, "")
            known = _name(sent) in self._hosts | {local}
            if not (self._any or known or field == "origin" and "origin" not in headers):
                allowed = ", ".join(sorted(self._hosts))
                more = "the setting allowed_hosts adds others"
                return Refusal(403, f"{field} = {sent[:200]!r}: must be of {allowed}; {more}")
        if not self.has_key(headers.get("authorization", "")):
            message = "the key is missing or wrong: send the header Authorization: Bearer KEY"
            return Refusal(401, message, "invalid_api_key")
        kind = headers.get("content-type", "")
        if has_body and kind.partition(";")[0].strip().lower() != "application/json":
            return Refusal(415, f"content-type = {kind[:200]!r}: must be application/json")
        return None
