"""A small trace in TrioSim's format, written by hand: a convolution and a linear layer, one step."""

import csv
from pathlib import Path

TRACE = [
    "OperatorID",
    "OperatorName",
    "Operator_input",
    "Operator_output",
    "Operator_cudatime",
    "Operator_cudatimenooverlap",
    "InputSize",
    "OutputSize",
    "gpuid",
    "stage",
    "tpflag",
]
TENSOR = [
    "Index",
    "TensorID",
    "TensorShape",
    "TensorNumElement",
    "TensorEachByte",
    "TensorType",
    "TensorStorgeid",
    "gpuid",
]
NODE = "autograd::engine::evaluate_function: "

# Tensor: shape, element bytes, storage. Views share a storage; the gradients of the linear layer
# (40, 42, 44) are returned by no row: only operators without device time show them.
TENSORS: dict[int, tuple[list[int], int, int]] = {
    4: ([4, 3, 8, 8], 4, 5),
    6: ([5, 3, 3, 3], 4, 7),
    10: ([4, 5, 8, 8], 4, 11),
    12: ([4, 320], 4, 11),
    14: ([2, 320], 4, 15),
    16: ([2], 4, 17),
    20: ([4, 2], 4, 21),
    22: ([4], 8, 23),
    24: ([], 4, 25),
    26: ([4, 2], 4, 27),
    28: ([4, 2], 4, 29),
    30: ([4, 2], 4, 31),
    32: ([320, 2], 4, 15),
    33: ([2, 320], 4, 15),
    40: ([2], 4, 41),
    42: ([2, 320], 4, 43),
    44: ([4, 320], 4, 45),
    46: ([4, 5, 8, 8], 4, 45),
    52: ([4, 5, 8, 8], 4, 11),
    54: ([4, 5, 8, 8], 4, 55),
    9: ([], 0, 0),
    58: ([5, 3, 3, 3], 4, 59),
}

# Name, inputs, outputs, both times [us], phase, split; without times an operator stands in
# tensor.csv only.
Step = tuple[str, list[int], list[int], tuple[int, int] | None, str, int]
STEPS: list[Step] = [
    ("aten::conv2d", [4, 6], [10], (30, 20), "forward", 1),
    ("aten::relu_", [10], [10], (5, 5), "forward", 0),
    ("aten::flatten", [10], [12], None, "forward", 0),
    ("aten::linear", [12, 14, 16], [20], (12, 12), "forward", 1),
    ("aten::cross_entropy_loss", [20, 22], [24], (9, 4), "forward", 0),
    (NODE + "LogSoftmaxBackward0", [26, 28], [30], (3, 3), "backward", 0),
    (NODE + "AddmmBackward0", [32], [33], (25, 22), "backward", 1),
    ("aten::detach", [40], [40], None, "backward", 0),
    ("aten::detach", [42], [42], None, "backward", 0),
    ("aten::view", [44], [46], None, "backward", 0),
    (NODE + "ReluBackward0", [46, 52], [54], (6, 6), "backward", 0),
    (NODE + "ConvolutionBackward0", [54, 4, 6], [9, 58, 9], (40, 33), "backward", 1),
    ("aten::_foreach_add_", [6, 14, 16, 58, 42, 40], [], (8, 8), "optimizer", 0),
]

TYPES = {6: "weight", 14: "weight", 16: "bias=None", 22: "target", 26: "grad_output"}


def elements(tensor: int) -> int:
    shape, elem_bytes, _ = TENSORS[tensor]
    count = 1
    for size in shape:
        count *= size
    return count if elem_bytes else 0


def text(numbers: list[int]) -> str:
    return f"[{'; '.join(map(str, numbers))}]"


def trace_rows(steps: list[Step] = STEPS) -> list[list[object]]:
    rows: list[list[object]] = []
    for number, (name, inputs, outputs, times, phase, split) in enumerate(steps, start=1):
        if times:
            sizes = [text([elements(i) for i in ids]) for ids in (inputs, outputs)]
            rows.append([number, name, text(inputs), text(outputs), *times, *sizes, 0, phase, split])
    return rows


def tensor_rows(steps: list[Step] = STEPS) -> list[list[object]]:
    rows: list[list[object]] = []
    for _, inputs, outputs, *_ in steps:
        uses = [(i, TYPES.get(i, "input")) for i in inputs] + [(i, "output") for i in outputs]
        for tensor, kind in uses:
            shape, elem_bytes, storage = TENSORS[tensor]
            rows.append([len(rows), tensor, shape, elements(tensor), elem_bytes, kind, storage, 0])
    return rows


def write_rows(path: Path, header: list[str], rows: list[list[object]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_files(folder: Path, steps: list[Step] = STEPS) -> Path:
    """Write both files into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "trace.csv", TRACE, trace_rows(steps))
    write_rows(folder / "tensor.csv", TENSOR, tensor_rows(steps))
    return folder
