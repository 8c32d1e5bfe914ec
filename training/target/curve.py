"""The loss curve as a picture."""

from pathlib import Path


def draw_curve(history: list[dict[str, float]], path: Path) -> None:
    """Draw training and validation loss (nats a token) over tokens seen, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "specla"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), constrained_layout=True)
    training = [(entry["tokens"] / 1e6, entry["loss"]) for entry in history if "loss" in entry]
    if training:
        axes.plot(*zip(*training, strict=True), linewidth=0.8, color="0.6", label="training, mixed")
    for name in sorted({key for entry in history for key in entry if key.startswith("validation_")}):
        points = [(entry["tokens"] / 1e6, entry[name]) for entry in history if name in entry]
        axes.plot(*zip(*points, strict=True), marker=".", label=name.replace("_", ", "))
    axes.set_xlabel("million tokens seen")
    axes.set_ylabel("cross entropy, nats a token")
    axes.set_ylim(top=min(6.0, axes.get_ylim()[1]))
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
