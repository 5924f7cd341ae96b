"""Shipped configs on 1, 4, 8 and 16 devices: every check that comes before compiling."""

import json

import forked
from command_lines import ROOT

COUNTS = (1, 4, 8, 16)
# Numbers of devices of a config's size class, where not all: what holds its state (docs/pods.md),
# and what its rows fill.
CLASSES = {
    "qwen2p5_7b_math": (4, 8, 16),
    "dapo_qwen2p5_32b": (),
    "gemma3_270m": (1, 4, 8),
    "gemma3_270m_base": (1, 4),
    "smollm2": (1, 4, 8),
    "smollm2_base": (1, 4, 8),
    "two_strategies": (1, 4),
    "two_strategies_base": (1, 4, 8),
}
ADAPT = "arithmetic arithmetic_base arithmetic_sft".split()
LAY_OUT = """
import json, pathlib, sys
import jax
from dapo_jax.extras.plan.chips import parse
from dapo_jax.extras.plan.programs import lay_out
from dapo_jax.config.experiment import Config
from dapo_jax.config.files import read_config
from dapo_jax.run.build import open_mesh
from dapo_jax.types.errors import ConfigError

def devices_of(variant):  # an Ironwood chip is two
    chips = variant.rpartition("_")[2]
    return int(chips) * (1 + variant.startswith("tpu7x")) if chips.isdigit() else 0

def tried(path, name, count):
    config = read_config(object, f"{path}:{name}" if name else str(path))
    devices = jax.devices()[:count]
    if not isinstance(config, Config):
        open_mesh(config.mesh, config.packing.rows_per_microbatch, devices)
        return ""
    if not pathlib.Path(config.model.folder).name.startswith("Qwen"):
        config.model.folder = sys.argv[2]
    lay_out(config, parse(f"cpu:{count}"), devices)
    return ""

answers = []
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    scope = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(), path, "exec"), scope)
    for count in json.loads(sys.argv[3]):
        named = [n for n in scope.get("VARIANTS", {}) if devices_of(n) == count]
        for name in ["", *named]:
            try:
                answers.append([path.stem, name, count, tried(path, name, count)])
            except ConfigError as error:
                answers.append([path.stem, name, count, str(error)])
print(json.dumps(answers))
"""


def test_every_config_or_its_variant_starts_on_the_devices_of_its_class(base):
    """One test: laying all of them out takes one process some seconds."""
    flags = "--xla_force_host_platform_device_count=16"
    arguments = [str(ROOT / "configs"), str(base), json.dumps(COUNTS)]
    done = forked.run(LAY_OUT, *arguments, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)  # file, variant ('': the default), devices, error
    for file in {file for file, _, _, _ in answers}:
        for count in CLASSES.get(file, COUNTS):
            tried = [answer for answer in answers if (answer[0], answer[2]) == (file, count)]
            assert any(error == "" for *_, error in tried), tried
    assert not [answer for answer in answers if answer[1] and answer[3]]  # a variant's own number
    assert not [answer for answer in answers if answer[0] in ADAPT and answer[3]]
