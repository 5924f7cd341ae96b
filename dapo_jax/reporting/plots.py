"""The picture at the end of a run: how reward, accuracy, entropy, length and filtering moved."""

import io

from dapo_jax.runtime.storage.ownership import Folder

PANELS = (
    ("Reward", ("reward",)),
    ("Accuracy (sampled)", ("accuracy", "heldout_accuracy")),
    ("Entropy (nats per token)", ("entropy",)),
    ("Response tokens", ("response_tokens_mean", "response_tokens_right", "response_tokens_wrong")),
    ("Share of groups", ("kept_fraction", "all_right_fraction", "all_wrong_fraction")),
    ("Truncated responses", ("truncated_fraction",)),
)


def plot_run(rows: list[dict[str, float]], path: Folder, title: str) -> None:
    """Writes one PNG with six panels over rollout steps."""
    from matplotlib.figure import Figure

    # Without pyplot, whose backend may be that of the notebook that called.
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    for axis, (name, metrics) in zip(axes.flat, PANELS, strict=True):
        for metric in metrics:
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            if points:
                few = len(points) < len(rows)
                axis.plot(*zip(*points, strict=True), "o-" if few else "-", label=metric, ms=4)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        if len(metrics) > 1:
            axis.legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("rollout step")
    figure.suptitle(title)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    path.write_bytes(picture.getvalue())
