"""Settings by the names of earlier versions, TRL and verl, for hints in error messages."""

import functools
import pathlib

from dapo_jax.types.errors import present_name

# Arguments that no setting replaces, and what to do instead.
ADVICE: dict[str, str] = {
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint", "trainer.resume_mode"),
        "the same command resumes a stopped run",
    ),
    **dict.fromkeys(
        ("preset", "algorithm", "algorithm.name", "loss"),
        "write the preset behind the config: FILE:grpo or NAME:grpo",
    ),
    "algorithm.distillation_top_k": "'jsd' compares whole distributions",
    "data.overlong": "longer examples are dropped, and counted",
    "format": "export writes Hugging Face folders; llama.cpp's convert_hf_to_gguf.py reads them",
}


@functools.cache
def settings_by_argument() -> dict[str, str]:
    """Return the setting, or several joined by ", ", that replaces each argument."""
    text = pathlib.Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    lines = [line.partition(": ") for line in text.splitlines() if not line.startswith("#")]
    return {name: setting for setting, _, names in lines for name in names.split()}


def replacements(name: str) -> list[str]:
    """Return the settings that replace an argument of another library, by its name or last part."""
    if (present := present_name(name)) != name:
        return [present]
    if name.startswith("extras."):
        return []
    settings = settings_by_argument()
    last = name.rpartition(".")[2]
    same_end = {setting for full, setting in settings.items() if full.rpartition(".")[2] == last}
    by_end = same_end.pop() if len(same_end) == 1 else ""
    known = settings.get(name) or settings.get(last) or by_end
    return known.split(", ") if known else []
