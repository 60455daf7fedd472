"""Routes against a list of all paths, on random graphs."""

from hypothesis import given
from hypothesis import strategies as st
from trioflow.base.errors import SimulationError
from trioflow.hardware.machine import Link
from trioflow.network.routing import Router

NODES = ("d", "a", "c", "e", "b", "f")


@st.composite
def networks(draw: st.DrawFn) -> list[Link]:
    """Draw few or many links whose latencies are often equal, and sums of them exact."""
    pairs = [(a, b) for a in NODES for b in NODES if a != b]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=len(pairs)))
    return [Link(a, b, 1.0, draw(st.sampled_from([0.0, 0.5, 1.0, 1.0]))) for a, b in chosen]


def find_best_path(links: list[Link], source: str, target: str) -> list[str] | None:
    """Follow every path without a circle and take the first by latency, hops and names."""
    found = []
    todo: list[tuple[float, list[str]]] = [(0.0, [source])]
    while todo:
        latency_s, names = todo.pop()
        if names[-1] == target:
            found.append((latency_s, len(names), names))
            continue
        todo += [
            (latency_s + link.latency_s, [*names, link.target])
            for link in links
            if link.source == names[-1] and link.target not in names
        ]
    return min(found)[2] if found else None


@given(networks(), st.permutations([(a, b) for a in NODES for b in NODES]))
def test_route_is_the_first_of_all_paths(links: list[Link], pairs: list[tuple[str, str]]) -> None:
    """Whatever was asked before: a search is taken up again where it stopped."""
    router = Router(links)
    for source, target in pairs[:12]:
        expected = find_best_path(links, source, target)
        try:
            route = [links[index] for index in router.route(source, target)]
        except SimulationError:
            assert expected is None
            continue
        assert [source, *(link.target for link in route)] == expected
