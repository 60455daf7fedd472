"""Parameters: the plans they give, and that the table of results holds every one."""

import pytest
from trioflow import tables
from trioflow.base.errors import PlanError
from trioflow.parallel.plan import BUCKET_BYTES, FIRST_BUCKET_BYTES, make_plan
from trioflow.sweeps.description import PARAMETERS, fill_values, resolve_batch, resolve_plan


def test_every_parameter_is_a_column_of_its_type() -> None:
    types = {"integer": tables.INT, "number": tables.FLOAT, "string": tables.TEXT}
    for name, entry in PARAMETERS.items():
        field = tables.SWEEP_RESULTS.field(name)
        assert entry["type"] == "boolean" or field.type == types[entry["type"]], name
        assert not field.nullable, name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, make_plan()),
        ({"ranks": 8}, make_plan(data=8)),
        ({"ranks": 8, "tensor": 2, "pipeline": 2}, make_plan(2, 2, 2)),
        ({"data": 4, "sharding": "fsdp"}, make_plan(4, sharding="fsdp")),
        ({"pipeline": 4, "schedule": "1f1b", "micro_batches": 8}, make_plan(1, 1, 4, "1f1b", 8)),
        ({"schedule": "1f1b", "data": 2}, make_plan(2)),
    ],
)
def test_values_give_the_plan_of_the_command_line(
    given: dict[str, object], expected: object
) -> None:
    assert resolve_plan(fill_values(given)) == expected


def test_pytorch_gives_its_first_bucket_a_limit_that_is_given() -> None:
    plan = resolve_plan(fill_values({"data": 2}))
    assert (plan.first_bucket_bytes, plan.bucket_bytes) == (FIRST_BUCKET_BYTES, BUCKET_BYTES)
    plan = resolve_plan(fill_values({"data": 2, "bucket_bytes": 1000}))
    assert (plan.first_bucket_bytes, plan.bucket_bytes) == (1000, 1000)
    plan = resolve_plan(fill_values({"data": 2, "bucket_bytes": 1000, "first_bucket_bytes": 10}))
    assert (plan.first_bucket_bytes, plan.bucket_bytes) == (10, 1000)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 6, "tensor": 4}, "6 ranks are not 4 tensor"),
        ({"ranks": 8, "data": 2, "tensor": 2}, "8 ranks are not 2 data x 2 tensor"),
        ({"data": 1, "sharding": "fsdp"}, "fsdp on one rank"),
    ],
)
def test_degrees_that_do_not_fit_are_told(given: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        resolve_plan(fill_values(given))


def test_a_batch_is_given_or_that_of_every_replica() -> None:
    plan = make_plan(data=4)
    assert resolve_batch(fill_values({}), plan, 8) == 32
    assert resolve_batch(fill_values({"samples": 3}), plan, 8) == 12
    assert resolve_batch(fill_values({"samples": 3, "batch": 20}), plan, 8) == 20
