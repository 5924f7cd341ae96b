"""Score a policy on held-out problems: avg@k, pass@k, maj@k and statistics of the responses.

    dapo-jax evaluate arithmetic
    dapo-jax evaluate FILE --model=FOLDER --k=32
    dapo-jax evaluate FILE --temperature=0 --k=1   (greedy)

evaluates the latest checkpoint in run_dir or, with --model, a model folder or another run.
Responses are saved as they finish: the same command resumes a stopped evaluation, and a larger --k
adds samples to it. The last line of the output is JSON.
"""

import json
import sys

from dapo_jax.config.experiment import Config
from dapo_jax.run import command_line
from dapo_jax.types.errors import require

SHORT_NAMES = {
    "model": "model.folder",
    "data": "data.heldout_source",
    "k": "evaluation.samples_per_problem",
    "temperature": "evaluation.temperature",
    "top_p": "evaluation.top_p",
    "template": "data.template",
    "out": "evaluation.out",
    "write_difficulty": "evaluation.write_difficulty",
}


def check_folder(config: Config) -> None:
    """Raise `ConfigError` if the evaluation must not write, or has no model."""
    from dapo_jax.runtime.storage.output_folder import EVALUATION, RUN, check_free

    require(config.model.folder != "", "model.folder", "", "a model folder: --model=FOLDER")
    if config.evaluation.out:
        check_free("evaluation.out", config.evaluation.out, EVALUATION)
    else:
        check_free("run_dir", config.run_dir, RUN)


def main() -> int:
    """Run the command.

    Exit code 0: done; 2: wrong settings; 3: every reward failed; 128 + n: stopped by signal n.
    """
    from_folder = "model" in {argument.lstrip("-").partition("=")[0] for argument in sys.argv[1:]}

    def work(config: Config) -> int:
        from dapo_jax.run import checks
        from dapo_jax.runtime import processes

        with checks.loading(config.log.console):
            from dapo_jax.run.evaluate import evaluate
            from dapo_jax.runtime.signals import Signals
        signals = Signals(config.checkpoint.leave_seconds)
        scores = evaluate(config, from_folder=from_folder, signals=signals)
        if scores is None:
            return signals.exit_code
        if processes.is_first():
            print(json.dumps(scores))
        return 0

    return command_line.run(Config, __doc__, work, SHORT_NAMES, check_output=check_folder)
