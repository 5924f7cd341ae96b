"""launch/versions.txt: what launch/ and the tests install, of versions that setup.py allows."""

import importlib.metadata
import pathlib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

VERSIONS = pathlib.Path(__file__).parents[2] / "launch/versions.txt"


def test_every_package_has_a_version_that_setup_allows():
    lines = [line for line in VERSIONS.read_text().splitlines() if not line.startswith("#")]
    pinned = {
        canonicalize_name(name): version for name, version in (one.split("==") for one in lines)
    }
    assert len(pinned) == len(lines) > 100
    for text in importlib.metadata.requires("dapo_jax"):
        wanted = Requirement(text)
        asked_for = wanted.marker is None or wanted.marker.evaluate({"extra": "test"})
        if asked_for:
            version = pinned[canonicalize_name(wanted.name)]
            assert wanted.specifier.contains(version), f"{text}, but {version}"
