"""Identical ranks executed once, where that changes no bit of the result; `fold_program` is the door.

A folded run executes a *quotient* of the simulated system: one task for each class of tasks, one exchange for each
class of exchanges, one flow for each class of flows, one link for each class of links. It says what the whole system
does under this condition.

*Ranks.* Ranks of a class have the same tasks in the same order, of the same durations, with the same dependencies, none
of them on other ranks. Where one takes part in an exchange, all do, each in an exchange of its own group, at the same
place of its program; the groups of one family have as many members of each class (see ``parallel.task_graph.Fold``). All
ranks of a class are equally fast.

*Costs.* The planner makes the same of every group of a family: as many flows, with the same sizes, latencies and caps;
or the same pattern of messages.

*Links.* Flows and links fall into classes such that all links of a class are as wide and are crossed by as many flows
of each class, all flows of a class cross the same number of links of each class, and the flows of every group of a
family are of the same classes, as often. Flows are counted as if all groups did their exchange at once, which they do:
see below. The coarsest such classes are found (``refine``), and checked.

*Argument.* By induction over the phases of an event (flows that move or end, tasks that end, tasks that start) at one
time: tasks of a class, exchanges of a class and flows of a class are in the same state in the whole system, and that is
the state of their representative in the quotient. A task becomes ready when what it waits for has ended, which is of the same
classes for all tasks of a class. An exchange starts when the last member is ready: its members' classes are those of
every exchange of its class, so all exchanges of a class start at the same time, and so do their flows, at the same
latency. Max-min rates come from progressive filling: a link's share is its free bandwidth over the flows that still
rise on it. In the quotient a flow crosses a class's link as often as flows of its class cross one of the links, so the
counts, the free bandwidths (the same level is taken off as often) and the shares are the same numbers, and so is the
lowest of them; the flows that stop at it are whole classes. Components of flows that share links correspond, since
every link of a class meets the same classes of flows, and flows outside a component do not touch its bits
(``compute_max_min_rates``). A flow's end comes from the same operations on the same numbers, so it has the same bits;
an exchange ends with its last flow, and the classes of its flows are those of every exchange of its class. Nothing here
depends on the order of events at one time, and neither does when tasks run (``engine.compiled.kernels``). Bytes on links are
sums over the same flows, but in another order: they agree to rounding.

Classes that do not fulfil this are divided (``task_graph.divide_classes``): ranks whose speeds, or whose groups' costs or
flows differ. Where no two ranks are left in one class, all ranks are executed.

Where replicas lie on several leaf sets of a cluster, the ring of a stage leaves a set at its last node, where it shares
the uplink with what all its nodes send to the next stage. Were that uplink shared, these messages could be slowed
otherwise than their neighbours', hence the ring's next flow, and so on from node to node, and every node of a set would
be a class of its own. But an uplink as wide as all that leads to it holds nobody back (``networks.find_slack``). Such
links are left out of the sharing in every run, folded or not, so that both have the same bits, and out of the division
into classes (GPT-3 175B on 4,096 ranks of dgx-h100, 8 tensor x 8 pipeline x 64 data: 8 classes instead of 256). Bytes
on them are those of the flows that cross them. Where leaves are oversubscribed or have several spines, uplinks are
shared and the classes stay apart.

Only trioflow's own networks, whose rules these are, take part. A collective of an algorithm keeps all its messages: its
flows are not of one class, and those of different groups of a family differ in their place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from msgspec import Struct, field, structs
from numpy.typing import NDArray

from trioflow.base.derived import derived, key_of
from trioflow.base.errors import SimulationError
from trioflow.base.machine_memory import find_available_bytes
from trioflow.base.runs import count_up, find_firsts
from trioflow.base.units import format_bytes, format_count
from trioflow.engine.program import (
    Case,
    ExchangeRows,
    Exchanges,
    ExchangeTraffic,
    Floats,
    Ints,
    Program,
    build_programs,
)
from trioflow.hardware.machine import Link, Platform, is_rank_node, name_rank_node, narrow_links
from trioflow.network.collectives import CollectiveFlows, CollectivePlanner
from trioflow.network.message_planner import CollectiveMessages
from trioflow.network.networks import AnyNetwork, FlowShape
from trioflow.network.routing import Router, Routes
from trioflow.parallel.task_graph import Family, Fold, divide_classes, split_fold

Words = NDArray[np.uint64]

MOST_ROUNDS = 100
"""Rounds after which a division that still gets finer is given up: little would be alike."""


class Crossings(Struct, frozen=True, eq=False):
    """Which flows cross which links, and what is alike among them.

    All flows of a class cross as many links of each class, and all links of a class are as wide and are crossed by as
    many flows of each class.
    """

    # Flow and link of each crossing, flow by flow in the order of its way [crossings]
    flow: Ints
    link: Ints
    flow_class: Ints  # class of each flow [flows]
    link_class: Ints  # class of each link, -1 for one that no flow crosses [links]

    def count_classes(self) -> tuple[Ints, Ints, Ints]:
        """Return flow class, link class and how many flows of the one cross a link of the other."""
        representative = find_firsts(self.link_class)
        one = representative[self.link_class[self.link]] == self.link
        width = int(self.link_class.max(initial=0)) + 1
        keys = self.flow_class[self.flow[one]] * width + self.link_class[self.link[one]]
        distinct, counts = np.unique(keys, return_counts=True)
        return distinct // width, distinct % width, counts.astype(np.int64)


def refine(flow: Ints, link: Ints, flow_kind: Ints, capacities: Floats) -> Crossings | None:
    """Divide flows and links into as few classes as possible; see ``Crossings``.

    ``flow`` and ``link`` are of each crossing; flows of different ``flow_kind`` are in different classes. Returns none
    where the division does not come to rest within ``MOST_ROUNDS``.

    Partition refinement: links are divided by the classes of the flows that cross them, flows by the classes of the
    links on their way, until nothing changes. The classes seen by each are added up as hashes; that the result holds is
    then checked without hashes.

    References: R. Paige, R. E. Tarjan, Three Partition Refinement Algorithms, SIAM Journal on Computing 16(6), 1987,
    doi:10.1137/0216062.
    """
    used = np.unique(link)
    place = np.searchsorted(used, link)
    links = np.unique(capacities[used], return_inverse=True)[1]
    flows = np.unique(flow_kind, return_inverse=True)[1]
    before = (0, 0)
    for _ in range(MOST_ROUNDS):
        links = _refine_classes(links, place, flows[flow])
        flows = _refine_classes(flows, flow, links[place])
        now = (int(links.max(initial=0)), int(flows.max(initial=0)))
        if now == before:
            break
        before = now
    else:
        return None
    if not (_is_even(links, place, flows[flow]) and _is_even(flows, flow, links[place])):
        return None
    link_class = np.full(len(capacities), -1, dtype=np.int64)
    link_class[used] = links
    return Crossings(flow, link, flows.astype(np.int64), link_class)


def mix(words: NDArray[np.integer]) -> Words:
    """Scramble whole numbers so that sums of different collections differ.

    References: G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014, doi:10.1145/2660193.2660195 (splittable random numbers).
    """
    mixed = words.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def add_up(owner: Ints, words: Words, owners: int) -> Words:
    """Return the sum of the words of each owner [owners], beyond 64 bits left out."""
    sums = np.zeros(owners, dtype=np.uint64)
    np.add.at(sums, owner, words)
    return sums


def _refine_classes(classes: Ints, owner: Ints, seen: Ints) -> Ints:
    """Divide classes further by what their members see."""
    total = add_up(owner, mix(seen), len(classes))
    refined: Ints = np.unique(mix(classes) + mix(total), return_inverse=True)[1]
    return refined


def _is_even(classes: Ints, owner: Ints, seen: Ints) -> bool:
    """Check that all members of a class see equal collections."""
    order = np.lexsort((seen, owner))
    owner, seen = owner[order], seen[order]
    counts = np.bincount(owner, minlength=len(classes))
    starts = np.cumsum(counts) - counts
    first = find_firsts(classes)[classes]
    if (counts != counts[first]).any():
        return False
    like = starts[first[owner]] + np.arange(len(owner)) - starts[owner]
    return bool((seen == seen[like]).all())


def name_ends(number: int) -> tuple[str, str]:
    """Return the names of the ends of a class of flows."""
    return f"class {number}", f"end of class {number}"


def make_class_links(classes: Iterable[int], capacities: Floats) -> list[Link]:
    """Return a link for each class, as wide as its links."""
    return [
        Link(f"links {number}", f"end of links {number}", float(width), 0.0)
        for number, width in zip(classes, capacities, strict=True)
    ]


Asked = tuple[str, int, int]
"""Collective, size and number of a family."""
Planned = CollectiveFlows | CollectiveMessages


class CannotFoldError(Exception):
    """Why identical ranks cannot be executed once; nothing is wrong with the graph."""


class GroupsDifferError(CannotFoldError):
    """Groups of some families are not done alike; ``of_group`` has equal numbers for those that are [groups]."""

    def __init__(self, reason: str, of_group: Mapping[int, Ints]) -> None:
        super().__init__(reason)
        self.of_group = of_group


class SlackCrossings(Struct, frozen=True, eq=False):
    """Flows on links that take no part in sharing: no class of links stands for those.

    A class of such flows crosses a link of its own, which counts the bytes of one of them.
    """

    link: Ints  # link of each crossing [crossings]
    counter: Ints  # place of its flow's counting link, among those of the classes [crossings]


class FoldedTraffic(Struct, frozen=True, eq=False):
    """Plans of classes of exchanges, and the classes of links that they cross."""

    plans: list[list[Planned]]  # by each planner, one for each class of exchanges
    links: list[Link]  # one for each class of links
    # Which flows and links are alike; None where no two are, so that flows and links are those of the whole system
    crossings: Crossings | None
    warnings: list[str]  # what the planner warns of, without repeats
    slack: SlackCrossings | None = None  # flows over links that take no part in sharing


class _GroupRoutes(Struct, frozen=True, eq=False):
    """Where the groups of a family send, in collectives of one kind.

    Groups that lie alike, on nodes and on links, are planned alike, whatever they do: routes of equal latencies and
    widths that share links in the same places, of ranks that share nodes in the same places.
    """

    routes: Routes  # of all flows, one group after the other
    code: Ints  # equal numbers for groups that lie alike [groups]
    examples: list[tuple[int, ...]]  # the first group of each code [codes]


@derived(lambda kind, groups, collective, size: (kind, key_of(groups)), most=256)
def _route_groups(planner: CollectivePlanner, kind: object, groups: Ints, collective: str, size: int) -> _GroupRoutes:
    """Return where groups send in collectives of a kind, of which a collective of some size is one."""
    members, sizes = list(map(tuple, groups.tolist())), np.full(len(groups), groups.shape[1])
    node = groups // (planner.ranks_per_node or int(groups.max()) + 1)
    nodes = _number_places(node.ravel(), sizes)
    lies = _write_runs(nodes, sizes)
    # Groups that lie alike on nodes send between the same places, where no switch takes part.
    sends = {
        how: (group, planner.shape(collective, size, group).pairs)
        for how, group in dict(zip(lies, members, strict=True)).items()
    }
    pairs: list[Any]
    if all(is_rank_node(end) for _, named in sends.values() for end in chain(*named)):
        places = {how: _find_places(group, named) for how, (group, named) in sends.items()}
        pairs = [group[places[how]] for group, how in zip(groups, lies, strict=True)]
        routes = planner.router.route_ranks(np.concatenate(pairs))
    else:
        pairs = [planner.shape(collective, size, group).pairs for group in members]
        routes = planner.router.route_pairs(list(chain(*pairs)))
    counts = np.array([*map(len, pairs)], dtype=np.int64)
    begins = routes.first_hops[count_up(counts)]
    columns = (
        (np.diff(routes.first_hops), counts),
        (_number_places(routes.hops, np.diff(begins)), np.diff(begins)),
        (planner.router.link_kinds[routes.hops], np.diff(begins)),
        (nodes, sizes),
    )
    texts = zip(*(_write_runs(*column) for column in columns), strict=True)
    numbers: dict[object, int] = {}
    code = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
    examples = find_firsts(code).tolist()
    ends = count_up(counts)
    for first in examples:
        planner.shape(collective, size, members[first]).routes = routes.choose(ends[first], ends[first + 1])
    return _GroupRoutes(routes, code, [members[first] for first in examples])


def _find_places(group: Sequence[int], named: Iterable[tuple[str, str]]) -> Ints:
    """Return the places in a group of pairs of its ranks' nodes [pairs, 2]."""
    place = {name_rank_node(rank): number for number, rank in enumerate(group)}
    return np.array([(place[one], place[other]) for one, other in named], dtype=np.int64).reshape(-1, 2)


def _number_places(items: Ints, counts: Ints) -> Ints:
    """Return for each item of some runs where in its run an equal one comes first."""
    run = np.repeat(np.arange(len(counts)), counts)
    keys = run * (int(items.max(initial=0)) + 1) + items
    _, firsts, place = np.unique(keys, return_index=True, return_inverse=True)
    numbers: Ints = firsts[place] - count_up(counts)[run]
    return numbers


def _write_runs(items: Ints, counts: Ints) -> list[bytes]:
    """Return each of some runs of numbers as bytes."""
    return [items[first:last].tobytes() for first, last in pairwise(count_up(counts).tolist())]


class _Bundle(Struct, eq=False):
    """Flows of the groups of one family, of one kind: the same for exchanges of any size.

    ``first`` is the number of its first flow, ``numbers`` what plans say of each flow of the groups of each code
    [codes, pairs, plans x 3].
    """

    family: int
    groups: _GroupRoutes
    pairs: int
    first: int = 0
    numbers: list[Floats] = field(default_factory=list)
    apart: bool = False


def fold_plans(
    exchanges: Sequence[Asked],
    families: Sequence[Family],
    planners: Sequence[CollectivePlanner],
    links: Sequence[Link],
    slack: frozenset[int] = frozenset(),
) -> FoldedTraffic:
    """Plan the exchanges of all groups, and keep one flow of each class.

    Raises GroupsDifferError when groups of a family differ in cost or in the links that they cross; CannotFoldError
    when hardly any links are alike.

    ``asked``: collective, size [bytes] and family of each class of exchanges. ``planners``: they make the same flows,
    of other sizes and speeds, and find the same alike; warnings are the first's. ``slack``: links that take no part in
    sharing, and so make no flows differ.
    """
    bundles: dict[tuple[int, object], _Bundle] = {}
    router = planners[0].router
    chosen: list[tuple[list[Planned], _Bundle | None]] = []
    warnings: dict[str, None] = {}
    differences = _Differences()
    for collective, size, number in exchanges:
        groups = families[number].groups
        key = number, planners[0].kind(collective, size)
        routed = _route_groups(planners[0], key[1], groups, collective, size)
        by_planner: list[list[Planned]] = [
            [one.build(collective, size, g) for g in routed.examples] for one in planners
        ]
        built = by_planner[0]
        warnings.update((plan.warning, None) for plan in built if plan.warning)
        summaries = [tuple(map(_summarize_plan, plans)) for plans in zip(*by_planner, strict=True)]
        differences.add(number, summaries, routed.code, collective, groups)
        plan, *_ = plans = [one[0] for one in by_planner]
        if not plan.flow_count:
            chosen.append((plans, None))
            continue
        if number in differences.of_group:
            continue
        if key not in bundles:
            bundles[key] = _Bundle(number, routed, len(plan.shape.pairs))
        bundle = bundles[key]
        bundle.numbers += map(_read_numbers, by_planner)
        bundle.apart |= isinstance(plan, CollectiveMessages)
        chosen.append((plans, bundle))
    differences.check()
    if all(bundle.apart and len(bundle.groups.code) == 1 for bundle in bundles.values()):
        # Every flow would be a class of its own.
        whole = _by_planner([plans for plans, _ in chosen], planners)
        return FoldedTraffic(whole, list(links), None, list(warnings))
    crossings, passing = _refine_flows(list(bundles.values()), families, links, slack)
    of_class, passed = _make_class_shape(crossings, passing, router.capacities_bytes_per_s)
    made = {bundle: _fold_shape(bundle, crossings, of_class) for bundle in bundles.values()}
    folded = [
        plans if bundle is None else [_fold_plan(plan, *made[bundle]) for plan in plans] for plans, bundle in chosen
    ]
    plans_of = _by_planner(folded, planners)
    return FoldedTraffic(plans_of, list(of_class.links), crossings, list(warnings), passed)


def _by_planner(plans: Sequence[Sequence[Planned]], planners: Sequence[CollectivePlanner]) -> list[list[Planned]]:
    """Turn the planners' plans of each class of exchanges into each planner's plans."""
    return [[of_class[number] for of_class in plans] for number in range(len(planners))]


class _Differences:
    """How groups of families differ."""

    def __init__(self) -> None:
        self.of_group: dict[int, Ints] = {}
        self._reason = ""

    def add(self, family: int, summaries: Sequence[object], of_group: Ints, collective: str, groups: Ints) -> None:
        """Compare what is said of each group: of those of a code, and of which each is."""
        numbers: dict[object, int] = {}
        codes = np.array([numbers.setdefault(one, len(numbers)) for one in summaries], dtype=np.int64)
        if len(numbers) == 1:
            return
        codes = codes[of_group]
        known = self.of_group.get(family, np.zeros(len(codes), dtype=np.int64))
        self.of_group[family] = np.unique(known * (int(codes.max()) + 1) + codes, return_inverse=True)[1]
        one, other = (_name(groups[i].tolist()) for i in (0, int(np.argmax(codes > 0))))
        what = f"{collective} of the ranks" if collective else "what passes between the ranks"
        how = "is done" if collective else "shares links"
        self._reason = self._reason or f"{what} {one} {how} otherwise than that of {other}"

    def check(self) -> None:
        """Raise an error where there is a difference."""
        if self.of_group:
            raise GroupsDifferError(self._reason, self.of_group)


def _summarize_plan(plan: Planned) -> tuple[object, ...]:
    """Return what must be the same for all groups of a family."""
    columns = [plan.latencies_s, plan.max_rates_bytes_per_s]
    if isinstance(plan, CollectiveMessages):
        numbers = (plan.pattern, plan.block_bytes, *(one.tobytes() for one in columns))
    else:
        # The flows of a group may come in another order.
        rows = np.column_stack([plan.sizes_bytes, *columns])
        numbers = (rows[np.lexsort(rows.T)].tobytes(),)
    return (plan.confidence, len(plan.shape.pairs), *numbers)


def _read_numbers(built: Sequence[Planned]) -> Floats:
    """Return size, latency and cap of each flow of each plan [plans, pairs, 3]."""
    rows = []
    for plan in built:
        latencies_s = plan.latencies_s
        sizes = plan.sizes_bytes if isinstance(plan, CollectiveFlows) else np.full(len(latencies_s), plan.block_bytes)
        rows.append((sizes, latencies_s, plan.max_rates_bytes_per_s))
    return np.array(rows).transpose(0, 2, 1)


def _make_class_shape(
    crossings: Crossings, passing: tuple[Ints, Ints], widths: Floats
) -> tuple[FlowShape, SlackCrossings | None]:
    """Return a flow for each class of flows, over one link for each class of links.

    A class of flows that crosses links which take no part (``passing``: flow and link) has a link of its own there.
    """
    classes, firsts = np.unique(crossings.link_class, return_index=True)
    kept = classes >= 0
    links = make_class_links(classes[kept].tolist(), widths[firsts[kept]])
    flow, link, times = crossings.count_classes()
    passing_flow, passed_link = passing
    counted, counter = np.unique(crossings.flow_class[passing_flow], return_inverse=True)
    places = np.arange(len(links), len(links) + len(counted))
    links += make_class_links(places.tolist(), np.full(len(counted), np.inf))
    flow, link, times = (
        np.concatenate(one) for one in ((flow, counted), (link, places), (times, np.ones_like(counted)))
    )
    order = np.lexsort((link, flow))
    count = int(crossings.flow_class.max()) + 1
    first_hops = count_up(np.bincount(flow, times, minlength=count))
    routes = Routes(np.repeat(link[order], times[order]), first_hops)
    shape = FlowShape(tuple(map(name_ends, range(count))), Router(links), routes)
    return shape, SlackCrossings(passed_link, places[counter]) if len(counted) else None


def _refine_flows(
    bundles: Sequence[_Bundle], families: Sequence[Family], links: Sequence[Link], slack: frozenset[int]
) -> tuple[Crossings, tuple[Ints, Ints]]:
    """Give numbers to the flows of all groups, and find which of them and of the links are alike.

    Returned too are flow and link of each crossing of a link that takes no part.
    """
    kinds, flows, hops = [], [], []
    flow = kind = 0
    for bundle in bundles:
        numbers = np.concatenate(bundle.numbers, axis=2)
        if bundle.apart:
            places = np.broadcast_to(np.arange(bundle.pairs), numbers.shape[:2])
            numbers = np.concatenate([numbers, places[:, :, None]], axis=2)
        own = _number_rows(numbers.reshape(-1, numbers.shape[2]))
        kinds.append(own.reshape(numbers.shape[:2])[bundle.groups.code].ravel() + kind)
        kind += int(own.max()) + 1
        bundle.first = flow
        routes = bundle.groups.routes
        lengths = np.diff(routes.first_hops)
        flows.append(np.repeat(flow + np.arange(len(lengths)), lengths))
        hops.append(routes.hops)
        flow += len(lengths)
    widths = np.array([link.bandwidth_bytes_per_s for link in links], dtype=np.float64)
    flow_of, link_of = np.concatenate(flows), np.concatenate(hops)
    beside = np.isin(link_of, np.array(sorted(slack), dtype=np.int64))
    refined = refine(flow_of[~beside], link_of[~beside], np.concatenate(kinds), widths)
    if refined is None:
        raise CannotFoldError("hardly any links carry the same")
    differences = _Differences()
    for bundle in bundles:
        groups = len(bundle.groups.code)
        last = bundle.first + groups * bundle.pairs
        classes = np.sort(refined.flow_class[bundle.first : last].reshape(groups, -1), axis=1)
        if (classes != classes[0]).any():
            row_bytes, each = [row.tobytes() for row in classes], np.arange(groups)
            differences.add(bundle.family, row_bytes, each, "", families[bundle.family].groups)
    differences.check()
    return refined, (flow_of[beside], link_of[beside])


def _number_rows(rows: Floats) -> Ints:
    """Return equal numbers for equal rows, in the order of rows compared from their first column on."""
    numbers = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        if (column != column[0]).any():
            values, value = np.unique(column, return_inverse=True)
            numbers = np.unique(numbers * len(values) + value, return_inverse=True)[1]
    return numbers


def _fold_shape(bundle: _Bundle, crossings: Crossings, of_class: FlowShape) -> tuple[FlowShape, Ints]:
    """Return the shape of one flow for each class of the first group, and which flows they are."""
    classes = crossings.flow_class[bundle.first : bundle.first + bundle.pairs]
    kept = np.arange(bundle.pairs) if bundle.apart else np.sort(np.unique(classes, return_index=True)[1])
    return of_class.choose(classes[kept]), kept.astype(np.int64)


def _fold_plan(plan: Planned, shape: FlowShape, kept: Ints) -> Planned:
    """Return the plan of a group with the flows that are kept."""
    latencies_s, rates = plan.latencies_s[kept], plan.max_rates_bytes_per_s[kept]
    if isinstance(plan, CollectiveFlows):
        return CollectiveFlows(shape, plan.sizes_bytes[kept], latencies_s, rates, plan.confidence, plan.warning)
    return structs.replace(plan, shape=shape)


def _name(group: Sequence[int]) -> str:
    shown = ", ".join(map(str, group[:4]))
    return f"{shown}, ..." if len(group) > 4 else shown


MOST_SPLITS = 20
"""Divisions of the classes after which folding is given up."""


class FoldedProgram(Struct, frozen=True, eq=False):
    """The quotient of a program, and the way back."""

    fold: Fold  # classes of ranks
    # Tasks of the representatives, with one exchange for each class; with the times of each case
    programs: list[Program]
    traffic: FoldedTraffic  # classes of flows and links

    def stretch(self, factor: float) -> FoldedProgram:
        """Return it with communication that takes a factor as long: what is alike stays so."""
        traffic = structs.replace(self.traffic, links=list(narrow_links(self.traffic.links, factor)))
        return FoldedProgram(self.fold, [p.stretch(factor) for p in self.programs], traffic)

    def make_network(
        self, make: Callable[[Sequence[Link]], AnyNetwork], make_whole: Callable[[], AnyNetwork]
    ) -> AnyNetwork:
        """Return an unused network of the classes of links, by what makes the whole one's kind."""
        return make_whole() if self.traffic.crossings is None else make(self.traffic.links)

    def spread_bytes(
        self, link_bytes: Mapping[tuple[str, str], float], links: Sequence[Link]
    ) -> dict[tuple[str, str], float]:
        """Return the bytes on every link from those on the links of the classes [bytes]."""
        crossings = self.traffic.crossings
        if crossings is None:
            return dict(link_bytes)
        moved = [link_bytes[link.source, link.target] for link in self.traffic.links]
        # No flow crosses a link of no class, but where it takes no part in sharing.
        of_link = np.array([*moved, 0.0])[crossings.link_class]
        slack = self.traffic.slack
        if slack is not None:
            of_link += np.bincount(slack.link, np.array(moved)[slack.counter], minlength=len(of_link))
        return {(link.source, link.target): size for link, size in zip(links, of_link.tolist(), strict=True)}


def fold_program(fold: Fold, cases: Sequence[Case], slack: frozenset[int], platform: Platform) -> FoldedProgram:
    """Return the quotient of a task graph on a platform: the same for all cases, so alike in each, and for both networks.

    ``slack``: links that take no part in sharing; planners are of one platform, however fast its links are.

    Raises CannotFoldError, which says why that would not be exact, SimulationError as ``build_program``, TooLargeError
    where classes divide into more than fit into memory.
    """
    if fold.ranks > platform.ranks:
        raise CannotFoldError("the platform has too few ranks")
    for case in cases:
        fold = _split_speeds(fold, case.compute_scale)
    planners = [case.planner for case in cases]
    reason = "no two ranks do the same"
    for _ in range(MOST_SPLITS):
        if len(fold.representatives) == fold.ranks:
            raise CannotFoldError(reason)
        try:
            exchanges, traffic = _fold_exchanges(fold, planners, platform.links, slack)
        except GroupsDifferError as difference:
            reason = str(difference)
            division = divide_classes(fold, np.zeros(fold.ranks, dtype=np.int64), difference.of_group)
            check_division(fold, division[0], reason)
            fold = split_fold(fold, *division)
            continue
        return FoldedProgram(fold, build_programs(fold.graph, cases, exchanges, platform), traffic)
    raise CannotFoldError(reason)


@derived()
def _list_exchanges(fold: Fold) -> ExchangeRows:
    return ExchangeRows(fold.graph.task_columns)


def _fold_exchanges(
    fold: Fold, planners: Sequence[CollectivePlanner], links: Sequence[Link], slack: frozenset[int]
) -> tuple[list[Exchanges], FoldedTraffic]:
    """Return, by each planner, one exchange of each class; and what they put on the links."""
    rows = _list_exchanges(fold)
    if np.any([*rows.find_faults(whole=False).values()]):
        raise CannotFoldError("the tasks of an exchange do not fit together")
    family_of = fold.family_of[fold.graph.task_columns["match_id"][rows.task[rows.first[:-1]]]]
    plan_of, firsts = rows.number_plans(family_of)
    of_family = [
        (rows.read_collective(match), rows.read_size(match), int(family_of[match])) for match in firsts.tolist()
    ]
    traffic = fold_plans(of_family, fold.families, planners, links, slack)
    exchanges = []
    for plans in traffic.plans:
        confidences = [
            (collective, len(fold.families[family].groups[0]), plan.confidence)
            for (collective, _, family), plan in zip(of_family, plans, strict=True)
        ]
        made: list[ExchangeTraffic] = list(plans)
        exchanges.append(rows.assemble(made, plan_of, confidences, traffic.warnings))
    return exchanges, traffic


def _split_speeds(fold: Fold, scale: float | Sequence[float]) -> Fold:
    if isinstance(scale, int | float):
        return fold
    scales = np.array([float(value) for value in scale])[: fold.ranks]
    if len(scales) < fold.ranks:
        raise CannotFoldError("not every rank has a compute_scale")
    if (scales == scales[fold.representatives[fold.class_of]]).all():
        return fold
    return split_fold(fold, *divide_classes(fold, np.unique(scales, return_inverse=True)[1], {}))


_PEAK_OVER_TABLES = 3.7
"""Peak of memory of expanding, simulating and reading the timeline, over the columns that are kept of each rank: 362 over
101 bytes a task, measured on 2.4 million tasks of GPT-3 175B (8 tensor x 8 pipeline x 2 data)."""


class TooLargeError(SimulationError):
    """Tasks that would not fit into memory."""


def check_expansion(fold: Fold, reason: str, available_bytes: float | None = None) -> None:
    """Refuse to make all ranks' tasks where they would not fit into memory; TooLargeError names ranks, tasks and memory."""
    _check(fold, fold.ranks, fold.task_total, reason, available_bytes)


def check_division(fold: Fold, classes: Ints, reason: str, available_bytes: float | None = None) -> None:
    """Refuse, with TooLargeError as ``check_expansion``, to divide ranks into more classes [ranks] than fit into memory."""
    representatives = np.unique(classes, return_index=True)[1]
    tasks = int(fold.task_counts[fold.class_of[representatives]].sum())
    _check(fold, len(representatives), tasks, reason, available_bytes)


def _check(fold: Fold, ranks: int, tasks: int, reason: str, available_bytes: float | None) -> None:
    needed_bytes = estimate_bytes(fold, tasks)
    free_bytes = find_available_bytes() if available_bytes is None else available_bytes
    if free_bytes is None or needed_bytes <= free_bytes:
        return
    whose = f"all {ranks} ranks" if ranks == fold.ranks else f"{ranks} of {fold.ranks} ranks"
    raise TooLargeError(
        f"the tasks of {whose} are needed ({reason}): {format_count(tasks).strip()} tasks take some "
        f"{format_bytes(needed_bytes)} of memory, and {format_bytes(free_bytes)} are free; ask for fewer ranks or a "
        "platform on which they are alike, leave --no-fold and timelines of all ranks out, or use a machine with more memory"
    )


def estimate_bytes(fold: Fold, tasks: int) -> float:
    """Return the memory of so many tasks at most while made and simulated, in proportion to the kept ranks' tables [bytes].

    Messages of algorithms and parts of flows come on top.
    """
    tasks_kept, waits = fold.graph.task_columns, fold.graph.wait_columns
    kept_bytes = tasks_kept.nbytes + waits.nbytes
    return _PEAK_OVER_TABLES * kept_bytes / max(tasks_kept.rows, 1) * tasks
