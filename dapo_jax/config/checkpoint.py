"""The settings of what a run saves, and when."""

from dapo_jax.runtime.settings import section, setting


@section
class Checkpoint:
    """Orbax checkpoints in run_dir/checkpoints."""

    every_steps: int = setting(10, "Rollout steps between saves; 0 saves only at the end.")
    keep: int = setting(2, "How many of the newest stay.")
    keep_groups: bool = setting(
        False,
        "Whether judged groups are on disk before their step is done, so that a kill costs no "
        "finished response: the step is the same, what it cost is counted from where it goes on.",
    )
    leave_seconds: float = setting(
        30.0,
        "What SIGTERM and Ctrl-C wait for a place to save at; then the process leaves with the "
        "newest checkpoint. 0: as long as it takes.",
    )
