"""Downloads a model or data of the Hugging Face hub, then becomes the command behind `--`.

    python launch/download.py --model=OWNER/NAME --data=OWNER/NAME -- COMMAND

A model goes into models/NAME, and the command is told so; data goes into data/NAME. What is there
is not downloaded again. The token is the hub's own: HF_TOKEN, or the file that HF_TOKEN_PATH names,
which is removed afterwards. Exit codes: 2, where another try can't help; 1, where it may.
"""

import contextlib
import os
import pathlib
import sys

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # a log is no terminal

from huggingface_hub import errors, snapshot_download  # noqa: E402

MODEL_FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model"]  # no second format
FINAL = (  # of what the hub says; a hub that does not answer is none of them
    errors.RepositoryNotFoundError,
    errors.RevisionNotFoundError,
    errors.HFValidationError,
)
REFUSED = (401, 403, 404)


def is_final(error: BaseException | None) -> bool:
    """True where the hub refused, which another error may have been raised from."""
    if error is None:
        return False
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return isinstance(error, FINAL) or status in REFUSED or is_final(error.__cause__)


def fetch(kind: str, name: str) -> pathlib.Path:
    """Folder of a downloaded model or data set. Raises SystemExit after a line."""
    folder = pathlib.Path("models" if kind == "model" else "data", name.rpartition("/")[2])
    print(f"downloading {name} to {folder}", flush=True)
    patterns = MODEL_FILES if kind == "model" else None
    types = None if kind == "model" else "dataset"
    try:
        snapshot_download(name, repo_type=types, local_dir=folder, allow_patterns=patterns)
    except Exception as error:
        final = is_final(error)
        text = " ".join(str(error).split())
        advice = ": is the name right, has the token the right, is its licence accepted?"
        print(f"error: --{kind}={name}: {text}{advice if final else ''}", flush=True)
        raise SystemExit(2 if final else 1) from None
    if kind == "model" and not list(folder.glob("*.safetensors")):
        print(f"error: --model={name}: has no *.safetensors file, the format that is read")
        raise SystemExit(2)
    return folder


def main() -> None:
    """Downloads, and becomes the command."""
    split = sys.argv.index("--")
    command = sys.argv[split + 1 :]
    try:
        for flag in sys.argv[1:split]:
            kind, _, name = flag.removeprefix("--").partition("=")
            folder = fetch(kind, name)
            command += [f"--config.model.folder={folder}"] * (kind == "model")
    finally:
        if token := os.environ.pop("HF_TOKEN_PATH", ""):
            with contextlib.suppress(OSError):
                os.unlink(token)
    sys.stdout.flush()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
