from pathlib import Path

import pytest
from trioflow.base.errors import InputError, TableError
from trioflow.base.experiments import load_workloads
from trioflow.campaign.items import find_workload_row, load_items
from trioflow.trace.workloads.catalog import CATALOG

ROOT = Path(__file__).parents[3]
HEAD = "order\tkind\titem\tprecisions\tsizes\n"


@pytest.fixture
def items(tmp_path):
    """Items of a small table, by name."""
    rows = "20\tcapture\tnet\tfp32,bf16\t8,2,16\n10\tsweep\tgemm\ttf32,bf16\tcoarse\n30\tcapture\tnet\tfp32\t8,32\n"
    (tmp_path / "campaign.tsv").write_text(HEAD + rows)
    return load_items(tmp_path / "campaign.tsv")


def test_items_come_in_the_table_s_order_each_once(items):
    assert list(items) == [
        *("gemm-tf32-coarse", "gemm-bf16-coarse", "net-fp32-b8", "net-bf16-b8"),
        *("net-fp32-b2", "net-bf16-b2", "net-fp32-b16", "net-bf16-b16", "net-fp32-b32"),
    ]


def test_an_item_runs_before_later_ones_and_behind_all_where_it_failed(items, tmp_path):
    def order():
        return sorted(items, key=lambda name: -items[name].priority(tmp_path))

    assert order() == list(items)
    log = tmp_path / "logs/capture/net-fp32-b8.log"
    log.parent.mkdir(parents=True)
    log.write_text("OutOfMemoryError: CUDA out of memory\n")
    assert order() == [name for name in items if name != "net-fp32-b8"] + ["net-fp32-b8"]
    done = tmp_path / items["net-fp32-b8"].place
    done.parent.mkdir(parents=True)
    done.write_text("{}")
    assert order() == list(items)


def test_a_batch_waits_for_smaller_ones_of_its_own_that_come_first(items):
    smaller = {name: [one.name for one in item.list_smaller(items.values())] for name, item in items.items()}
    assert {name: ones for name, ones in smaller.items() if ones} == {
        "net-fp32-b16": ["net-fp32-b8", "net-fp32-b2"],
        "net-bf16-b16": ["net-bf16-b8", "net-bf16-b2"],
        "net-fp32-b32": ["net-fp32-b8", "net-fp32-b2", "net-fp32-b16"],
    }


def test_a_workload_in_a_precision_is_the_catalogue_s_before_the_project_s_own():
    known = load_workloads(ROOT / "config/workloads.tsv")
    assert known["resnet18"].image_size == 64
    row = find_workload_row("resnet18-bf16", known)
    assert (row.workload, row.model, row.precision, row.image_size) == ("resnet18-bf16", "resnet18", "bf16", 224)
    assert find_workload_row("gpt2-tiny-tf32", known).hidden == 256
    with pytest.raises(InputError, match="no workload 'resnet19'"):
        find_workload_row("resnet19-fp32", known)


@pytest.mark.parametrize(
    "row", ["1\tcapture\tnet\tfp32\tcoarse", "1\tdance\tnet\tfp32\t1", "1\tsweep\tgemm\tfp64\tfine"]
)
def test_a_row_that_cannot_be_measured_is_refused(row, tmp_path):
    (tmp_path / "campaign.tsv").write_text(f"{HEAD}{row}\n")
    with pytest.raises(TableError, match="row 1"):
        load_items(tmp_path / "campaign.tsv")


def test_the_shipped_table_holds_every_workload_that_a_gpu_holds_and_every_sweep():
    sweeps = pytest.importorskip("trioflow.campaign.sweeps", reason="sweeps need torch (extra [capture])")
    items = load_items(ROOT / "config/campaign.tsv").values()
    captured = {item.item for item in items if item.kind == "capture"}
    assert captured == set(load_workloads(CATALOG)) - {"gpt3-175b", "gpt-145b"}
    swept = {(item.item, item.size) for item in items if item.kind == "sweep"}
    levels = {
        (name, key)
        for name, spec in sweeps.OPERATIONS.items()
        for key in ("ceiling", "coarse", "fine", "finest")
        if key in spec
    }
    assert swept == levels
