"""The recipe of the shipped policy."""

import hashlib
import importlib
import json
import pathlib

from dapo_jax.config.settings import leaves
from dapo_jax.extras.arithmetic import make_worked_example
from dapo_jax.extras.sft.settings import SftConfig

ROOT = pathlib.Path(__file__).parents[2]
NAME = "dapo_jax:arithmetic_base"
FOLDER = ROOT / "dapo_jax/data/policies/arithmetic_base"
MADE_BY = ROOT / "tests/fixtures/shipped_policy.json"


def recipe_digest() -> str:
    """Digest of what configs/arithmetic_base.py sets and of the first examples it trains on.

    A comment, a new setting with its default, or a faster generator changes nothing.
    """
    config = importlib.import_module("configs.arithmetic_base").get_config()
    defaults = {name: value for name, _, value in leaves(SftConfig())} | {"out": config.out}
    settings = {n: value for n, _, value in leaves(config) if value != defaults[n]}
    examples = [make_worked_example(config.seed, i, config.examples) for i in range(256)]
    return hashlib.sha256(json.dumps([settings, examples], sort_keys=True).encode()).hexdigest()


def weights_digest(folder: pathlib.Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":  # after the folder was made anew
    made_by = {"recipe": recipe_digest(), "weights": weights_digest(FOLDER)}
    MADE_BY.write_text(json.dumps(made_by, indent=1) + "\n")
