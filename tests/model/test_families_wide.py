"""Slow: fresh folders by `transformers` in more variants, and ours read back; memory of loading.

TRANSFORMERS_PYTHON names an interpreter that has torch and transformers, where this one has not.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import families_fixtures as families
import numpy as np
import pytest
from mxfp4_folders import write_both

from dapo_jax.model.config_json import decoder_from_json
from dapo_jax.model.families import family_names, family_of
from dapo_jax.model.load_huggingface import read_config

pytestmark = pytest.mark.slow
TESTS = pathlib.Path(__file__).parents[1]
WRITER = TESTS / "fixtures/write_models.py"
SEED = int(os.environ.get("FAMILIES_SEED", "1"))


def run_writer(*arguments):
    python = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
    needed = ("transformers", "torch")
    if python == sys.executable and None in map(importlib.util.find_spec, needed):
        pytest.skip("needs transformers and torch: set TRANSFORMERS_PYTHON")
    subprocess.run([python, WRITER, *map(str, arguments)], check=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of every family."""
    root = tmp_path_factory.mktemp("models")
    run_writer("write", root, "--all", f"--seed={SEED}")
    return sorted(root.iterdir())


def test_logits_and_greedy_tokens_are_those_of_transformers(folders, one_device):
    for folder in folders:
        logits, used = families.packed_logits(folder, one_device)
        with np.load(folder / "expected.npz") as expected:
            distance = np.abs(logits - expected["logits"])[used].max()
        # Reads of delta-net layers near 0 are normed, which multiplies rounding.
        delta = "linear_attention" in (folder / "config.json").read_text()
        print(f"{folder.name}: distance {distance:.1e}")
        assert distance < (1e-4 if delta else 2e-5), folder.name
        actual, expected_tokens = families.greedy_tokens(folder, one_device)
        assert actual == expected_tokens, folder.name


def test_exported_folders_load_in_transformers_with_identical_logits(
    folders, eight_devices, tmp_path
):
    for folder in folders:
        families.export(folder, tmp_path / folder.name, eight_devices, max_shard_gb=2e-3)
        assert families.stored_bytes(tmp_path / folder.name) == families.stored_bytes(folder)
        (tmp_path / folder.name / "expected.npz").symlink_to(folder / "expected.npz")
    run_writer("check", *sorted(tmp_path.iterdir()))
    for folder in folders:
        with np.load(folder / "expected.npz") as expected:
            logits = np.load(tmp_path / folder.name / "logits.npy")
            np.testing.assert_array_equal(logits, expected["logits"])


def test_a_folder_in_mxfp4_is_read_as_transformers_reads_it(folders, one_device, tmp_path):
    (source,) = (folder for folder in folders if folder.name == "gpt_oss")
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    write_both(source, packed, plain)
    (packed / "expected.npz").symlink_to(source / "expected.npz")
    run_writer("check", packed)
    logits, used = families.packed_logits(packed, one_device)
    assert np.abs(logits - np.load(packed / "logits.npy"))[used].max() < 2e-5


def test_missing_fields_have_the_defaults_of_the_classes(tmp_path):
    run_writer("defaults", *(tmp_path / kind for kind in family_names()))
    for kind, family in ((kind, family_of(kind)) for kind in family_names()):
        named = decoder_from_json({"model_type": kind}, kind, "model.folder")
        assert read_config(tmp_path / kind) == named
        stated = json.loads((tmp_path / kind / "config.json").read_text())
        for name, value in family.defaults.items():
            if not name.startswith("rope_"):  # which are merged
                assert stated.get(name, value) == value, (kind, name)


def test_loading_two_gigabytes_needs_less_than_twice_the_largest_tensor_more(tmp_path):
    line = [sys.executable, TESTS / "benchmarks/loading.py", tmp_path / "model"]
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(TESTS.parent)}
    actual = json.loads(subprocess.check_output(line, env=environment))
    assert actual["files"] > 1900
    assert actual["beyond_params"] < 2 * actual["largest_tensor"]
