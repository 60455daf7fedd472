"""The event loop and the sharing of links, compiled.

Line by line what ``reference`` and ``network.fair_share`` do, on arrays, with
the same floating-point operations in the same order, so that both give the
same bits. Importing this module imports numba: only ``compilation`` does.
"""

from __future__ import annotations

import numpy as np

from trioflow.engine.heap_kernels import NEVER_S, compile_kernel, find_first_s, pop, push, settle
from trioflow.engine.layout import (
    CHANGED,
    ENDS_HEAD,
    ENDS_TAIL,
    EPOCH,
    EVENTS,
    FLOWS,
    FRESH_NODES,
    FRESH_SLOTS,
    NOWHERE,
    RESHARED,
    SEQUENCE,
    STARTS_HEAD,
    STARTS_TAIL,
    State,
)  # fmt: skip


@compile_kernel
def _schedule_end(state: State, time_s: float, now_s: float, item: int) -> None:
    """Let a task or an exchange end; what ends now comes after what was scheduled before."""
    if time_s <= now_s:
        state.ends[state.count[ENDS_TAIL]] = item
        state.count[ENDS_TAIL] += 1
    else:
        push(state.running, time_s, state.count[SEQUENCE], item)
        state.count[SEQUENCE] += 1


@compile_kernel
def _end_task(state: State, task: int, now_s: float) -> None:
    ended = state.tasks[task]
    ended.end_s = now_s
    state.count[EVENTS] += 1
    for index in range(ended.first_successor, ended.last_successor):
        successor = state.successors[index]
        waiting = state.tasks[successor]
        waiting.missing -= 1
        if waiting.missing == 0:
            state.starts[state.count[STARTS_TAIL]] = successor
            state.count[STARTS_TAIL] += 1


@compile_kernel
def _end_item(state: State, item: int, now_s: float) -> None:
    exchange = item - len(state.tasks)
    if exchange < 0:
        _end_task(state, item, now_s)
        return
    for index in range(
        state.exchanges[exchange].first_member, state.exchanges[exchange].last_member
    ):
        _end_task(state, state.members[index], now_s)


@compile_kernel
def _start_task(state: State, task: int, now_s: float) -> None:
    """Start a ready task, or its exchange if it was the last member to be ready."""
    index = state.tasks[task].exchange
    if index < 0:
        state.tasks[task].start_s = now_s
        state.count[EVENTS] += 1
        _schedule_end(state, now_s + state.tasks[task].duration_s, now_s, task)
        return
    exchange = state.exchanges[index]
    exchange.absent -= 1
    if exchange.absent:
        return
    for place in range(exchange.first_member, exchange.last_member):
        state.tasks[state.members[place]].start_s = now_s
    exchange.in_flight = exchange.last_flow - exchange.first_flow
    state.count[EVENTS] += exchange.last_member - exchange.first_member + exchange.in_flight
    for flow in range(exchange.first_flow, exchange.last_flow):
        _start_flow(state, index, flow, now_s)
    if exchange.in_flight == 0:
        _schedule_end(state, now_s + exchange.duration_s, now_s, len(state.tasks) + index)


@compile_kernel
def _start_flow(state: State, exchange: int, flow: int, now_s: float) -> None:
    made = state.flows[flow]
    index = _take_slot(state, made.last_hop - made.first_hop)
    slot = state.slots[index]
    slot.flow_id = state.count[FLOWS]
    state.count[FLOWS] += 1
    slot.exchange = exchange
    slot.flow = flow
    slot.rate = 0.0
    state.moving.place[index] = NOWHERE
    begin_s = now_s + made.latency_s
    if state.shared:
        push(state.waiting, begin_s, slot.flow_id, index)
    else:
        push(state.moving, begin_s + made.size_bytes / made.max_rate, slot.flow_id, index)


@compile_kernel
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


@compile_kernel
def _mark_changed(state: State, link: int) -> None:
    if not state.links[link].is_changed:
        state.links[link].is_changed = 1
        state.changed_links[state.count[CHANGED]] = link
        state.count[CHANGED] += 1


@compile_kernel
def _begin_flow(state: State, index: int, now_s: float) -> None:
    """Let the bytes of a flow move; one without bytes is at its end at once."""
    slot = state.slots[index]
    flow = state.flows[slot.flow]
    slot.since_s = now_s
    slot.left_bytes = flow.size_bytes
    if flow.size_bytes == 0.0:
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


@compile_kernel
def _finish_flow(state: State, index: int, now_s: float) -> None:
    """Take an ended flow off its links; the last one of an exchange ends the exchange."""
    slot = state.slots[index]
    flow = state.flows[slot.flow]
    place = slot.first_node
    for hop in range(flow.first_hop, flow.last_hop):
        link = state.links[state.hops[hop]]
        link.moved_bytes += flow.size_bytes
        if state.shared and flow.size_bytes != 0.0:
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
    exchange = state.exchanges[slot.exchange]
    exchange.in_flight -= 1
    if exchange.in_flight == 0:
        _schedule_end(state, now_s, now_s, len(state.tasks) + slot.exchange)


@compile_kernel
def _share(state: State, now_s: float) -> None:
    """Compute the rates anew that flows which came or went can change, from now on."""
    if state.count[CHANGED] == 0:
        return
    state.count[EPOCH] += 1
    for index in range(state.count[CHANGED]):
        link = state.changed_links[index]
        state.links[link].is_changed = 0
        if state.links[link].seen != state.count[EPOCH]:
            found_links, found_slots = _collect_component(state, link)
            state.count[RESHARED] += found_slots
            _share_component(state, found_links, found_slots, now_s)
    state.count[CHANGED] = 0


@compile_kernel
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


@compile_kernel
def _share_component(state: State, alive: int, rising: int, now_s: float) -> None:
    """Fill links step by step, as ``compute_max_min_rates`` does.

    A flow that has got its rate is told by its negative ``seen``; of the
    others only those with a cap are looked at in every step.
    """
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


@compile_kernel
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


@compile_kernel
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


@compile_kernel
def _set_rate(state: State, index: int, rate: float, now_s: float) -> None:
    """Let a flow go on at another rate; one whose rate stays keeps the exact bits of its end."""
    slot = state.slots[index]
    if rate == slot.rate:
        return
    gone_s = now_s - slot.since_s
    if gone_s > 0:
        moved_bytes = gone_s * slot.rate
        slot.left_bytes = max(0.0, slot.left_bytes - moved_bytes)
    slot.since_s = now_s
    slot.rate = rate
    end_s = now_s + slot.left_bytes / rate
    place = state.moving.place[index]
    if place == NOWHERE:
        push(state.moving, end_s, slot.flow_id, index)
    else:
        settle(state.moving, place, end_s, slot.flow_id, index)


@compile_kernel
def _advance_network(state: State, now_s: float) -> None:
    """Let latencies and flows end until now, and share anew."""
    while min(find_first_s(state.waiting), find_first_s(state.moving)) <= now_s:
        while find_first_s(state.waiting) <= now_s:
            _begin_flow(state, pop(state.waiting), now_s)
        while find_first_s(state.moving) <= now_s:
            _finish_flow(state, pop(state.moving), now_s)
        _share(state, now_s)


@compile_kernel
def _run_tasks(state: State, now_s: float) -> None:
    """Let tasks end and start until nothing more happens now; ends come first."""
    count = state.count
    while True:
        if find_first_s(state.running) <= now_s:
            _end_item(state, pop(state.running), now_s)
        elif count[ENDS_HEAD] < count[ENDS_TAIL]:
            count[ENDS_HEAD] += 1
            _end_item(state, state.ends[count[ENDS_HEAD] - 1], now_s)
        elif count[STARTS_HEAD] < count[STARTS_TAIL]:
            count[STARTS_HEAD] += 1
            _start_task(state, state.starts[count[STARTS_HEAD] - 1], now_s)
        else:
            break
    count[ENDS_HEAD] = count[ENDS_TAIL] = count[STARTS_HEAD] = count[STARTS_TAIL] = 0


@compile_kernel
def execute(state: State) -> None:
    """Run to the end; tasks that never do keep ``NEVER_S``."""
    for task in range(len(state.tasks)):
        if state.tasks[task].missing == 0:
            state.starts[state.count[STARTS_TAIL]] = task
            state.count[STARTS_TAIL] += 1
    now_s = 0.0
    while now_s < NEVER_S:
        _run_tasks(state, now_s)
        network_s = min(find_first_s(state.waiting), find_first_s(state.moving))
        now_s = min(find_first_s(state.running), network_s)
        if now_s < NEVER_S:
            _advance_network(state, now_s)
