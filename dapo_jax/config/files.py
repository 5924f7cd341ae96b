"""Config files: Python files with `get_config`, YAML, config.json of a run, packaged configs."""

import ast
import contextlib
import importlib.util
import inspect
import pathlib
import re
from typing import Any

from dapo_jax.config.settings import from_dict
from dapo_jax.runtime.text_files import read_file, read_json
from dapo_jax.runtime.user_code import describe_error, short_path
from dapo_jax.types.errors import ConfigError, nearest

YAML = (".yaml", ".yml")
ROWS = (".csv", ".jsonl", ".parquet", ".arrow", ".feather", ".gz")  # of data


def _run_file(path: pathlib.Path, argument: str | None) -> tuple[Any, str | None]:
    """Return the result of the file's `get_config`, and the argument if it takes none."""
    file = short_path(path)
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise ConfigError(f"{file}: has no function get_config()")
        if argument is None or not inspect.signature(get_config).parameters:
            return get_config(), argument
        return get_config(argument), None
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        message = describe_error(error)
        raise ConfigError(message if file in message else f"{file}: {message}") from None


def _read_yaml(path: pathlib.Path) -> Any:
    """Return the settings of a YAML file as nested dictionaries."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            lines: dict[str, int] = {}
            for key, _ in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines:
                    both = f"in lines {lines[name]} and {line}"
                    raise ValueError(f"the key {name!r} occurs twice, {both}")
                lines[name] = line
            return node

    # YAML 1.1 reads 1e-6 as text.
    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, [*"-+.0123456789"])
    try:
        return Loader(read_file(path)).get_single_data() or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        text = f"{line}{getattr(error, 'problem', error)}"
        raise ConfigError(f"{short_path(path)}: can't be read as YAML: {text}") from None


def shipped_configs(kind: str = ".*") -> dict[str, pathlib.Path]:
    """Return the files of packaged configs by name, or only those that return that kind."""
    package = pathlib.Path(__file__).parents[1]
    installed, checkout = package / "configs", package.parent / "configs"
    files = sorted((installed if installed.is_dir() else checkout).glob("*.py"))
    returns = rf"^def get_config\(.*\) -> {kind}:$"
    return {path.stem: path for path in files if re.search(returns, path.read_text(), re.M)}


def summary(path: pathlib.Path) -> str:
    """Return the first line of the docstring of a config file."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def config_for_folder(kind: type, folder: str) -> str:
    """Return the name of the packaged config of `kind` that makes `folder`, or ""."""
    wanted = pathlib.Path(folder)
    for name in shipped_configs(kind.__name__):
        out = pathlib.Path(read_config(kind, name).out)
        for named in (name, f"{name}:{wanted.name.removeprefix(f'{out.name}_')}"):
            with contextlib.suppress(ConfigError):  # another folder whose name begins alike
                if pathlib.Path(read_config(kind, named).out) == wanted:
                    return named
    return ""


def _find(name: str) -> tuple[pathlib.Path, str | None]:
    """Return path and argument of `FILE`, `FILE:ARGUMENT`, or the name of a packaged config.

    A file or run in the working folder takes precedence over a packaged config.
    """
    path = pathlib.Path(name)
    argument = None
    if not path.exists() and ":" in name:
        file, _, argument = name.rpartition(":")
        path = pathlib.Path(file)
    shipped = shipped_configs()
    wanted = str(path)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        if wanted in shipped:
            return shipped[wanted], argument
        patterns = ("*.py", "*.json", "*.yaml", "*.yml")
        files = [str(p) for pattern in patterns for p in path.parent.glob(pattern)]
        hint = nearest(str(path), [*files, *shipped], 0.7)
        hint = hint or f"; packaged configs are {', '.join(shipped)}" * (not path.suffix)
        raise ConfigError(f"--config={name}: there is no such file{hint}")
    return path.absolute(), argument


def variant(name: str) -> str:
    """Return the argument after the colon of a config, else its default; "" if it takes none."""
    path, argument = _find(name)
    default = re.search(r'^def get_config\(\w+: str = "(\w+)"', read_file(path), re.MULTILINE)
    return argument or (default[1] if default and path.suffix == ".py" else "")


def read_config(kind: type, name: str) -> Any:
    """Read the config `FILE.py`, `FILE.yaml`, `RUN/config.json`, `RUN` or a packaged `NAME`.

    `get_config` of a Python file returns a `kind`, or its settings as an ml_collections
    `ConfigDict` or nested dictionaries. The text after a colon is its argument; for a file without
    arguments, it names a preset, as the setting `algorithm` may. Raises `ConfigError`.
    """
    path, argument = _find(name)
    if path.suffix == ".py":
        config, argument = _run_file(path, argument)
        if type(config).__name__ == "ConfigDict":  # of ml_collections, which is slow to import
            config = config.to_dict()
    elif path.suffix in YAML:
        config = _read_yaml(path)
    elif path.suffix == ".json":
        config = read_json(path, "", unique_keys=True)
    else:
        allowed = "a .py file, a .yaml file, a run's config.json or its folder"
        hint = f"; for a file of data: dapo-jax init {name}" if path.suffix in ROWS else ""
        raise ConfigError(f"--config={name}: must be {allowed}{hint}")
    try:
        if isinstance(config, dict) or path.suffix != ".py":
            config = from_dict(kind, config)
        if not isinstance(config, kind):
            returned = type(config).__name__
            raise ConfigError(
                f"get_config() returns {returned}; this command takes {kind.__name__}"
            )
        if argument is not None:
            if not hasattr(config, "algorithm"):
                raise ConfigError(f"{argument!r} after the colon: get_config() takes no argument")
            config.algorithm = argument
            config.run_dir = f"{config.run_dir.rstrip('/')}_{argument}"
    except ConfigError as error:
        raise ConfigError(f"{short_path(path)}: {error}", error.field) from None
    return config


def locate(error: ConfigError, name: str) -> str:
    """Return the text of an error, after the only line of the config file that assigns to it."""
    field = error.field.rpartition(".")[2]
    if not (name and field):
        return str(error)
    path, _ = _find(name)
    lines = enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    sign = ":" if path.suffix in YAML else "="
    matches = [item for item in lines if re.search(rf"\b{field}\s*{sign}[^=]", item[1])]
    if len(matches) != 1:
        return str(error)
    number, text = matches[0]
    return f"{short_path(path)}:{number}: {text.strip()}: {error}"
