"""Shared fixtures: eight virtual devices, a tiny model folder, a mesh of one device."""

import contextlib
import dataclasses
import fcntl
import gc
import importlib.metadata
import os
import pathlib
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator

# XLA compiles fast, not well: most programs of the tests run once or twice.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    + " --xla_cpu_parallel_codegen_split_count=1"
)
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Halves compile times; newer releases have only the emitters, and end at an unknown flag.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import numpy as np
import pytest
from clouds import Cloud, make_checkout

from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.learner.critic import scalar_config
from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.runtime import kept_programs
from dapo_jax.runtime.sharding import make_mesh
from dapo_jax.types.structs import Completion, Prompt

pytest_plugins = ["durations"]

# Imports and tracing make many objects and few cycles: each search for those takes long.
gc.freeze()
gc.set_threshold(20_000, 10, 10)

kept_programs.MAX_KEPT = 32  # files of tests share them

# Helpers stand in support/; processes that tests start find them too.
TESTS = pathlib.Path(__file__).parent
HELPERS = [str(TESTS), str(TESTS / "support"), str(TESTS / "benchmarks")]
sys.path[:0] = HELPERS
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS.parent), *HELPERS, os.environ.get("PYTHONPATH", "")]
)

# A shell's background job ignores the keys Ctrl-C and quit, and so would what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

TINY = DecoderConfig(
    vocab=32, layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64, tie_embeddings=True
)


DELTA = dataclasses.replace(
    TINY,
    family="qwen3_5_text",
    qkv_bias=False,
    qk_norm=True,
    norm_offset=True,
    output_gate=True,
    rotary_dim=4,
    recurrent=(True, False),
    delta_key_heads=2,
    delta_value_heads=4,
    delta_key_dim=6,
    delta_value_dim=8,
    delta_kernel=4,
)


def check_documented(metrics: Iterable[str]) -> None:
    """Fails on a name that has no line in the table of docs/metrics.md."""
    page = (TESTS.parent / "docs/metrics.md").read_text()
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    meanings = {name for cell in cells for name in re.findall(r"\w+", cell)}
    unknown = {name.split("/")[0] for name in metrics} - meanings - {"step"}
    assert not unknown, f"docs/metrics.md lacks {unknown}"


@pytest.fixture(autouse=True)
def forget_own_modules(tmp_path_factory):
    """Forgets the modules that a test wrote: those of another test may have the same names."""
    yield
    temporary = str(tmp_path_factory.getbasetemp())
    for name, module in sys.modules.copy().items():
        known = getattr(module, "__dict__", {})  # a lazy module would load itself for getattr
        paths = [known.get("__file__"), *(known.get("__path__") or ())]
        if any(str(path).startswith(temporary) for path in paths):
            del sys.modules[name]


@pytest.fixture
def fresh_programs():
    """No program that another test has traced is used, and none of this one's by another."""
    kept_programs.forget_programs()
    yield
    kept_programs.forget_programs()


@pytest.fixture(scope="session")
def one_device():
    return make_mesh(1, 1, 1, jax.devices()[:1])


@pytest.fixture(scope="session")
def eight_devices():
    return make_mesh(2, 2, 2)


@pytest.fixture(scope="session")
def tiny_params():
    """Random parameters whose distributions are neither flat nor a single token."""
    params = nn.unbox(jax.jit(init_params, static_argnums=0)(TINY, jax.random.key(0)))
    return params | {"embedding": params["embedding"] * 20}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, tiny_params):
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = arithmetic_tokenizer()
    save_huggingface.save_folder(folder, tiny_params, TINY, tokenizer.end_ids)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return folder


MOE = dataclasses.replace(
    TINY, mlp=16, experts=8, experts_per_token=2, qkv_bias=False, qk_norm=True, family="qwen3_moe"
)


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("moe")
    params = nn.unbox(jax.jit(init_params, static_argnums=0)(MOE, jax.random.key(0)))
    params["embedding"] *= 20
    save_huggingface.save_folder(folder, params, MOE, (1,))
    shutil.copy(tiny_folder / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def score_params(tiny_params):
    return tiny_params | {"score": jax.random.normal(jax.random.key(3), (TINY.embed,))}


@pytest.fixture(scope="session")
def score_folder(tmp_path_factory, tiny_folder, score_params):
    folder = tmp_path_factory.mktemp("score")
    save_huggingface.save_folder(folder, score_params, scalar_config(TINY), (1,))
    shutil.copy(tiny_folder / "tokenizer.json", folder)
    return folder


@contextlib.contextmanager
def first_devices(count: int = 1) -> Iterator[None]:
    """The program sees so many of the eight: cheaper where sharding is not the subject."""
    devices = jax.devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices(*args)[:count])
        yield


@pytest.fixture
def alone():
    with first_devices():
        yield


@pytest.fixture
def write_module(tmp_path_factory, monkeypatch):
    """Writes a module of a user's own; this process and the reward workers can import it."""
    folder = tmp_path_factory.mktemp("own_modules")
    monkeypatch.syspath_prepend(folder)
    path = [str(folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))

    def write(name: str, text: str) -> None:
        (folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a policy that knows the embedded task's format and guesses the sums."""
    from small_runs import make_small_base

    folder = tmp_path_factory.getbasetemp() / "base"
    if together := os.environ.get("PYTEST_XDIST_TESTRUNUID"):  # one process makes it for all
        folder = folder.parents[1] / f"base_{together[:8]}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with first_devices():
            return folder if folder.is_dir() else make_small_base(folder)


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory):
    from served import make_byte_folder

    return make_byte_folder(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def byte_engine(byte_folder):
    """As served: a model that takes the likeliest token, its engine, its parameters."""
    from served import make_serve_config

    from dapo_jax.extras.serve import policy

    with first_devices():
        opened = policy.load_served(make_serve_config(byte_folder))
    policy.warm_up(opened)
    return opened


@pytest.fixture(scope="session")
def byte_responses():
    """Ids of the likeliest response to each prompt, without the end token."""
    from served import likeliest_responses

    return likeliest_responses()


@pytest.fixture
def same_engine(byte_engine, monkeypatch):
    """Servers of the test use the engine that is compiled already; the test may change it."""
    from served import reopen

    from dapo_jax.extras.serve import policy

    monkeypatch.setattr(policy, "load_served", reopen(byte_engine))
    monkeypatch.setattr(policy, "warm_up", lambda *args: None)
    return byte_engine.engine


def make_prompt(index: int, tokens: list[int], answer: str = "1") -> Prompt:
    name, ids = f"p{index}", np.array(tokens, np.int32)
    return Prompt(index, name, "", ids, answer, "test", digest=name)


def make_completion(tokens: list[int], truncated: bool = False, logprob: float = -1.0):
    logprobs = np.full(len(tokens), logprob, np.float32)
    return Completion(np.array(tokens, np.int32), logprobs, truncated, 0, "")


def heldout_prompts(data, seed: int, tokenizer) -> list[Prompt]:
    from dapo_jax.data.prompt_stream import PromptStream

    return PromptStream(data, seed, tokenizer, training=False).heldout_prompts()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    return make_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture
def cloud(tmp_path, checkout):
    return Cloud(tmp_path, checkout)


@pytest.fixture(scope="module")
def saved_run(tiny_folder, eight_devices, tmp_path_factory):
    from output_folders import save_run

    return save_run(tiny_folder, eight_devices, tmp_path_factory)


@pytest.fixture
def write_run(tmp_path):
    from reports import run_writer

    return run_writer(tmp_path)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Children find what an earlier one has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield
