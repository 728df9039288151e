"""The map of the KV heads that carry a policy's divergence."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes

from coverage_lab.analyses import head_divergence

mpl.use("Agg")

LAYERS, HEADS = (0, 2, 10), (0, 1)
KL = dict(zip(product(LAYERS, HEADS), (0.3, 1e-9, 0.02, 0.007, 0.0, 0.11), strict=True))


def lines(kl: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Return lines as an explanation has them: the variants, then the heads by falling divergence."""
    found: list[dict[str, Any]] = [{"what": "variants", "variant": "as it is", "kl": 0.5}]
    heads = sorted(kl, key=lambda place: -kl[place])
    return found + [
        {"what": "heads", "layer": layer, "kv_head": head, "kl": kl[layer, head]} for layer, head in heads
    ]


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


def drawn(ax: Axes) -> np.ndarray:
    """Return the values of the map, `[KV heads, layers]`."""
    (mesh,) = ax.collections
    return np.asarray(mesh.get_array())


def test_the_frame_has_the_heads_by_layer() -> None:
    frame = head_divergence.to_frame(lines(KL))
    assert frame.select("layer", "kv_head").rows() == sorted(KL)
    assert frame["kl"].to_list() == [KL[place] for place in sorted(KL)]


def test_every_cell_has_the_divergence_of_its_head() -> None:
    _, ax = plt.subplots()
    assert head_divergence.plot(head_divergence.to_frame(lines(KL)), ax) is ax
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "2", "10"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "KV head")
    assert "One KV head follows" in ax.get_title()
    # Four powers of ten are told apart.
    wanted = [[max(KL[layer, head], 0.3e-4) for layer in LAYERS] for head in HEADS]
    assert drawn(ax) == pytest.approx(np.array(wanted))
    (mesh,) = ax.collections
    assert (mesh.norm.vmin, mesh.norm.vmax) == (pytest.approx(0.3e-4), 0.3)


def test_it_draws_where_it_is_told_or_in_the_current_axes() -> None:
    _, (left, right) = plt.subplots(1, 2)
    table = head_divergence.to_frame(lines(KL))
    head_divergence.plot(table, left)
    assert (len(left.collections), len(right.collections)) == (1, 0)
    plt.sca(right)
    assert head_divergence.plot(table) is right


@pytest.mark.parametrize(
    "kl",
    [
        dict.fromkeys(product(range(3), range(2)), 0.0),
        {(0, 0): 0.2},
        {place: 10.0 ** -sum(place) for place in product(range(28), range(8))},
    ],
    ids=["nothing diverges", "one head", "as many as a large model has"],
)
def test_a_figure_needs_no_display(kl: dict[tuple[int, int], float], tmp_path: Path) -> None:
    table = head_divergence.to_frame(lines(kl))
    figure = head_divergence.figure(table)
    figure.savefig(tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    heads, layers = (table[name].n_unique() for name in ("kv_head", "layer"))
    assert drawn(figure.axes[0]).shape == (heads, layers)
    assert drawn(figure.axes[0])[0, 0] == max(kl[0, 0], 1e-16)
