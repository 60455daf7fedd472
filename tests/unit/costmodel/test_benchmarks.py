"""Single operators of NeuSight's layout."""

import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.operators.class_curves import sized_rows
from trioflow_evaluation.fits.operators import DATASET, load_benchmarks

DEVICE = "Tesla V100-PCIE-32GB"
CONV = (
    "OPName,Latency,Device,B,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding\n"
)


def write(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / DATASET / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_shapes_and_times(tmp_path):
    folder = write(
        tmp_path,
        {
            "test/linear.csv": "OPName,Latency,Device,B,M,N,K\n"
            f"linear,0.5,{DEVICE},1,8,16,32\nlinear,0.7,{DEVICE},1,8,16,32\n"
            "linear,9,another,1,8,16,32\n",
            "test/elem.csv": f"OPName,Latency,Device,B,H\naddu,0.1,{DEVICE},4,5\n"
            f"add,0.2,{DEVICE},4,5\n",
            f"train/collect/conv/p2.1.0/{DEVICE}.csv": CONV
            + f"conv,1,{DEVICE},2,3,8,3,7,2,1\nconv,1,{DEVICE},2,3,8,3,7,1,0\n",
        },
    )
    found = load_benchmarks(folder, DEVICE).set_index("name", append=True)
    assert found["part"].tolist() == ["train", "train", "test", "test", "test"]
    linear = found.xs("aten::linear", level=1).iloc[0]
    assert linear["device_ns"] == 600_000, "the median of the repeats"
    assert linear["input_shapes"] == [[8, 16], [32, 16], [32]], "N is the length of the sum"
    assert linear["flop"] == 2 * 8 * 16 * 32
    shapes = found.xs("aten::add", level=1)["input_shapes"].tolist()
    assert sorted(map(len, shapes)) == [1, 2]
    outputs = found.xs("aten::conv2d", level=1)["output_shapes"].tolist()
    assert outputs == [[[2, 8, 5, 5]], [[2, 8, 4, 4]]]
    rows = sized_rows(found.reset_index("name"), products=True)
    assert (rows["product_batch"] > 0).sum() == 3


def test_a_file_that_the_catalogue_does_not_name_is_not_read(tmp_path):
    text = "OPName,Latency,Device,B,H\nadd,1,NVIDIA L4,1,1\n"
    folder = write(tmp_path, {"train/collect/add/p2.1.0/NVIDIA L4.csv": text})
    assert load_benchmarks(folder, "NVIDIA L4").empty


def test_a_device_without_rows(tmp_path):
    folder = write(tmp_path, {"test/elem.csv": "OPName,Latency,Device,B,H\nadd,1,x,1,1\n"})
    assert load_benchmarks(folder, DEVICE).empty


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("OPName,Latency,Device,B\nadd,1,x,1\n", "'?H'? is missing"),
        (f"OPName,Latency,Device,B,H\nadd,0,{DEVICE},1,1\n", "line 2"),
        (f"OPName,Latency,Device,B,H\nadd,1,{DEVICE},1,wide\n", "line 2"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_benchmarks(write(tmp_path, {"test/elem.csv": text}), DEVICE)
