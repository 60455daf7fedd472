"""A platform and a task graph as graphs of networkx."""

import networkx
import pytest
from same_model import ProportionalModel
from trioflow import load_named_platform, load_trace, make_plan
from trioflow.engine.simulate import simulate
from trioflow.parallel.extrapolate import extrapolate


def test_a_platform_is_a_graph_whose_edges_are_its_links():
    platform = load_named_platform("dgx-h100", 16)
    graph = platform.to_networkx()
    assert graph.number_of_edges() == len(platform.links)
    path = networkx.shortest_path(graph, "rank0", "rank8", weight="latency_s")
    speeds = [graph.edges[edge]["bandwidth_bytes_per_s"] for edge in networkx.utils.pairwise(path)]
    assert min(speeds) == 50e9, "the network card is the narrowest link between nodes"


def test_the_longest_path_of_a_rank_alone_is_its_simulated_step():
    trace, platform = load_trace("gpt2-tiny-b8"), load_named_platform("cpu2-gloo", 1)
    tasks = extrapolate(trace, make_plan(), ProportionalModel())
    graph = tasks.to_networkx()
    for source, _, edge in graph.edges(data=True):
        edge["seconds"] = graph.nodes[source]["duration_s"]
    path = networkx.dag_longest_path(graph, "seconds")
    longest = sum(graph.nodes[task]["duration_s"] for task in path)
    assert longest == pytest.approx(simulate(tasks, platform).timeline["end_s"].max())
