"""Flows on shared links, compiled: how they start, move, share and end.

Line by line what ``network.fair_share`` and ``network.networks`` do, on arrays, with the same floating-point operations
in the same order.
"""

from __future__ import annotations

import numpy as np

from trioflow.engine.compiled.heap_kernels import compile_part, find_first_s, move, pop, push
from trioflow.engine.compiled.layout import (
    ARRIVED,
    CHANGED,
    EPOCH,
    EVENTS,
    FLOWS,
    FRESH_NODES,
    FRESH_SLOTS,
    NOWHERE,
    PIECES,
    RESHARED,
    State,
)


@compile_part
def start_flow(
    state: State, exchange: int, flow: int, message: int, size_bytes: float, now_s: float
) -> None:
    """Let a flow start; ``message`` is whom it tells the exchange that it ended."""
    made = state.flows[flow]
    index = _take_slot(state, made.last_hop - made.first_hop)
    slot = state.slots[index]
    slot.flow_id = state.count[FLOWS]
    state.count[FLOWS] += 1
    slot.exchange = exchange
    slot.flow = flow
    slot.message = message
    slot.size_bytes = size_bytes
    slot.rate = 0.0
    state.count[EVENTS] += 1
    state.moving.place[index] = NOWHERE
    begin_s = now_s + made.latency_s
    slot.since_s = begin_s
    if state.shared:
        push(state.waiting, begin_s, slot.flow_id, index)
    else:
        slot.rate = made.max_rate
        push(state.moving, begin_s + size_bytes / made.max_rate, slot.flow_id, index)


@compile_part
def _take_slot(state: State, hops: int) -> int:
    index = state.free_slots[hops]
    if index != NOWHERE:
        state.free_slots[hops] = state.slots[index].next_free
        return int(index)
    index = state.count[FRESH_SLOTS]
    state.count[FRESH_SLOTS] += 1
    state.slots[index].seen = 0
    state.slots[index].first_node = state.count[FRESH_NODES]
    for node in range(state.count[FRESH_NODES], state.count[FRESH_NODES] + hops):
        state.nodes[node].slot = index
    state.count[FRESH_NODES] += hops
    return int(index)


@compile_part
def note_arrival(state: State, exchange: int, message: int) -> None:
    """Remember that a flow or a join is done; its exchange hears of it when the clock stands."""
    arrival = state.arrived[state.count[ARRIVED]]
    arrival.exchange = exchange
    arrival.message = message
    state.count[ARRIVED] += 1


@compile_part
def _mark_changed(state: State, link: int) -> None:
    if not state.links[link].is_changed:
        state.links[link].is_changed = 1
        state.changed_links[state.count[CHANGED]] = link
        state.count[CHANGED] += 1


@compile_part
def _begin_flow(state: State, index: int, now_s: float) -> None:
    """Let the bytes of a flow move; one without bytes is at its end at once."""
    slot = state.slots[index]
    flow = state.flows[slot.flow]
    slot.since_s = now_s
    slot.left_bytes = slot.size_bytes
    if slot.size_bytes == 0.0:
        push(state.moving, now_s, slot.flow_id, index)
        return
    if flow.first_hop == flow.last_hop:
        _set_rate(state, index, flow.max_rate, now_s)
    place = slot.first_node
    for hop in range(flow.first_hop, flow.last_hop):
        link = state.links[state.hops[hop]]
        node = state.nodes[place]
        node.before = NOWHERE
        node.after = link.first_node
        if link.first_node != NOWHERE:
            state.nodes[link.first_node].before = place
        link.first_node = place
        link.crossing += 1
        _mark_changed(state, state.hops[hop])
        place += 1


@compile_part
def _finish_flow(state: State, index: int, now_s: float) -> None:
    """Take an ended flow off its links, and note that it has arrived."""
    slot = state.slots[index]
    flow = state.flows[slot.flow]
    _keep_piece(state, index, now_s)
    place = slot.first_node
    for hop in range(flow.first_hop, flow.last_hop):
        link = state.links[state.hops[hop]]
        link.moved_bytes += slot.size_bytes
        if state.shared and slot.size_bytes != 0.0:
            node = state.nodes[place]
            if node.before == NOWHERE:
                link.first_node = node.after
            else:
                state.nodes[node.before].after = node.after
            if node.after != NOWHERE:
                state.nodes[node.after].before = node.before
            link.crossing -= 1
            _mark_changed(state, state.hops[hop])
            place += 1
    slot.next_free = state.free_slots[flow.last_hop - flow.first_hop]
    state.free_slots[flow.last_hop - flow.first_hop] = index
    state.count[EVENTS] += 1
    note_arrival(state, slot.exchange, slot.message)


@compile_part
def _share(state: State, now_s: float) -> None:
    """Compute the rates anew that flows which came or went can change, from now on."""
    if state.count[CHANGED] == 0:
        return
    state.count[EPOCH] += 1
    for index in range(state.count[CHANGED]):
        link = state.changed_links[index]
        state.links[link].is_changed = 0
        if state.links[link].crossing == 0 or state.links[link].seen == state.count[EPOCH]:
            continue
        if not _share_alone(state, link, now_s):
            found_links, found_slots = _collect_component(state, link)
            state.count[RESHARED] += found_slots
            _share_component(state, found_links, found_slots, now_s)
    state.count[CHANGED] = 0


@compile_part
def _share_alone(state: State, link: int, now_s: float) -> bool:
    """Give a flow that has all its links to itself its rate; false where there is another."""
    if state.links[link].crossing != 1:
        return False
    index = state.nodes[state.links[link].first_node].slot
    flow = state.flows[state.slots[index].flow]
    rate = flow.max_rate
    for hop in range(flow.first_hop, flow.last_hop):
        other = state.links[state.hops[hop]]
        if other.crossing != 1:
            return False
        rate = min(rate, other.capacity)
    for hop in range(flow.first_hop, flow.last_hop):
        state.links[state.hops[hop]].seen = state.count[EPOCH]
    state.count[RESHARED] += 1
    _set_rate(state, index, rate, now_s)
    return True


@compile_part
def _collect_component(state: State, link: int) -> tuple[int, int]:
    """Find the flows that share links with those on one link, directly or through others."""
    epoch = state.count[EPOCH]
    state.links[link].seen = epoch
    state.found_links[0] = link
    found_links, found_slots, done = 1, 0, 0
    while done < found_links:
        place = state.links[state.found_links[done]].first_node
        done += 1
        while place != NOWHERE:
            index = state.nodes[place].slot
            place = state.nodes[place].after
            if state.slots[index].seen == epoch:
                continue
            state.slots[index].seen = epoch
            state.found_slots[found_slots] = index
            found_slots += 1
            flow = state.flows[state.slots[index].flow]
            for hop in range(flow.first_hop, flow.last_hop):
                other = state.hops[hop]
                if state.links[other].seen != epoch:
                    state.links[other].seen = epoch
                    state.found_links[found_links] = other
                    found_links += 1
    return found_links, found_slots


@compile_part
def _share_component(state: State, alive: int, rising: int, now_s: float) -> None:
    """Fill links step by step, as ``compute_max_min_rates`` does; a flow that has its rate has a negative ``seen``."""
    for place in range(alive):
        link = state.links[state.found_links[place]]
        link.free = link.capacity
        link.rising = link.crossing
    capped = 0
    for place in range(rising):
        index = state.found_slots[place]
        if state.flows[state.slots[index].flow].max_rate < np.inf:
            state.found_slots[capped] = index
            capped += 1
    while rising:
        alive, capped, level = _find_level(state, alive, capped)
        frozen = _freeze(state, alive, capped, level)
        rising -= frozen
        for place in range(frozen):
            index = state.frozen_slots[place]
            flow = state.flows[state.slots[index].flow]
            _set_rate(state, index, level, now_s)
            for hop in range(flow.first_hop, flow.last_hop):
                state.links[state.hops[hop]].free -= level
                state.links[state.hops[hop]].rising -= 1


@compile_part
def _find_level(state: State, alive: int, capped: int) -> tuple[int, int, float]:
    """Return how many links and capped flows still rise, and the rate at which one stops."""
    level, links, flows = np.inf, 0, 0
    for place in range(alive):
        link = state.links[state.found_links[place]]
        if link.rising:
            link.share = link.free / link.rising
            level = min(level, link.share)
            state.found_links[links] = state.found_links[place]
            links += 1
    for place in range(capped):
        slot = state.slots[state.found_slots[place]]
        if slot.seen > 0:
            level = min(level, state.flows[slot.flow].max_rate)
            state.found_slots[flows] = state.found_slots[place]
            flows += 1
    return links, flows, level


@compile_part
def _freeze(state: State, alive: int, capped: int, level: float) -> int:
    """Collect the flows that stop at a rate: on full links, or at their cap; return how many."""
    frozen = 0
    for place in range(alive):
        link = state.links[state.found_links[place]]
        node = link.first_node if link.share <= level else NOWHERE
        while node != NOWHERE:
            index = state.nodes[node].slot
            node = state.nodes[node].after
            if state.slots[index].seen > 0:
                state.slots[index].seen = -state.slots[index].seen
                state.frozen_slots[frozen] = index
                frozen += 1
    for place in range(capped):
        index = state.found_slots[place]
        slot = state.slots[index]
        if slot.seen > 0 and state.flows[slot.flow].max_rate <= level:
            slot.seen = -slot.seen
            state.frozen_slots[frozen] = index
            frozen += 1
    return frozen


@compile_part
def _set_rate(state: State, index: int, rate: float, now_s: float) -> None:
    """Let a flow go on at another rate; one whose rate stays keeps the exact bits of its end."""
    slot = state.slots[index]
    if rate == slot.rate:
        return
    gone_s = now_s - slot.since_s
    if gone_s > 0:
        _keep_piece(state, index, now_s)
        moved_bytes = gone_s * slot.rate
        slot.left_bytes = max(0.0, slot.left_bytes - moved_bytes)
    slot.since_s = now_s
    slot.rate = rate
    end_s = now_s + slot.left_bytes / rate
    move(state.moving, end_s, slot.flow_id, index)


@compile_part
def _keep_piece(state: State, index: int, now_s: float) -> None:
    """Count a flow's time at one rate, and keep it where there is room."""
    slot = state.slots[index]
    flow = state.flows[slot.flow]
    if slot.since_s < now_s and flow.first_hop < flow.last_hop:
        place = state.count[PIECES]
        state.count[PIECES] += 1
        if place < len(state.pieces):
            piece = state.pieces[place]
            piece.begin_s = slot.since_s
            piece.end_s = now_s
            piece.rate = slot.rate
            piece.flow_id = slot.flow_id
            piece.flow = slot.flow


@compile_part
def advance_network(state: State, now_s: float) -> None:
    """Let latencies and flows end until now, and share anew."""
    while min(find_first_s(state.waiting), find_first_s(state.moving)) <= now_s:
        while find_first_s(state.waiting) <= now_s:
            _begin_flow(state, pop(state.waiting), now_s)
        while find_first_s(state.moving) <= now_s:
            _finish_flow(state, pop(state.moving), now_s)
        _share(state, now_s)
