"""Upload of an exported folder by huggingface_hub, checked before the folder is written."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

from dapo_jax.config.experiment import ExportConfig
from dapo_jax.reporting.model_card import TAG
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.runtime.storage.output_folder import OWN_PREFIX

FIELD = "push_to_hub"


def check_names(config: ExportConfig) -> None:
    """Raise `ConfigError` for names that a hub rejects, without a request."""
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
    """Return the full name of the repository to write, checked at the hub; empty without one.

    Raises:
        ConfigError: no token, no permission to write, or a repository with other content.
    """
    if not config.push_to_hub:
        return ""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    name = config.push_to_hub
    api = HfApi()
    with _hub_errors(name):
        allowed = "empty without a token of the hub: `hf auth login`, or the variable HF_TOKEN"
        require(get_token() is not None, FIELD, name, allowed)
        user = api.whoami()
        role = user.get("auth", {}).get("accessToken", {}).get("role")
        require(role != "read", FIELD, name, "empty with a token that may only read")
        owners = [user["name"], *(group["name"] for group in user.get("orgs", ()))]
        owner, _, repository = name.rpartition("/")
        fits = owner in ("", *owners)
        require(fits, FIELD, name, f"NAME, or OWNER/NAME of {' or '.join(owners)}")
        full = f"{owner or owners[0]}/{repository}"
        try:
            info = api.model_info(full)
        except RepositoryNotFoundError:
            return full
    files = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
    allowed = (
        f"a new or empty repository, or an earlier export; {full} holds {min(files, default='')}"
    )
    require(not files or TAG in (info.tags or ()), FIELD, name, allowed)
    private = bool(info.private)
    allowed = f"{private}: {full} is {'private' if private else 'public'}"
    require(private == config.private, "private", config.private, allowed)
    return full


def push(folder: pathlib.Path, config: ExportConfig, name: str, wrote: Sequence[str]) -> str:
    """Upload a folder as one commit, and return its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    hint = f"; {config.out} is complete: hf upload {name} {config.out} --exclude '{OWN_PREFIX}*'"
    with _hub_errors(config.push_to_hub, hint):
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
def _hub_errors(name: str, hint: str = "") -> Iterator[None]:
    """Convert errors of the client and its network to `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of the client, its HTTP library, or the system
        raise ConfigError(f"config.{FIELD} = {name!r}: {_line(error)}{hint}", FIELD) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
