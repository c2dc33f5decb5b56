"""The plots of `bench_memory.py`: what was measured, with the paper's values beside it."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first)
import numpy as np  # noqa: E402

COLORS = ("#2a78b5", "#8fbfe0", "#f0a848", "#d8d8d8")
"""Of the classes of Figure 2: blue holds tokens or will, orange and grey are lost."""

SOURCE = "paper: arXiv:2309.06180"
SIZE = {"figsize": (8, 4.5), "layout": "constrained"}


def figure_2(path, classes, bars, paper):
    """Stacked bars for each system, ours left, the paper's right (hatched)."""
    figure, axes = plt.subplots(**SIZE)
    for place, (system, shares) in enumerate(bars.items()):
        published, _ = paper[system]
        for x, values, hatch in ((place - 0.2, shares, None), (place + 0.2, published, "///")):
            bottom = 0
            for value, color in zip(values, COLORS):
                if value is None:  # the rest, not told apart
                    axes.bar(x, 100 - bottom, 0.36, bottom, color="white", edgecolor="grey", hatch=hatch)
                    break
                axes.bar(x, value, 0.36, bottom, color=color, edgecolor="white", hatch=hatch)
                if value > 3:
                    axes.text(x, bottom + value / 2, f"{value:.1f}", ha="center", va="center", fontsize=8,
                              bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1})
                bottom += value
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS]
    figure.legend(handles, classes, loc="outside lower center", ncols=4, frameon=False)
    axes.set_xticks(range(len(bars)), [f"{system}\nours | paper" for system in bars])
    axes.set(ylabel="KV cache memory (%)", ylim=(0, 100),
             title=f"What the memory holds (ShareGPT lengths, OPT-13B, saturated)\n{SOURCE}, Figure 2")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def block_sizes(path, shares, best):
    """The share of the slots that hold tokens, over the block size; shaded where the paper was fastest."""
    figure, axes = plt.subplots(**SIZE)
    for (workload, line), color in zip(shares.items(), (COLORS[0], COLORS[2])):
        axes.plot(line.keys(), line.values(), "o-", color=color, label=f"{workload}: slots that hold tokens")
        axes.axvspan(*best[workload], color=color, alpha=0.15, label=f"{workload}: fastest in the paper")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(line), [str(size) for size in line])
    axes.set(xlabel="block size (tokens)", ylabel="KV cache memory (%)", ylim=(0, 100),
             title=f"Block size: what large blocks cost in memory\n{SOURCE}, Figure 18b")
    axes.legend(loc="lower left", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def sharing(path, savings, paper):
    """Grouped bars of the blocks saved, ours left, the paper's right (hatched)."""
    figure, all_axes = plt.subplots(1, 2, sharey=True, **SIZE)
    for (kind, title), axes in zip((("parallel", "parallel sampling"), ("beam", "beam search")), all_axes):
        ticks = []
        for workload, color, start in (("Alpaca", COLORS[2], 0), ("ShareGPT", COLORS[0], 4)):
            for place, (width, saving) in enumerate(savings[kind, workload].items()):
                published = paper[kind, workload][width]
                bars = [axes.bar(start + place - 0.2, saving, 0.4, color=color, label=None if place else workload)]
                if published is not None:
                    bars.append(axes.bar(start + place + 0.2, published, 0.4, color=color, alpha=0.5, hatch="///",
                                         edgecolor="white"))
                for bar in bars:
                    axes.bar_label(bar, fmt="%.0f", fontsize=8)
                ticks.append((start + place, str(width)))
        axes.set_xticks(*np.array(ticks, dtype=object).T.tolist())
        axes.set(xlabel="sequences of a group (ours | paper)", title=title)
        axes.legend(loc="upper left", frameon=False)
    all_axes[0].set(ylabel="blocks saved by sharing (%)")
    figure.suptitle(f"Sharing with copy on write\n{SOURCE}, Figure 15")
    figure.savefig(path, dpi=120)
    plt.close(figure)
