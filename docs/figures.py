"""Pictures of the documents that show formulas, ``auto.json`` and ``exits.json``: ``python -m
docs.figures``.

Others come from their commands: ``front.svg`` from the search, ``benchmark.svg`` and
``together.svg`` from the benchmark, ``round.svg`` from ``generate.py --svg``, ``layers.svg`` from
``python -m docs.layers``.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from app.files import read_json
from app.picture import INK, MUTED, RED, RULE, write_picture
from benchmark.shapes import NAMED
from search.costs import CostTable, best_speedup, predicted_speedup

FOLDER = Path(__file__).parent
GREEN = "#7cbd9c"
DARK_GREEN = "#3f8f6b"
BLUE = "#7fb0de"
AMBER = "#f3bd4e"
PALE_RED = "#eba49c"
SEA = "#2c6fae"  # of lines
LEAF = "#2f7d5b"
VERDICTS = {
    "accepted": GREEN,
    "rejected": PALE_RED,
    "discarded": RULE,
    "the target's own token": BLUE,
}
# The example of docs/how_it_works.md: distributions over three tokens, and two draws of the race.
TOKENS = ("a", "b", "c")
P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.1, 0.8, 0.1])
RACES = np.array([[0.9, 0.2, 0.4], [0.3, 0.36, 0.5]])
DRAFT_COST = 0.45  # of a draft step, in plain rounds
VERIFY_COST = 1.1  # of a verification
# The example of docs/search.md: a text, and the probability that each token is kept if drafted.
TEXT = {"The": 0.9, "fox": 0.8, "ran": 0.5, "home": 0.9, "at": 0.7, "night": 0.9}
GAMMA = 2  # tokens that a round drafts there
# The shape and its costs are those of benchmark/shapes.json and of a table in docs/measurements.md.
SHAPE = "llama-3.2-1b"
LONGEST = 12  # tokens of a draft
# The example of docs/speed.md: rows of a tile, vectors of a row of weights, and the one being read.
ROWS = 4
COLUMNS = 8
COLUMN = 2


def sheet(height: float, left: float, right: float, top: float) -> Axes:
    """Axes without a frame; the height of the figure is in inches, the rest in units of tiles."""
    return Figure(figsize=(7.5, height)).subplots(
        subplot_kw={
            "frame_on": False,
            "xticks": [],
            "yticks": [],
            "xlim": (left, right),
            "ylim": (0, top),
        }
    )


def tiles(
    axes: Axes, x: float, y: float, parts: Iterable[tuple[str, float, str]], name: str = ""
) -> float:
    """Draw a row of tiles (text, width, colour), with its name on the left. Returns its right end,
    in units of tiles.
    """
    axes.text(x - 0.2, y + 0.44, name, ha="right", va="center", weight="bold")
    for text, width, colour in parts:
        axes.add_patch(Rectangle((x, y), width, 0.9, fc=colour, ec="white", linewidth=1.5))
        axes.text(x + width / 2, y + 0.44, text, ha="center", va="center", fontsize=9)
        x += width
    return x


def explained(axes: Axes, colours: dict[str, str]) -> Figure:
    """The figure of these axes with the names of its colours below it."""
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.figure.legend(handles=patches, loc="outside lower left", ncols=len(patches))
    return axes.figure


def rules() -> Figure:
    """The ratio rule as areas: accepted and rejected parts of q, accepted and residual parts of
    p.
    """
    both = np.minimum(P, Q)
    sides = (
        ("drafted: q", Q, PALE_RED, P, "p"),
        ("written: p", P, BLUE, Q, "q"),
    )
    grid = Figure(figsize=(7.5, 3.4)).subplots(1, 2, sharey=True)
    for axes, (title, own, colour, other, name) in zip(grid, sides, strict=True):
        axes.bar(TOKENS, both, 0.7, color=GREEN)
        axes.bar(TOKENS, own - both, 0.7, both, color=colour)
        axes.hlines(other, np.arange(3) - 0.42, np.arange(3) + 0.42, INK, linestyles="dotted")
        for at, height in enumerate(other):
            axes.text(at + 0.44, height, name, va="center", color=MUTED)
        axes.set(ylim=(0, 0.9), xlim=(-0.6, 2.7), title=title)
    colours = {"accepted: min(p, q)": GREEN, "rejected: the rest of q": PALE_RED}
    return explained(axes, colours | {"residual: max(0, p − q)": BLUE})


def timeline() -> Figure:
    """Plain passes one after another, and the same text in two rounds of three drafted tokens."""
    axes = sheet(2.1, -1.1, 7.8, 2.5)
    plain = [(word, 1, BLUE) for word in ("who", "lived", "in", "the", "sea", "and", "sang")]
    kept = [(word, DRAFT_COST, GREEN) for word, _, _ in plain]
    passes = [(f"pass → {own}", VERIFY_COST, BLUE) for own in ("the", "sang")]
    rounds = [*kept[:3], passes[0], *kept[4:6], ("sat", DRAFT_COST, PALE_RED), passes[1]]
    for y, name, parts in ((1.4, "plain", plain), (0.2, "drafted", rounds)):
        end = tiles(axes, 0, y, parts, name)
        axes.text(end + 0.1, y + 0.44, f"{end:.1f} plain rounds", va="center", color=MUTED)
    colours = {"a pass of the target": BLUE, "draft step, accepted": GREEN}
    return explained(axes, colours | {"draft step, rejected": PALE_RED})


def speedup() -> Figure:
    """Speed-up against acceptance for three costs of a draft step: thick lines at the best draft
    length, thin ones at four tokens.
    """
    axes = Figure(figsize=(7.5, 4.2)).subplots()
    rates = np.linspace(0, 1, 101)
    colours = {0: SEA, 0.25: LEAF, 0.5: RED}
    for cost, colour in colours.items():
        costs = CostTable(cost, (1, *[VERIFY_COST] * 8))
        speeds = np.array([[predicted_speedup(a, n, costs) for a in rates] for n in range(1, 9)])
        axes.plot(rates, speeds.max(0), color=colour, linewidth=2.2)
        axes.plot(rates, speeds[3], color=colour, linewidth=0.8)
        for at in range(30, 100, 10):
            length = speeds[:, at].argmax() + 1
            axes.text(rates[at], speeds[:, at].max(), length, ha="right", va="bottom", clip_on=True)
    axes.axhline(1, color=MUTED, linestyle="dotted")
    axes.text(0.99, 0.98, "plain decoding", ha="right", va="top", color=MUTED)
    axes.set(xlabel="acceptance α", ylabel="speed-up", xlim=(0, 1), ylim=(0.5, 3.5))
    return explained(axes, {f"c = {cost:g}": colour for cost, colour in colours.items()})


def exits_of(name: str) -> tuple[np.ndarray, list[float], list[float]]:
    """Exit layers of a model in ``exits.json``, with their losses and their agreements with the
    whole model.
    """
    found: dict[str, Any] = read_json(FOLDER / "exits.json")[name]
    layers = np.arange(1, len(found["agreement"]) + 1)
    return layers, found["held_out_loss"], found["agreement"]


def agreement() -> Figure:
    """Agreement of early exits with the whole model, by the share of its layers."""
    axes = Figure(figsize=(7.5, 3.4)).subplots()
    models = {
        "small-llama": ("small-llama, trained for it", LEAF),
        "SmolLM2-135M": ("SmolLM2-135M, not trained for it", RED),
    }
    for name, (_, colour) in models.items():
        layers, _, shares = exits_of(name)
        axes.plot(layers / len(layers), shares, color=colour, marker="o", markersize=4)
    axes.set(xlabel="share of the layers", ylabel="agreement", xlim=(0, 1.02), ylim=(0, 1.02))
    return explained(axes, dict(models.values()))


def exits() -> Figure:
    """Loss of every exit, and its agreement with the whole model: of two short runs, and of
    small-llama.
    """
    grid = Figure(figsize=(7.5, 3.6)).subplots(1, 2)
    models = {
        "without the recipe": ("a short run without the recipe", RED),
        "with the recipe": ("the same run with it", SEA),
        "small-llama": ("small-llama", LEAF),
    }
    for name, (_, colour) in models.items():
        layers, *both = exits_of(name)
        for axes, values in zip(grid, both, strict=True):
            axes.plot(layers, values, color=colour, marker="o", markersize=3.5)
    ticks = range(2, len(layers) + 1, 2)
    for axes, title in zip(grid, ("loss, nats per token", "agreement"), strict=True):
        axes.set(title=title, xlabel="exit after layer", xticks=ticks)
    return explained(axes, dict(models.values()))


def costs_of_shape() -> tuple[int, float, float, np.ndarray]:
    """Layers of ``SHAPE``, the head's share of a step's bytes, the cost of a step of all layers in
    four bits, and the costs of verifying up to ``LONGEST`` drafted tokens.
    """
    config = read_json(NAMED)[SHAPE]
    text = (FOLDER / "measurements.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {re.escape(SHAPE)} \| (.*) \|$", text, re.MULTILINE)[1].split(" | ")
    millions, _, _, rows, four_bits, *_ = row  # of parameters; the cost of 2, 4, 8 and 16 rows
    head = config["vocab_size"] * config["hidden_size"] / (1e6 * float(millions))
    steps = (1, *map(float, rows.split(" / ")))
    verify = np.interp(range(1, LONGEST + 2), (1, 2, 4, 8, 16), steps)
    return config["num_hidden_layers"], head, float(four_bits), verify


def border() -> Figure:
    """Acceptance from which on an early exit is faster than a draft by all layers in four bits, in
    the shape of Llama-3.2-1B: a line per acceptance of the four-bit draft.
    """
    grid = Figure(figsize=(7.5, 3.6)).subplots(1, 2, sharey=True)
    count, head, all_in_four_bits, verify = costs_of_shape()
    layers = np.arange(1, count)
    rates = np.linspace(0, 1, 201)
    titles = {"exit in 16 bits": 1.0, "exit in four bits too": all_in_four_bits}
    colours = {0.8: SEA, 0.9: LEAF, 0.95: RED}
    for axes, (title, share) in zip(grid, titles.items(), strict=True):
        costs = share * (head + (1 - head) * layers / count)
        speeds = [[best_speedup(rate, CostTable(c, verify)) for rate in rates] for c in costs]
        for rate_of_all, colour in colours.items():
            goal = best_speedup(rate_of_all, CostTable(all_in_four_bits, verify))
            needed = [np.interp(goal, each, rates, right=np.nan) for each in speeds]
            axes.plot(layers, needed, color=colour)
        axes.set(
            title=title,
            xlabel=f"exit after layer, of {count}",
            xlim=(0, count),
            ylim=(0.4, 1),
            xticks=range(0, count + 1, 4),
        )
    grid[0].set_ylabel("acceptance from which it is faster")
    return explained(axes, {f"four bits at {rate:g}": colour for rate, colour in colours.items()})


def cache() -> Figure:
    """Positions of the cache before, in and after a round with a rejected token."""
    axes = sheet(3.2, -2.4, 8.2, 4.8)
    words = ("a", "little", "fox", "who", "lived", "in", "the", "sea")
    kinds = {"t": BLUE, "d": AMBER, "f": RULE}
    stages = {
        "before": "ttt",
        "four draft steps": "tttdddd",
        "one verification": "tttttttt",
        "rollback": "ttttttff",
    }
    for row, (name, held) in enumerate(stages.items()):
        y = 3.7 - 1.2 * row
        parts = [(words[at], 1, kinds[kind]) for at, kind in enumerate(held)]
        tiles(axes, 0, y, parts, f"{name}  …")
        axes.vlines(len(held.rstrip("f")), y - 0.1, y + 1, RED, linewidth=2.5)
    colours = {"the target's": BLUE, "the draft's": AMBER, "forgotten": RULE, "length": RED}
    return explained(axes, colours)


def race() -> Figure:
    """Exponentials E of three tokens, E/p and E/q, for two draws of E."""
    grid = Figure(figsize=(7.5, 3.6)).subplots(2, 3)
    outcomes = ("b and b: accepted", "a and b: b is rejected, a is written")
    columns = (("E", 1, 1.4), ("E/p: the target's race", P, 4), ("E/q: the draft's race", Q, 13))
    for row, draw, outcome in zip(grid, RACES, outcomes, strict=True):
        for axes, (title, law, end) in zip(row, columns, strict=True):
            times = draw / law
            colours = [BLUE if time == times.min() and title != "E" else RULE for time in times]
            bars = axes.barh(TOKENS, times, color=colours)
            axes.bar_label(bars, [f"{time:.2f}" for time in times], padding=3)
            axes.set(xlim=(0, end), xticks=[], title=title if axes in grid[0] else "")
            axes.invert_yaxis()
        row[1].set_xlabel(outcome)
    return explained(axes, {"the least, which wins": BLUE})


def states() -> np.ndarray:
    """Probability that a round is at each token of TEXT with d tokens drafted, all of them
    accepted: ``[GAMMA + 1, tokens]``. In row 0 a round begins.

    The rules of ``search.prediction.expected_rounds``, without thresholds.
    """
    found = np.zeros((GAMMA + 1, len(TEXT)))
    found[0, 0] = 1
    for at, kept in enumerate(list(TEXT.values())[:-1]):
        found[1:, at + 1] = found[:-1, at] * kept
        found[0, at + 1] = found[:, at].sum() - found[1:, at + 1].sum()
    return found


def programme() -> Figure:
    """The search's dynamic programme along a text: its states, and the ways between them."""
    axes = sheet(3.7, -2.2, 11.2, 5.4)
    for depth, name in enumerate(("a round begins", "1 drafted", "2 drafted")):
        tiles(axes, 0, 1.8 * depth + 0.85, (), name)
    for at, (token, share) in enumerate(TEXT.items()):
        axes.text(2 * at + 0.5, 0.4, f"{token}\nkept {share:g}", ha="center", va="center")
    shares = states()
    for depth, at in np.argwhere(shares > 0):
        y = 1.8 * depth + 0.85
        tiles(axes, 2 * at, y, [(f"{shares[depth, at]:.2f}", 1, BLUE)])
        if at + 1 == len(TEXT):
            continue
        ways = {depth + 1: DARK_GREEN, 0: RED} if depth < GAMMA else {0: INK}
        for deeper, colour in ways.items():
            axes.annotate(
                "",
                xy=(2 * at + 2, 1.8 * deeper + 1.3),
                xytext=(2 * at + 1, y + 0.45),
                arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.6},
            )
    arrows = {"accepted": DARK_GREEN, "rejected: the target's token": RED, "full: the bonus": INK}
    return explained(axes, arrows)


def tile() -> Figure:
    """A tile of the CPU step; and two blocks of weights in memory, of which one is read by columns
    while the next one is prefetched in the order of addresses.
    """
    axes = sheet(2.9, -1.9, 22.6, 5.8)
    tiles(axes, 1.2, 4.5, [(f"x{number}", 1, AMBER) for number in range(ROWS)], "inputs  ")
    for row in range(ROWS):
        y = 3.3 - row
        tiles(axes, 0, y, [(f"w{row}", 1, BLUE)])
        tiles(axes, 1.2, y, [("Σ", 1, GREEN)] * ROWS)
        read = [BLUE if column == COLUMN else RULE for column in range(COLUMNS)]
        tiles(axes, 8, y, [("", 0.8, colour) for colour in read], f"row {row}")
        # the turn in which each vector of the next block is prefetched
        turns = [at // ROWS for at in range(row * COLUMNS, (row + 1) * COLUMNS)]
        colours = [
            DARK_GREEN if turn == COLUMN else GREEN if turn < COLUMN else RULE for turn in turns
        ]
        tiles(axes, 15.8, y, [("", 0.8, colour) for colour in colours])
    for x, title in ((0, "16 sums, in registers"), (8, "this block"), (15.8, "the next block")):
        axes.text(x, -0.1, title, va="top", color=MUTED)
    colours = {
        "read in this turn": BLUE,
        "prefetched in it": DARK_GREEN,
        "prefetched before": GREEN,
    }
    return explained(axes, colours)


def auto() -> Figure:
    """The rounds of a text under ``--draft auto``. ``auto.json`` holds them, with their command."""
    rounds = read_json(FOLDER / "auto.json")["rounds"]
    axes = sheet(4.4, -10, 66, len(rounds))
    for row, round in enumerate(reversed(rounds)):
        parts = [
            (text, 2 + 1.1 * len(text), VERDICTS[verdict]) for text, verdict in round["tokens"]
        ]
        tiles(axes, 0, row, parts, f"{round['draft']} ")
    return explained(axes, VERDICTS)


PICTURES = (
    rules,
    timeline,
    speedup,
    agreement,
    exits,
    border,
    cache,
    race,
    programme,
    tile,
    auto,
)


def write_all(folder: Path = FOLDER) -> None:
    """Write every picture as an SVG file of its function's name."""
    for draw in PICTURES:
        write_picture(draw, folder / f"{draw.__name__}.svg")


if __name__ == "__main__":
    write_all()
