"""The event loop, compiled: tasks, exchanges and their messages.

Line by line what ``reference`` does, on arrays, so that both give the same bits. Importing this module imports numba:
only ``compiled`` does.
"""

from __future__ import annotations

from typing import Any

from trioflow.engine.compiled.flow_kernels import advance_network, note_arrival, start_flow
from trioflow.engine.compiled.heap_kernels import (
    NEVER_S,
    compile_kernel,
    compile_part,
    find_first_s,
    pop,
    push,
)
from trioflow.engine.compiled.layout import (
    ARRIVED,
    ENDS_HEAD,
    ENDS_TAIL,
    EVENTS,
    FRESH_WAITS,
    NOWHERE,
    SEQUENCE,
    STARTS_HEAD,
    STARTS_TAIL,
    State,
)


@compile_part
def _schedule_end(state: State, time_s: float, now_s: float, item: int) -> None:
    """Let a task or an exchange end; what ends now comes after what was scheduled before."""
    if time_s <= now_s:
        state.ends[state.count[ENDS_TAIL]] = item
        state.count[ENDS_TAIL] += 1
    else:
        push(state.running, time_s, state.count[SEQUENCE], item)
        state.count[SEQUENCE] += 1


@compile_part
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


@compile_part
def _end_item(state: State, item: int, now_s: float) -> None:
    exchange = item - len(state.tasks)
    if exchange < 0:
        _end_task(state, item, now_s)
        return
    for index in range(
        state.exchanges[exchange].first_member, state.exchanges[exchange].last_member
    ):
        _end_task(state, state.members[index], now_s)


@compile_part
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
    if plan.first_round < plan.last_round:
        end_s = _run_rounds(state, plan, now_s)
        _schedule_end(state, end_s, now_s, len(state.tasks) + index)
        return
    if plan.pattern != NOWHERE:
        _start_messages(state, index, now_s)
    else:
        exchange.in_flight = plan.last_flow - plan.first_flow
        for flow in range(plan.first_flow, plan.last_flow):
            start_flow(state, index, flow, NOWHERE, state.flows[flow].size_bytes, now_s)
    if exchange.in_flight == 0:
        _schedule_end(state, now_s + exchange.duration_s, now_s, len(state.tasks) + index)


@compile_part
def _run_rounds(state: State, plan: Any, now_s: float) -> float:
    """Return when the last of undisturbed rounds ends, and count their bytes [s]."""
    end_s = now_s
    for index in range(plan.first_round, plan.last_round):
        one = state.rounds[index]
        end_s = (end_s + one.latency_s) + one.moving_s
    before, times, after = -1.0, 0, 0.0
    for index in range(plan.first_crossing, plan.last_crossing):
        crossing = state.crossings[index]
        link = state.links[crossing.link]
        # Most links have had the same bytes before: the sum need not be taken again.
        if link.moved_bytes != before or crossing.times != times:
            before, times, after = link.moved_bytes, crossing.times, link.moved_bytes
            for place in range(plan.first_round, plan.last_round):
                for _ in range(times):
                    after += state.rounds[place].size_bytes
        link.moved_bytes = after
    return float(end_s)


@compile_part
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


@compile_part
def _start_message(state: State, index: int, message: int, now_s: float) -> None:
    plan = state.plans[state.exchanges[index].plan]
    made = state.messages[state.patterns[plan.pattern].first_message + message]
    if made.pair == NOWHERE:
        note_arrival(state, index, message)
        return
    size_bytes = made.blocks * plan.block_bytes
    start_flow(state, index, plan.first_flow + made.pair, message, size_bytes, now_s)


@compile_part
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


@compile_part
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


@compile_part
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
            advance_network(state, now_s)
            _hear_of_arrivals(state, now_s)
