"""What the figures share: Okabe and Ito's colours, which colour-blind readers can distinguish, and smoothed curves."""

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#777777"
COLORS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)  # of groups; the report's page uses the same


def smooth(values: list[float]) -> list[float]:
    """Smooth values by the mean over a centred window of a tenth of the run, which is shorter at both ends."""
    half = len(values) // 20
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
