"""Command lines of the commands: `config/cli.py` with all checks."""

from collections.abc import Callable
from typing import Any

from dapo_jax.config.cli import read_command_line


def load(
    kind: type,
    usage: str | None,
    *flags: Any,
    check_output: Callable[[Any], None] = lambda config: None,
    **options: Any,
) -> Any:
    """Return the checked config of the command line, as `read_command_line` with `options` does.

    `check_output` raises `ConfigError` if the command must not write; it is called last.
    """

    def check(config: Any) -> None:
        from dapo_jax.run import checks

        checks.check(config)
        check_output(config)

    return read_command_line(kind, usage or "", check, *flags, **options)


def run(
    kind: type,
    usage: str | None,
    work: Callable[[Any], int | None],
    *flags: Any,
    single_process: str = "",
    **options: Any,
) -> int:
    """Run a command: load its config with `options`, call `work`, and end all processes.

    `work` returns an exit code or None (0). It imports heavy modules itself, so that help and wrong
    settings are answered at once. `single_process` names a command that only one process may run.
    """
    config = load(kind, usage, *flags, **options)
    from dapo_jax.run.checks import guarded
    from dapo_jax.runtime import processes

    return processes.run(lambda: guarded(lambda: work(config), config), alone=single_process)
