import pytest
from trioflow.base.errors import InputError
from trioflow.campaign.items import (
    OPERATIONS,
    list_items,
    list_points,
    read_rows,
)

from .conftest import HUGE, TINY, write_table


def test_the_order_is_ceilings_then_every_workload_once_then_coarse_sweeps(tmp_path):
    second = ["other", *TINY[1:]]
    rows = read_rows(write_table(tmp_path / "t.tsv", TINY, second))
    items = list_items(rows)
    kinds = [item.kind for item in items]
    first_sweep = kinds.index("sweep")
    ceilings = kinds.count("ceiling")
    assert set(kinds[:ceilings]) == {"ceiling"} and items[0].name == "ceiling-device_copy"
    assert [i.name for i in items[ceilings:first_sweep]] == ["tiny-b4-fp32", "other-b4-fp32"]
    assert [item.position for item in items] == list(range(len(items)))
    assert len({item.name for item in items}) == len(items)
    place = {item.name: item.position for item in items}
    gemm = [place[f"sweep-gemm-bf16-{level}-0"] for level in (0, 1, 2)]
    assert gemm == sorted(gemm)
    assert place["tiny-b2-fp32"] > place["sweep-gemm-bf16-1-0"], "sweeps before further batches"
    assert place["tiny-b4-bf16"] < place["tiny-b2-bf16"]
    assert place["sweep-layer_norm-fp32-0-0"] < place["sweep-gemm-fp32-1-0"], "all coarse first"


def test_batches_are_the_rows_own_then_those_of_all_workloads(tmp_path):
    items = list_items(read_rows(write_table(tmp_path / "t.tsv", TINY)))
    own = [i for i in items if i.kind == "workload" and i.name.endswith("fp32")]
    assert [i.arguments["batch"] for i in own] == [4, 2, 128, 256, 32, 64, 8, 16]
    assert own[2].estimate_s == 32 * own[0].estimate_s, "of 128 samples instead of 4"


def test_every_precision_of_the_brief_is_listed(tmp_path):
    items = list_items(read_rows(write_table(tmp_path / "t.tsv", TINY)))
    found = {i.arguments["precision"] for i in items if i.arguments.get("operation") == "conv2d"}
    assert found == {"fp32", "tf32", "bf16", "fp16"}
    workloads = {i.arguments["row"]["precision"] for i in items if i.kind == "workload"}
    assert workloads == {"fp32", "tf32", "bf16", "fp16"}


def test_levels_of_a_sweep_do_not_overlap_and_none_is_empty():
    for operation in OPERATIONS:
        levels = [list_points(operation, n) for n in range(len(OPERATIONS[operation]["levels"]))]
        assert len(OPERATIONS[operation]["priorities"]) == len(levels)
        points = [str(sorted(p.items())) for level in levels for p in level]
        assert all(levels), operation
        assert len(set(points)) == len(points), operation
        assert list_points(operation, 0, quick=True)


def test_the_default_table_is_one_that_ships():
    rows = read_rows()
    assert {"vgg11", "resnet18"} <= {row["workload"] for row in rows}
    assert all(isinstance(batch, int) for row in rows for batch in row["batches"])


@pytest.mark.parametrize("cell", ["", "0", "4,x"])
def test_a_row_without_batches_is_refused(tmp_path, cell):
    row = [*HUGE]
    row[3] = cell
    with pytest.raises(InputError, match=r"line 2, batches: .* are not batch sizes"):
        read_rows(write_table(tmp_path / "t.tsv", row))


def test_a_workload_listed_twice_is_refused(tmp_path):
    rows = read_rows(write_table(tmp_path / "t.tsv", TINY, TINY))
    with pytest.raises(InputError, match="tiny-b4-fp32 is listed twice"):
        list_items(rows)


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(tmp_path / "none.tsv")
