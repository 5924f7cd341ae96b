"""Short evaluations on one device."""

import functools

from small_runs import make_quick_config

from dapo_jax.config.experiment import Data, Evaluation
from dapo_jax.run import evaluation

PROBLEMS, SAMPLES = 12, 6
run_evaluation = functools.partial(evaluation.evaluate, from_folder=True)


def make_evaluation(base, run_dir, samples=SAMPLES, **changes):
    sections = {
        "data": Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=PROBLEMS),
        "evaluation": Evaluation(samples_per_problem=samples, top_p=0.9),
    }
    return make_quick_config(base, run_dir, **sections | changes)
