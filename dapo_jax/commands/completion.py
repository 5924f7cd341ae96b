"""Print a script that completes commands, packaged configs and settings in a shell.

eval "$(dapo-jax completion bash)"      in ~/.bashrc
eval "$(dapo-jax completion zsh)"       in ~/.zshrc, after compinit
"""

import sys
from collections.abc import Iterable

from dapo_jax.commands.command_line import WITH_FILES, exit_with_error
from dapo_jax.commands.evaluate import SHORT_NAMES
from dapo_jax.commands.plan.flags import PlanSettings
from dapo_jax.config.experiment import (
    AuditConfig,
    Config,
    DoctorConfig,
    DpoConfig,
    ExportConfig,
    InitConfig,
    ReplayConfig,
    ReportConfig,
    SamplerConfig,
    ServeConfig,
    SftConfig,
)
from dapo_jax.config.files import shipped_configs
from dapo_jax.runtime.settings import leaves

KINDS = {"train": Config, "evaluate": Config, "plan": Config, "sft": SftConfig, "dpo": DpoConfig}
KINDS |= {"init": InitConfig, "export": ExportConfig, "serve": ServeConfig, "report": ReportConfig}
KINDS["sampler"] = SamplerConfig
KINDS |= {"audit": AuditConfig, "replay": ReplayConfig, "doctor": DoctorConfig}
# Flags of a command besides those of its settings.
OTHER_FLAGS = {"train": ["dry-run"], "evaluate": [*SHORT_NAMES]}
OTHER_FLAGS["plan"] = [name for name, _, _ in leaves(PlanSettings())]
SCRIPT = """\
_dapo_jax() {{
    local rest="${{COMP_LINE#* }}" choices=
    case "$rest" in
{cases}
        *" "*) ;;
        *) choices="{commands}" ;;
    esac
    COMPREPLY=($(compgen -W "$choices" -- "$2"))
    COMPREPLY=("${{COMPREPLY[@]/%/ }}")  # a command is followed by a space, a setting by its value
    COMPREPLY=("${{COMPREPLY[@]/= /=}}")
}}
complete -o default -o nospace -F _dapo_jax dapo-jax
"""
FIRST_LINES = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}


def _flags(names: Iterable[str], prefix: str = "") -> list[str]:
    return [f"--{prefix}{name}" + "=" * (name != "dry-run") for name in names]


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    words = {"configs": ["show", *shipped_configs()]}
    for command, kind in KINDS.items():
        settings = _flags([n for n, _, _ in leaves(kind())], "config." * (kind in WITH_FILES))
        flags = _flags(OTHER_FLAGS.get(command, ()))
        words[command] = [*shipped_configs(kind), *flags, *settings]
    cases = [f'        {name}" "*) choices="{" ".join(w)}" ;;' for name, w in words.items()]
    values = {"cases": "\n".join(cases), "commands": " ".join([*words, "completion"])}
    return FIRST_LINES[shell] + SCRIPT.format(**values)


def main() -> int:
    """Run the command. Exit code 0: done; 2: wrong arguments."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
    elif len(arguments) != 1 or arguments[0] not in FIRST_LINES:
        exit_with_error(f"completion {' '.join(arguments)}: must be {' or '.join(FIRST_LINES)}")
    else:
        print(script(arguments[0]), end="")
    return 0
