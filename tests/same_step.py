"""Comparing two traces of one step in all but times."""

from trioflow.tables import records
from trioflow.trace.store import tensor_bytes

TIMES = ["start_ns", "device_ns", "cpu_ns"]


def assert_same_step(made, captured):
    """Equal in all but times: operators, tensors, identities, facts."""
    for table in ("operators", "tensors"):
        ours, theirs = getattr(made, table), getattr(captured, table)
        assert len(ours) == len(theirs)
        for column in ours.columns.difference([*TIMES, "storage_id", "sequence_number"]):
            differs = [
                (i, a, b) for i, (a, b) in enumerate(zip(ours[column], theirs[column], strict=True)) if str(a) != str(b)
            ]
            assert not differs, (column, differs[:3])
    for table, column in (("tensors", "storage_id"), ("operators", "sequence_number")):
        ours, theirs = (getattr(trace, table)[column] for trace in (made, captured))
        assert in_order(ours) == in_order(theirs), column
    for fact in ("parameters", "buffers", "units", "tensor_split", "flop", "operators"):
        assert getattr(made.facts, fact) == getattr(captured.facts, fact), fact
    assert gradient_facts(made) == gradient_facts(captured)


def in_order(numbers):
    """Number by first appearance: two lists of names for the same things become equal."""
    known = {}
    return [known.setdefault(str(number), len(known)) for number in numbers]


def gradient_facts(trace):
    return [{k: v for k, v in g.items() if "storage" not in k} for g in trace.facts.gradients]


def category_bytes(trace):
    sizes, whole = tensor_bytes(trace), {}
    for row in records(trace.tensors, "tensor_id", "storage_id", "category"):
        key = (row["category"], row["storage_id"])
        whole[key] = max(whole.get(key, 0), sizes[row["tensor_id"]])
    return {
        name: sum(size for (category, _), size in whole.items() if category == name)
        for name in {category for category, _ in whole}
    }
