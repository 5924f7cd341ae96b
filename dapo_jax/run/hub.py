"""Publication of an exported folder through huggingface_hub, checked before it is written."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

from dapo_jax.config.experiment import ExportConfig
from dapo_jax.reporting.model_card import TAG
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.runtime.storage.output_folder import OWN_PREFIX

FIELD = "push_to_hub"


def check_names(config: ExportConfig) -> None:
    """Raises `ConfigError` for names that a hub refuses; asks nobody."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    for field in (FIELD, "base_model", "datasets"):
        value = getattr(config, field)
        for name in value.split(",") if field == "datasets" else [value]:
            try:
                validate_repo_id(name or "empty")
            except HFValidationError as error:
                require(False, field, value, f"OWNER/NAME; {_line(error)}")
    plain = config.license.replace("-", "").replace(".", "")
    fits = not plain or plain.isalnum() and plain.islower() and plain.isascii()
    require(fits, "license", config.license, "an identifier such as apache-2.0")


def check_repository(config: ExportConfig) -> str:
    """Full name of the repository to write, after asking the hub; empty where none is asked for.

    Raises:
        ConfigError: there is no token, it may not write there, or the repository holds something
            else.
    """
    if not config.push_to_hub:
        return ""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    name, api = config.push_to_hub, HfApi()
    with _telling(name):
        allowed = "empty without a token of the hub: `hf auth login`, or the variable HF_TOKEN"
        require(get_token() is not None, FIELD, name, allowed)
        user = api.whoami()
        role = user.get("auth", {}).get("accessToken", {}).get("role")
        require(role != "read", FIELD, name, "empty with a token that may only read")
        owners = [user["name"], *(one["name"] for one in user.get("orgs", ()))]
        owner, _, own = name.rpartition("/")
        fits = owner in ("", *owners)
        require(fits, FIELD, name, f"NAME, or OWNER/NAME of {' or '.join(owners)}")
        full = f"{owner or owners[0]}/{own}"
        try:
            found = api.model_info(full)
        except RepositoryNotFoundError:
            return full
    files = {file.rfilename for file in found.siblings or ()} - {".gitattributes"}
    allowed = (
        f"a new or empty repository, or an earlier export; {full} holds {min(files, default='')}"
    )
    require(not files or TAG in (found.tags or ()), FIELD, name, allowed)
    private = bool(found.private)
    allowed = f"{private}: {full} is {'private' if private else 'public'}"
    require(private == config.private, "private", config.private, allowed)
    return full


def push(folder: pathlib.Path, config: ExportConfig, name: str, wrote: Sequence[str]) -> str:
    """Sends a folder as one commit, and returns its address.

    Args:
        name: full name of the repository; made where there is none.
        wrote: patterns of names that an earlier export may have left there.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    hint = f"; {config.out} is complete: hf upload {name} {config.out} --exclude '{OWN_PREFIX}*'"
    with _telling(config.push_to_hub, hint):
        api.create_repo(name, private=config.private, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=f"Export by {TAG}",
            ignore_patterns=[f"{OWN_PREFIX}*"],
            delete_patterns=list(wrote),
        )
    return f"{api.endpoint}/{name}"


@contextlib.contextmanager
def _telling(name: str, hint: str = "") -> Iterator[None]:
    """Context in which errors of the client and its network are `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the client's own, its HTTP library's, the system's
        raise ConfigError(f"config.{FIELD} = {name!r}: {_line(error)}{hint}", FIELD) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
