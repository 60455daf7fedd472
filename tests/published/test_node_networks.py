"""Networks between nodes that ship are those of the clusters' tables, and tell each cluster from the others."""

import os
from pathlib import Path

import numpy as np
import pytest
from oracles.node_networks import FOLDERS, fit_network, read_clusters, take
from trioflow.network.across_nodes import LINKS, load_networks

MIRROR = Path(os.environ.get("TRIOFLOW_DATA_MIRROR", "nowhere"))
pytestmark = pytest.mark.skipif(
    not all((MIRROR / folder).is_dir() for folder in FOLDERS.values()), reason="the clusters' tables are not at hand"
)


def test_networks_that_ship_are_fitted_to_the_clusters_tables_and_tell_the_others() -> None:
    table = read_clusters(MIRROR)
    networks = {one.name: one for one in load_networks()}
    assert networks.keys() == set(table["cluster"])
    missed = {}
    for name, network in networks.items():
        found, rows = fit_network(table, name), table[table["cluster"] == name]
        rows = rows[rows["bytes"] >= 1e6]
        own, again = take(rows, network), take(rows, found)
        assert again == pytest.approx(own, rel=0.03)
        others = [one for one in networks.values() if one.ordinary and one.name != name]
        middle = np.median([take(rows, one) for one in others], axis=0)
        ways = {"own": own, "others": middle, "links": take(rows, LINKS)}
        missed[name] = {way: float(np.median(abs(times / rows["time_s"] - 1))) for way, times in ways.items()}
    assert all(one["own"] < 0.13 for name, one in missed.items() if name != "cloud-a100")
    for name in ("marenostrum5", "p5-fast"):
        assert missed[name]["others"] < 0.25 < 0.5 * missed[name]["links"] + 0.2
    assert missed["perlmutter-tcp"]["others"] > 0.9, "sockets are told by nobody"
