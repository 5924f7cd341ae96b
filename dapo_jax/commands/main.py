"""The command line: `dapo-jax COMMAND`, or `python -m dapo_jax COMMAND`."""

import os
import signal
import sys

from dapo_jax.runtime import registry
from dapo_jax.runtime.limits import check_limits
from dapo_jax.runtime.streams import BrokenPipeSafeStream, has_reader
from dapo_jax.types.errors import ConfigError, nearest

COMMANDS = {
    "init": "write a config for a file of problems",
    "configs": "list the packaged configs, or print one",
    "train": "train a policy by reinforcement learning from rewards",
    "evaluate": "score a policy on held-out problems",
    "sft": "train a policy on worked examples",
    "dpo": "train a policy on pairs of a chosen and a rejected answer",
    "export": "write a checkpoint as a model folder in the Hugging Face layout",
    "serve": "answer requests over OpenAI's HTTP protocol",
    "sampler": "sample groups for a trainer in another process",
    "plan": "estimate whether a run fits a machine, and the time of a step",
    "doctor": "check this machine: devices, kernels, decoding, training steps, disks",
    "report": "write one or more runs as an HTML page",
}
WITHOUT_JAX = ("report", "configs")
READER_LEFT = 141  # the shell's code of a program that SIGPIPE ends


def usage() -> str:
    """Return the help text: every command with one line."""
    others = {
        name: f"of the package {package}"
        for name in registry.names("commands")
        if (package := registry.owner("commands", name))
    }
    lines = "\n".join(f"  {name:<12}{line}" for name, line in (COMMANDS | others).items())
    return (
        "usage: dapo-jax COMMAND [ARGUMENTS]\n\n"
        f"{lines}\n\n"
        "dapo-jax COMMAND --help explains a command, --help-all shows all its settings, and\n"
        "--help=WORD those that contain the word. Without COMMAND they show the settings of train."
    )


def main() -> int:
    """Run the named command and return its exit code; 141: the reader of its output left."""
    try:
        return run_command()
    except BrokenPipeError:
        if has_reader("stdout"):  # another pipe broke
            raise
        return READER_LEFT
    finally:
        BrokenPipeSafeStream("stdout").flush()  # else Python does, and prints a traceback


def run_command() -> int:
    """Run the command that `sys.argv` names; return 2 if there is no such command."""
    # Until the command installs its signal handlers, Ctrl-C ends it without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name.startswith("--help"):  # --help-all, --help=WORD
        sys.argv.insert(1, "train")
        name = "train"
    if name == "--version":
        from dapo_jax import __version__

        print(f"dapo-jax {__version__}")
        return 0
    known = registry.names("commands")
    if name not in known:
        hint = nearest(name, known, cutoff=0.6)
        wrong = f"error: {name!r}: there is no such command{hint} (--help lists all)"
        print(wrong if name else usage(), file=sys.stderr)
        return 2
    if name not in WITHOUT_JAX:
        try:
            check_limits()
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    sys.argv = [f"dapo-jax {name}", *sys.argv[2:]]
    if os.getcwd() not in sys.path:  # import user modules as `python -m` does
        sys.path.insert(0, os.getcwd())
    return registry.find("commands", name)()
