"""Calls come in order of time, then of priority, then as they were scheduled, however far off they are."""

import heapq

from hypothesis import example, given
from hypothesis import strategies as st

from rackplan.simulator.clock import FAR_NS, LAST, NEVER, Clock

Call = tuple[int, int, list[int]]
"""Delay, ns, priority, and the delays of what it schedules."""
DELAYS_NS = st.sampled_from([0, 1, FAR_NS, FAR_NS + 1, FAR_NS + 2, 2 * FAR_NS, 2 * FAR_NS + 1, 5 * FAR_NS])
CALLS = st.lists(st.tuples(DELAYS_NS, st.sampled_from([1, LAST]), st.lists(DELAYS_NS, max_size=2)), max_size=8)


def in_one_queue(calls: list[Call]) -> list[tuple[int, int]]:
    """(time, place in the order of scheduling) of each call as it comes, from one sorted queue."""
    queue = [(delay_ns, priority, place, follow) for place, (delay_ns, priority, follow) in enumerate(calls)]
    heapq.heapify(queue)
    came, scheduled = [], len(calls)
    while queue:
        at_ns, _, place, follow = heapq.heappop(queue)
        came.append((at_ns, place))
        for delay_ns in follow:
            heapq.heappush(queue, (at_ns + delay_ns, 1, scheduled, []))
            scheduled += 1
    return came


@given(CALLS)
@example([(5 * FAR_NS, 1, []), (2 * FAR_NS, 1, [])])  # the one that comes first is scheduled later
@example([(FAR_NS, 1, [1]), (FAR_NS + 1, 1, [])])  # the near one is scheduled later and comes at the same time
def test_calls_come_in_order_near_or_far(calls: list[Call]) -> None:
    clock, came, scheduled = Clock(), [], 0

    def call(own: tuple[int, list[int]]) -> None:
        place, follow = own
        assert clock.now_ns == clock.now
        came.append((clock.now_ns, place))
        for delay_ns in follow:
            schedule(delay_ns, 1, [])

    def schedule(delay_ns: int, priority: int, follow: list[int]) -> None:
        nonlocal scheduled
        clock.after(delay_ns, call, (scheduled, follow), priority)
        scheduled += 1

    for one in calls:
        schedule(*one)
    soonest_ns = min((delay_ns for delay_ns, *_ in calls), default=NEVER)
    assert clock.next_ns == soonest_ns if soonest_ns <= FAR_NS else clock.next_ns <= soonest_ns
    clock.run(until=11 * FAR_NS)
    assert came == in_one_queue(calls)


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=6))
def test_what_is_scheduled_late_at_its_place_comes_as_if_scheduled_at_once(calls: list[tuple[int, bool]]) -> None:
    def order(late: bool) -> list[int]:
        clock, came = Clock(), []
        waiting = []
        for number, (time_ns, waits) in enumerate(calls):
            if waits and late:
                waiting.append((time_ns, clock.next_place(), number))
            else:
                clock.after(time_ns, came.append, number)
        for time_ns, place, number in waiting:
            clock.at(time_ns, place, came.append, number)
        clock.run(until=10)
        return came

    assert order(late=True) == order(late=False)
