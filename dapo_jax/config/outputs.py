"""Settings of what a run saves, measures, shows and warns about."""

from dapo_jax.runtime.rules import Count, CountOr0, PositiveOr0, Share, Temperature, When
from dapo_jax.runtime.settings import section, setting

# Without other updates before it in its step, an update sees ratios of 1.
SHOWS_RATIOS = When(
    "log.rollouts log.token_groups algorithm.ratio rollout.updates_per_rollout "
    "algorithm.old_logprobs",
    lambda rollouts, groups, ratio, updates, old: (
        rollouts and groups > 0 and ratio != "none" and (updates > 1 or old == "sampler")
    ),
)


@section
class Checkpoint:
    """Orbax checkpoints in run_dir/checkpoints."""

    every_steps: CountOr0 = setting(10, "Rollout steps between saves; 0 saves only at the end.")
    keep: Count = setting(2, "How many of the newest stay.")
    keep_groups: bool = setting(
        False,
        "Whether judged groups are on disk before their step is done, so that a kill costs no "
        "finished response: the step is the same, what it cost is counted from where it goes on.",
    )
    leave_seconds: PositiveOr0 = setting(
        30.0,
        "What SIGTERM and Ctrl-C wait for a place to save at; then the process leaves with the "
        "newest checkpoint. 0: as long as it takes.",
    )


@section
class Evaluation:
    """Sampled accuracy on held-out problems."""

    every_steps: CountOr0 = setting(
        10, "Rollout steps between evaluations; 0: only before and after."
    )
    samples_per_problem: Count = setting(4, "Responses per problem (k of avg@k).")
    temperature: Temperature = setting(1.0, "Softmax temperature while evaluating; 0: greedy.")
    top_p: Share = setting(0.7, "Nucleus share while evaluating; the default is DAPO's.")
    out: str = setting(
        "", "Where dapo-jax evaluate writes; empty: a folder in run_dir/evaluations."
    )


@section
class Log:
    """Console, metric writers and recorded rollouts."""

    show_group_every_steps: CountOr0 = setting(10, "Show one group as a table; 0: never.")
    console: bool = setting(True, "Speak to the console; false: say nothing, not even warnings.")
    tensorboard: bool = setting(True, "Write TensorBoard event files.")
    wandb: str = setting(
        "",
        "Weights & Biases project, needs its package; empty: none. WANDB_MODE=offline sends later.",
    )
    rollouts: bool = setting(
        True, "Write every judged response to rollouts/ and evaluations/, step_*.jsonl."
    )
    rollouts_keep: CountOr0 = setting(
        0, "How many of the newest files of rollouts/ stay; 0: all.", read=When("log.rollouts")
    )
    token_groups: CountOr0 = setting(
        1,
        "Of so many trained groups per step, the last, rollouts/ holds tokens and log-probs.",
        read=When("log.rollouts"),
    )
    token_ratios: bool = setting(
        False,
        "Also their ratios and clips in the step's last update: one more forward pass of it.",
        read=SHOWS_RATIOS,
    )
    report: bool = setting(True, "Write report.html at the end, a page to look at the run.")


@section
class Watch:
    """Limits beyond which a step warns of a metric; the run goes on. 0: not watched."""

    min_entropy: PositiveOr0 = setting(0.005, "`entropy` below it, in nats, has collapsed.")
    max_length_growth: PositiveOr0 = setting(
        2.0, "`response_tokens_mean` from here on, over its mean in the ten steps before."
    )
    max_all_right: PositiveOr0 = setting(0.9, "`all_right_fraction` from here on.")
    max_all_wrong: PositiveOr0 = setting(0.9, "`all_wrong_fraction` from here on.")
    max_answer_not_found: PositiveOr0 = setting(0.5, "`answer_not_found_rate` from here on.")
    max_verifier_failures: PositiveOr0 = setting(
        0.05, "`verifier_failures` per verdict from here on."
    )
