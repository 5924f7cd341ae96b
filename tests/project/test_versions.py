"""launch/versions.txt: what launch/ and the tests install, with hashes, as setup.py allows."""

import importlib.metadata
import pathlib
import re
import subprocess

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
VERSIONS = ROOT / "launch/versions.txt"
PINNED = re.compile(
    r"([\w.-]+)(?:\[[\w,]+\])?==(\S+)(?: ; [^\\]+)? \\((?:\n    --hash=sha256:[0-9a-f]{64} ?\\?)+)"
)


def pins(*wanted: str) -> dict[str, str]:
    """Versions by name of the packages that a script of launch/ would install."""
    line = f"source launch/pins.sh && pins {' '.join(wanted)}"
    text = subprocess.check_output(["bash", "-c", line], text=True, cwd=ROOT)
    entries = re.split(r"\n(?=\S)", re.sub("^#.*\n", "", text, flags=re.MULTILINE).strip())
    matches = [PINNED.fullmatch(entry) for entry in entries]
    assert all(matches), [entry for entry, match in zip(entries, matches, strict=True) if not match]
    names = [canonicalize_name(match[1]) for match in matches]
    assert len(set(names)) == len(names)
    return dict(zip(names, (match[2] for match in matches), strict=True))


def test_every_package_of_every_extra_has_a_version_that_setup_allows_and_a_hash():
    """And all that they need in turn, as far as it is installed here."""
    extras = importlib.metadata.metadata("dapo_jax").get_all("Provides-Extra")
    assert pins("base", ",".join(extras))
    for extra in extras:
        pinned = pins("base", extra)
        for wanted in map(Requirement, importlib.metadata.requires("dapo_jax")):
            if not wanted.marker or wanted.marker.evaluate({"extra": extra}):
                version = pinned[canonicalize_name(wanted.name)]
                assert wanted.specifier.contains(version), f"{wanted}, but {version}"
    assert len(pins("base", "test")) > 150 and not pins("base").keys() & {"libtpu", "ruff"}
    assert "setuptools" in pins("base")
    assert pins("uv").keys() == {"uv"} and "cyclonedx-bom" in pins("sbom")


def test_what_is_installed_here_is_what_the_list_has():
    """Every package that the tests' own ones need is in the list, and of that version."""
    pinned, waiting, seen = pins("base", "test"), ["dapo_jax"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for text in importlib.metadata.requires(name) or ():
            wanted = Requirement(text)
            extra = {"extra": "test" if name == "dapo_jax" else ""}
            if wanted.marker is None or wanted.marker.evaluate(extra):
                other = canonicalize_name(wanted.name)
                assert other in pinned, text
                if other != "setuptools":  # of an environment made by hand
                    assert pinned[other] == importlib.metadata.version(other), text
                waiting += {other} - seen


def test_a_file_with_another_hash_is_refused(tmp_path):
    """By the pip that launch/install.sh calls, of a local file."""
    (tmp_path / "mine-1.0-py3-none-any.whl").write_bytes(b"another file")
    (tmp_path / "pins").write_text(f"mine==1.0 --hash=sha256:{'0' * 64}\n")
    script = (ROOT / "launch/install.sh").read_text()
    assert script.count("--require-hashes") == 1 and script.count('"${pip[@]}"') == 2
    pip = [ROOT / ".venv/bin/python", "-m", "pip", "install", "--require-hashes", "--no-index"]
    pip += ["--find-links", tmp_path, "-r", tmp_path / "pins", "--target", tmp_path / "to"]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr
