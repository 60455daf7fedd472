"""Meshes, tori, and the cube mesh of the DGX-1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from trioflow.errors import PlatformError
from trioflow.hardware.machine import Link
from trioflow.hardware.topologies.wiring import check_count, join, join_pairs, name_ranks

CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2,
    (1, 2): 2, (1, 3): 1, (1, 5): 2,
    (2, 3): 2, (2, 6): 1,
    (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2,
    (5, 6): 2, (5, 7): 1,
    (6, 7): 2,
}  # fmt: skip
"""NVLinks between every two GPUs of a DGX-1 with V100: six a GPU, on four neighbours, two of them doubly."""


def build_mesh(
    ranks: int,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    *,
    rows: int,
    columns: int,
    layers: int = 1,
) -> list[Link]:
    """Join every rank to its neighbours in a grid of two or three dimensions.

    Parameters
    ----------
    ranks : int
        Devices; rows x columns x layers.
    bandwidth_bytes_per_s : float
        Bandwidth of each link, per direction [bytes/s].
    latency_s : float
        Latency of each link [s].
    rows, columns, layers : int
        Extent of the grid, r, c and l. The rank at (layer, row, column) is
        (layer r + row) c + column.

    Raises
    ------
    PlatformError
        When an extent is below 1, or the grid has another number of places.

    Notes
    -----
    Nodes: r c l. Links: 2 ((r-1) c l + r (c-1) l + r c (l-1)). Diameter:
    r + c + l - 3.
    """
    pairs = _pair_neighbours(ranks, (layers, rows, columns), wrapped=False)
    return join_pairs(pairs, bandwidth_bytes_per_s, latency_s)


def build_torus(
    ranks: int,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    *,
    rows: int,
    columns: int,
    layers: int = 1,
) -> list[Link]:
    """Join every rank to its neighbours in a grid whose lines are rings.

    Parameters
    ----------
    ranks : int
        Devices; rows x columns x layers.
    bandwidth_bytes_per_s : float
        Bandwidth of each link, per direction [bytes/s].
    latency_s : float
        Latency of each link [s].
    rows, columns, layers : int
        Extent of the grid, r, c and l, numbered as in ``build_mesh``.

    Raises
    ------
    PlatformError
        When an extent is below 1, or the grid has another number of places.

    Notes
    -----
    Nodes: r c l. Links: 2 r c l (e(r) + e(c) + e(l)), where e(k) is 1 for
    k > 2, 1/2 for k = 2 (both ways round are one link) and 0 for k = 1.
    Diameter: floor(r / 2) + floor(c / 2) + floor(l / 2).
    """
    pairs = _pair_neighbours(ranks, (layers, rows, columns), wrapped=True)
    return join_pairs(pairs, bandwidth_bytes_per_s, latency_s)


def build_cube_mesh(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join eight ranks as NVLink joins the V100 GPUs of a DGX-1: the hybrid cube mesh.

    Parameters
    ----------
    ranks : int
        Devices; 8.
    bandwidth_bytes_per_s : float
        One NVLink, per direction [bytes/s]; a double link has twice that.
    latency_s : float
        Latency of each link [s].

    Raises
    ------
    PlatformError
        When the number of ranks is not 8.

    Notes
    -----
    Nodes: 8. Links: 32 (16 pairs of ranks, 8 of them joined doubly: 24
    NVLinks). Diameter: 2. PCIe, which joins the others on the machine, is
    left out: libraries route over a GPU between.

    References
    ----------
    NVIDIA DGX-1 With Tesla V100 System Architecture, WP-08437-002, 2017,
    figure of the NVLink topology, and the link table that ``nvidia-smi topo
    -m`` prints there (both from memory, not re-read).
    """
    if ranks != 8:
        raise PlatformError(f"a cube mesh has 8 ranks, not {ranks}", place="ranks", fix="write 8")
    nodes = name_ranks(ranks)
    links = []
    for (one, other), width in CUBE_MESH.items():
        links += join(nodes[one], nodes[other], width * bandwidth_bytes_per_s, latency_s)
    return links


def _pair_neighbours(ranks: int, shape: Sequence[int], *, wrapped: bool) -> list[tuple[str, str]]:
    """Return every two neighbours of a grid, once each, in the order of ranks."""
    for name, extent in zip(("layers", "rows", "columns"), shape, strict=True):
        check_count(name, extent)
    if math.prod(shape) != ranks:
        layers, rows, columns = shape
        depth = f" x {layers} layers" if layers > 1 else ""
        raise PlatformError(
            f"{rows} rows x {columns} columns{depth} make {math.prod(shape)} places for {ranks} ranks",
            place="rows", fix="choose rows, columns and layers whose product is the ranks",
        )  # fmt: skip
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    pairs: dict[tuple[int, int], None] = {}
    for rank, place in enumerate(itertools.product(*map(range, shape))):
        for at, extent, stride in zip(place, shape, strides, strict=True):
            if at + 1 < extent:
                pairs[rank, rank + stride] = None
            elif wrapped and extent > 2:
                pairs[rank - (extent - 1) * stride, rank] = None
    nodes = name_ranks(ranks)
    return [(nodes[one], nodes[other]) for one, other in pairs]
