"""The event loop: tasks, exchanges and their messages, and flows on shared links; compiled by numba, or run as it is.

``run.bind`` compiles these functions, or leaves them plain Python for small programs; both do the same floating-point
operations in the same order. A network of another package takes the place of ``start_flow``, ``find_network_s`` and
``advance_network``.

Tasks. A ready task starts at once; an exchange's members start when all are ready and end when its last flow does. Its
flows start with it or, if they are messages of an algorithm, each when the messages it waits for have ended; a join
ends at once. Events at the same time run in this order: ends of flows by ``flow_id``, ends of tasks, starts. When and
where tasks run does not depend on these ties: a stream's order is fixed by the graph.

Flows share links in a max-min fair way (``network.networks``); rates change only when a flow begins to move bytes or
ends, and only of flows that share links with it, directly or through others.

A heap here is a binary heap whose items can be moved.
"""

import numpy as np

from trioflow.engine.compiled.state import (
    ARRIVED,
    CHANGED,
    ENDS_HEAD,
    ENDS_TAIL,
    EPOCH,
    EVENTS,
    FLOWS,
    FRESH_NODES,
    FRESH_SLOTS,
    FRESH_WAITS,
    NOWHERE,
    PIECES,
    RESHARED,
    SEQUENCE,
    STARTS_HEAD,
    STARTS_TAIL,
    Heap,
    State,
)

NEVER_S = np.inf


def _put(heap: Heap, place: int, time_s: float, tie: int, item: int) -> None:
    entry = heap.entries[place]
    entry.time_s = time_s
    entry.tie = tie
    entry.item = item
    heap.place[item] = place


def _precedes(heap: Heap, place: int, time_s: float, tie: int) -> bool:
    entry = heap.entries[place]
    return bool(entry.time_s < time_s or (entry.time_s == time_s and entry.tie < tie))


def _settle(heap: Heap, place: int, time_s: float, tie: int, item: int) -> None:
    """Put an item where it belongs, beginning at an empty place."""
    while place > 0:
        parent = (place - 1) >> 1
        if _precedes(heap, parent, time_s, tie):
            break
        above = heap.entries[parent]
        _put(heap, place, above.time_s, above.tie, above.item)
        place = parent
    while True:
        child = 2 * place + 1
        if child >= heap.size[0]:
            break
        below = heap.entries[child]
        if child + 1 < heap.size[0] and _precedes(heap, child + 1, below.time_s, below.tie):
            child += 1
            below = heap.entries[child]
        if not _precedes(heap, child, time_s, tie):
            break
        _put(heap, place, below.time_s, below.tie, below.item)
        place = child
    _put(heap, place, time_s, tie, item)


def push(heap: Heap, time_s: float, tie: int, item: int) -> None:
    """Add an item."""
    heap.size[0] += 1
    _settle(heap, heap.size[0] - 1, time_s, tie, item)


def move(heap: Heap, time_s: float, tie: int, item: int) -> None:
    """Give an item another time, or add it."""
    place = heap.place[item]
    if place == NOWHERE:
        push(heap, time_s, tie, item)
    else:
        _settle(heap, place, time_s, tie, item)


def pop(heap: Heap) -> int:
    """Remove the first item and return it."""
    item = heap.entries[0].item
    heap.place[item] = NOWHERE
    heap.size[0] -= 1
    if heap.size[0]:
        last = heap.entries[heap.size[0]]
        _settle(heap, 0, last.time_s, last.tie, last.item)
    return int(item)


def find_first_s(heap: Heap) -> float:
    """Return the time of the first item, or ``NEVER_S`` where there is none [s]."""
    return float(heap.entries[0].time_s) if heap.size[0] else NEVER_S


def start_flow(state: State, exchange: int, flow: int, message: int, size_bytes: float, now_s: float) -> None:
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


def note_arrival(state: State, exchange: int, message: int) -> None:
    """Remember that a flow or a join is done; its exchange hears of it when the clock stands."""
    arrival = state.arrived[state.count[ARRIVED]]
    arrival.exchange = exchange
    arrival.message = message
    state.count[ARRIVED] += 1


def _mark_changed(state: State, link: int) -> None:
    if not state.links[link].is_changed:
        state.links[link].is_changed = 1
        state.changed_links[state.count[CHANGED]] = link
        state.count[CHANGED] += 1


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


def find_network_s(state: State) -> float:
    """Return when a latency or a flow next ends, or ``NEVER_S`` [s]."""
    return min(find_first_s(state.waiting), find_first_s(state.moving))


def advance_network(state: State, now_s: float) -> None:
    """Let latencies and flows end until now, and share anew."""
    while find_network_s(state) <= now_s:
        while find_first_s(state.waiting) <= now_s:
            _begin_flow(state, pop(state.waiting), now_s)
        while find_first_s(state.moving) <= now_s:
            _finish_flow(state, pop(state.moving), now_s)
        _share(state, now_s)


def _schedule_end(state: State, time_s: float, now_s: float, item: int) -> None:
    """Let a task or an exchange end; what ends now comes after what was scheduled before."""
    if time_s <= now_s:
        state.ends[state.count[ENDS_TAIL]] = item
        state.count[ENDS_TAIL] += 1
    else:
        push(state.running, time_s, state.count[SEQUENCE], item)
        state.count[SEQUENCE] += 1


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


def _end_item(state: State, item: int, now_s: float) -> None:
    exchange = item - len(state.tasks)
    if exchange < 0:
        _end_task(state, item, now_s)
        return
    for index in range(state.exchanges[exchange].first_member, state.exchanges[exchange].last_member):
        _end_task(state, state.members[index], now_s)


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
    state.count[EVENTS] += exchange.last_member - exchange.first_member
    if exchange.plan == NOWHERE:
        _schedule_end(state, now_s + exchange.duration_s, now_s, len(state.tasks) + index)
        return
    plan = state.plans[exchange.plan]
    if plan.pattern != NOWHERE:
        _start_messages(state, index, now_s)
    else:
        exchange.in_flight = plan.last_flow - plan.first_flow
        for flow in range(plan.first_flow, plan.last_flow):
            start_flow(state, index, flow, NOWHERE, state.flows[flow].size_bytes, now_s)
    if exchange.in_flight == 0:
        _schedule_end(state, now_s + exchange.duration_s, now_s, len(state.tasks) + index)


def _start_messages(state: State, index: int, now_s: float) -> None:
    """Count what each message of an exchange waits for, and start those that wait for nothing."""
    exchange = state.exchanges[index]
    plan = state.plans[exchange.plan]
    pattern = state.patterns[plan.pattern]
    if plan.free_waits == NOWHERE:
        exchange.waits = state.count[FRESH_WAITS]
        state.count[FRESH_WAITS] += pattern.messages
    else:
        ended = state.exchanges[plan.free_waits]
        exchange.waits = ended.waits
        plan.free_waits = ended.next_free
    exchange.in_flight = pattern.messages
    for message in range(pattern.messages):
        made = state.messages[pattern.first_message + message]
        state.waits[exchange.waits + message] = made.missing
    for message in range(pattern.messages):
        if state.messages[pattern.first_message + message].missing == 0:
            _start_message(state, index, message, now_s)


def _start_message(state: State, index: int, message: int, now_s: float) -> None:
    plan = state.plans[state.exchanges[index].plan]
    made = state.messages[state.patterns[plan.pattern].first_message + message]
    if made.pair == NOWHERE:
        note_arrival(state, index, message)
        return
    size_bytes = made.blocks * plan.block_bytes
    start_flow(state, index, plan.first_flow + made.pair, message, size_bytes, now_s)


def _hear_of_arrivals(state: State, now_s: float) -> None:
    """Let messages start that waited for what arrived, and exchanges end with their last one."""
    head = 0
    while head < state.count[ARRIVED]:
        index, message = state.arrived[head].exchange, state.arrived[head].message
        head += 1
        exchange = state.exchanges[index]
        exchange.in_flight -= 1
        if message != NOWHERE:
            _start_waiting(state, index, message, now_s)
        if exchange.in_flight == 0:
            if message != NOWHERE:
                plan = state.plans[exchange.plan]
                exchange.next_free = plan.free_waits
                plan.free_waits = index
            _schedule_end(state, now_s, now_s, len(state.tasks) + index)
    state.count[ARRIVED] = 0


def _start_waiting(state: State, index: int, message: int, now_s: float) -> None:
    """Start the messages that waited for one, where they wait for nothing else."""
    exchange = state.exchanges[index]
    pattern = state.patterns[state.plans[exchange.plan].pattern]
    row = pattern.first_message + message
    first = pattern.first_successor + state.messages[row].first_successor
    last = pattern.first_successor + state.messages[row + 1].first_successor
    for place in range(first, last):
        successor = state.message_successors[place]
        state.waits[exchange.waits + successor] -= 1
        if state.waits[exchange.waits + successor] == 0:
            _start_message(state, index, successor, now_s)


def _run_tasks(state: State, now_s: float) -> None:
    """Let tasks end and start until nothing more happens now; ends come first."""
    count = state.count
    while find_first_s(state.running) <= now_s:
        _end_item(state, pop(state.running), now_s)
    while True:
        if count[ENDS_HEAD] < count[ENDS_TAIL]:
            count[ENDS_HEAD] += 1
            _end_item(state, state.ends[count[ENDS_HEAD] - 1], now_s)
        elif count[STARTS_HEAD] < count[STARTS_TAIL]:
            count[STARTS_HEAD] += 1
            _start_task(state, state.starts[count[STARTS_HEAD] - 1], now_s)
        else:
            break
    count[ENDS_HEAD] = count[ENDS_TAIL] = count[STARTS_HEAD] = count[STARTS_TAIL] = 0


def execute(state: State) -> None:
    """Run to the end; tasks that never do keep ``NEVER_S``."""
    for task in range(len(state.tasks)):
        if state.tasks[task].missing == 0:
            state.starts[state.count[STARTS_TAIL]] = task
            state.count[STARTS_TAIL] += 1
    now_s = 0.0
    while now_s < NEVER_S:
        _run_tasks(state, now_s)
        network_s = find_network_s(state)
        now_s = min(find_first_s(state.running), network_s)
        if network_s <= now_s < NEVER_S:
            advance_network(state, now_s)
            _hear_of_arrivals(state, now_s)
