"""A package of somebody else: each of its plug-ins is one function or class."""

from setuptools import setup

setup(
    name="dapo-jax-foreign",
    version="1.0",
    py_modules=["foreign_plugins"],
    entry_points={
        "dapo_jax.verifiers": ["last_digit = foreign_plugins:last_digit"],
        "dapo_jax.parts": ["brevity = foreign_plugins:Brevity"],
        "dapo_jax.sources": ["counting = foreign_plugins:Counting"],
        "dapo_jax.environments": ["echo = foreign_plugins:Echo"],
        "dapo_jax.samplers": ["counted = foreign_plugins:counted"],
        "dapo_jax.settings": ["brevity = foreign_plugins:BrevitySettings"],
        "dapo_jax.sinks": ["lines = foreign_plugins:Lines"],
        "dapo_jax.families": ["otter = foreign_plugins:OTTER"],
        "dapo_jax.commands": ["hello = foreign_plugins:hello"],
    },
)
