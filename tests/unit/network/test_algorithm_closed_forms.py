"""Closed forms against the messages themselves, executed one by one."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from oracles.closed_form import closed_form_s
from oracles.replay import Wiring, execute_schedule
from trioflow.base.errors import InputError
from trioflow.network.algorithms.catalogue import SUPPORTED, build_schedule, count_switches
from trioflow.network.algorithms.pattern import Schedule, order_connections

PAIRS = [(name, known) for name, collectives in SUPPORTED.items() for known in collectives]
BLOCK_BYTES = 7.0
RANKS = (2, 3, 4, 5, 6, 7, 8, 12)
LATENCIES = (3.0, 100.0)
ONLY_LINKS = {"bidirectional_ring", "binary_tree", "double_binary_tree"}


def build(
    collective: str, ranks: int, algorithm: str, chunks: int, per_node: int | None = None
) -> Schedule:
    """A schedule whose blocks are whole bytes, so that times are exact."""
    switches = [f"s{i}" for i in range(count_switches(collective, algorithm, ranks, per_node))]

    def of(size: float) -> Schedule:
        return build_schedule(
            collective,
            ranks,
            size,
            algorithm=algorithm,
            chunks=chunks,
            ranks_per_node=per_node,
            switches=switches,
        )

    if collective == "barrier":
        return of(0)
    return of(BLOCK_BYTES / of(1.0).contents.block_bytes)


def duration(latency: float) -> Callable[[int, int, float], float]:
    return lambda source, target, size: latency + size


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("wiring", ["links", "ports"])
@pytest.mark.parametrize(("algorithm", "collective"), PAIRS)
def test_every_formula_is_what_its_messages_take(
    algorithm: str, collective: str, wiring: Wiring, chunks: int
) -> None:
    for ranks, latency in itertools.product((2,) if collective == "send" else RANKS, LATENCIES):
        schedule = build(collective, ranks, algorithm, chunks)
        formula = partial(
            closed_form_s,
            collective,
            ranks,
            schedule.message_bytes,
            latency,
            1.0,
            algorithm=algorithm,
            chunks=chunks,
            wiring=wiring,
        )
        if not has_formula(algorithm, collective, ranks, chunks, wiring):
            with pytest.raises(InputError, match="no exact formula"):
                formula()
            continue
        assert execute_schedule(schedule, duration(latency), wiring) == pytest.approx(formula())
        if wiring == "links":
            ordered = order_connections(schedule)
            assert execute_schedule(ordered, duration(latency)) == pytest.approx(formula())


def has_formula(algorithm: str, collective: str, ranks: int, chunks: int, wiring: Wiring) -> bool:
    """Which cases the module says it covers."""
    if collective == "barrier":
        chunks = 1
    ports, whole = wiring == "ports", ranks & (ranks - 1) == 0
    both_ways = collective in ("all_reduce", "barrier")
    if algorithm == "halving_doubling":
        if collective in ("broadcast", "reduce"):
            return not ports or chunks == 1
        folds = collective in ("all_reduce", "scatter", "gather") and not whole
        return chunks == 1 and not (ports and folds)
    if algorithm == "chain":
        return not (ports and both_ways and chunks > 1)
    if algorithm == "bidirectional_ring" and ranks == 2:
        return True
    return not (ports and algorithm in ONLY_LINKS)


HIERARCHIES = [
    (inner, outer, collective)
    for inner, outer in itertools.product(SUPPORTED, SUPPORTED)
    for collective in SUPPORTED[inner]
    if collective in SUPPORTED[outer] and collective != "send"
]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 3)])
def test_a_hierarchy_takes_the_sum_of_its_phases(nodes: int, per_node: int) -> None:
    ranks = nodes * per_node
    for inner, outer, collective in HIERARCHIES:
        algorithm = f"hierarchical:{inner}+{outer}"
        schedule = build(collective, ranks, algorithm, 1, per_node)
        node_switches = nodes if inner == "in_network" else 0

        def cost(
            source: int, target: int, size: float, node_switches: int = node_switches
        ) -> float:
            far = max(source, target)
            same_node = source // per_node == target // per_node and far < ranks
            inside = same_node or ranks <= far < ranks + node_switches
            return 3.0 + size if inside else 10.0 + 4.0 * size

        expected = closed_form_s(
            collective,
            ranks,
            schedule.message_bytes,
            3.0,
            1.0,
            algorithm=algorithm,
            ranks_per_node=per_node,
            outer_latency_s=10.0,
            outer_bandwidth_bytes_per_s=0.25,
        )
        assert execute_schedule(schedule, cost) == pytest.approx(expected), algorithm


def test_chunks_let_the_phases_of_a_hierarchy_overlap() -> None:
    """NCCL's tree: chains in the nodes, two trees between; cut small, the pipeline fills."""
    times = []
    for chunks in (1, 8):
        schedule = build_schedule(
            "all_reduce",
            16,
            1e6,
            algorithm="hierarchical:chain+double_binary_tree",
            ranks_per_node=4,
            chunks=chunks,
        )
        times.append(execute_schedule(schedule, duration(1.0)))
    assert times[1] < 0.4 * times[0]


def test_a_hierarchy_without_a_formula_is_refused_and_one_level_is_the_flat_one() -> None:
    def take(ranks_per_node: int, chunks: int = 1, wiring: Wiring = "links") -> float:
        return closed_form_s(
            "all_reduce",
            8,
            80.0,
            1.0,
            2.0,
            algorithm="hierarchical",
            ranks_per_node=ranks_per_node,
            chunks=chunks,
            wiring=wiring,
            outer_latency_s=5.0,
            outer_bandwidth_bytes_per_s=1.0,
        )

    for bad in ({"chunks": 2}, {"wiring": "ports"}):
        with pytest.raises(InputError, match="no exact formula"):
            take(4, **bad)  # type: ignore[arg-type]
    assert take(8) == 14 * (1 + 10 / 2)
    assert take(1) == 14 * (5 + 10 / 1)


def test_textbook_times() -> None:
    """Written out by hand: 8 ranks, 80 bytes, latency 1, bandwidth 2."""

    def take(collective: str, algorithm: str, chunks: int = 1) -> float:
        return closed_form_s(collective, 8, 80.0, 1.0, 2.0, algorithm=algorithm, chunks=chunks)

    assert take("all_reduce", "ring") == 2 * 7 * (1 + 5)
    assert take("all_reduce", "bidirectional_ring") == 2 * 7 * (1 + 2.5)
    assert take("all_reduce", "halving_doubling") == 2 * 3 * 1 + 2 * 80 * 7 / 8 / 2
    assert take("all_reduce", "binary_tree") == 2 * 3 * (1 + 40)
    assert take("all_reduce", "binary_tree", chunks=10) == (2 * 3 + 9) * (1 + 4)
    assert take("all_reduce", "double_binary_tree", chunks=10) == (2 * 3 + 9) * (1 + 2)
    assert take("all_reduce", "direct") == 2 * (1 + 5)
    assert take("all_reduce", "in_network") == 2 * (1 + 40)
    assert take("broadcast", "ring", chunks=4) == (7 + 3) * (1 + 10)
    assert take("all_to_all", "direct") == 1 + 5


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_impossible_links_are_refused(latency: float, bandwidth: float) -> None:
    with pytest.raises(InputError, match="a link of"):
        closed_form_s("all_reduce", 4, 1.0, latency, bandwidth)
    with pytest.raises(InputError, match="not negative"):
        closed_form_s("all_reduce", 4, -1.0, 0.0, 1.0)


def test_one_rank_takes_no_time() -> None:
    for algorithm, collective in PAIRS:
        if collective != "send":
            assert closed_form_s(collective, 1, 0.0, 1.0, 1.0, algorithm=algorithm) == 0.0
