"""Settings in docstrings, signatures and representations: what `help` and Shift-Tab show."""

import dataclasses
import inspect
import pydoc

import pytest

import dapo_jax
from dapo_jax.config.experiment import ServeConfig, SftConfig
from dapo_jax.runtime.rules import Choices

SECTIONS = [
    value
    for name in dapo_jax.__all__
    if dataclasses.is_dataclass(value := getattr(dapo_jax, name))
    and name not in ("Result", "ModelFolder", "Observation")
] + [ServeConfig]
EACH = pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)


def entries(kind: type) -> dict[str, str]:
    """Entries of a section's docstring on one line each, by the setting's name."""
    found: dict[str, str] = {}
    for line in (inspect.getdoc(kind) or "").partition("Settings:\n")[2].splitlines():
        if not line.startswith(" " * 8):
            name = line.split(":")[0].strip()
        found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


@EACH
def test_help_shows_every_setting_with_type_default_sentence_and_range(kind):
    shown = entries(kind)
    assert list(shown) == [field.name for field in dataclasses.fields(kind)]
    for field in dataclasses.fields(kind):
        text = shown[field.name]
        if dataclasses.is_dataclass(field.type):
            assert f"{field.name}: {field.type.__name__} = {field.default_factory()!r} " in text
            continue
        assert text.startswith(f"{field.name}: {field.type.__name__} = {field.default!r} ")
        assert field.metadata["explanation"] in text
        allowed = field.metadata["rule"].allowed
        if isinstance(allowed, Choices):
            assert all(word in text for word in allowed)
        elif allowed is not None:
            assert str(allowed) in text.lower()
    rendered = pydoc.plain(pydoc.render_doc(kind))
    assert all(f"{name}: " in rendered for name in shown)


def test_a_representation_is_short_and_makes_the_section_again():
    names = {name: getattr(dapo_jax, name) for name in dapo_jax.__all__}
    assert repr(dapo_jax.Config()) == "Config()"
    assert repr(dapo_jax.preset("grpo")).startswith(
        "Algorithm(\n    clip_high=0.2,\n    dual_clip="
    )
    config = dapo_jax.Config(
        run_dir="runs/it's mine",
        algorithm=dapo_jax.preset("vapo"),
        model=dapo_jax.Model(folder="models/small"),
        critic=dapo_jax.Critic(optimizer=dapo_jax.Optimizer()),  # not the default of that place
        sampler=dapo_jax.Sampler(slots=7),
    )
    shown = repr(config)
    assert eval(shown, names) == config and "    sampler=Sampler(slots=7),\n" in shown
    assert max(map(len, shown.splitlines())) < 100
    assert str(SftConfig()) == "SftConfig()"
    changed = SftConfig(optimizer=dapo_jax.Optimizer())
    assert repr(changed) == "SftConfig(optimizer=Optimizer())"
