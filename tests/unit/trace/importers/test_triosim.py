"""TrioSim's CSV pair, from files small enough to check by hand."""

import pytest
from same_model import ProportionalModel
from trioflow.base.errors import TraceError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.importers.triosim import find_arguments, import_triosim, recognise
from trioflow.trace.store import load_trace, save_trace
from triosim_files import NODE, STEPS, TENSOR, TRACE, tensor_rows, trace_rows, write_files, write_rows

OPTIONS = ImportOptions(gpu="NVIDIA H100", precision="tf32")
CONVOLUTION = 2 * 4 * 5 * 8 * 8 * 3 * 3 * 3
LINEAR = 2 * 4 * 320 * 2


@pytest.fixture
def folder(tmp_path):
    return write_files(tmp_path / "small")


@pytest.fixture
def trace(folder):
    return import_triosim(folder, OPTIONS)


def op(trace, name):
    """The first row of an operator."""
    rows = trace.operators[trace.operators["name"].str.endswith(name)]
    return rows.iloc[0]


def test_a_folder_with_both_files_is_recognised(folder, tmp_path):
    assert recognise(folder)
    assert not recognise(tmp_path)
    assert not recognise(folder / "trace.csv")


def test_operators_times_and_facts_are_those_of_the_rows(trace):
    kept = [step for step in STEPS if step[3]]
    assert trace.operators["name"].tolist() == [step[0] for step in kept]
    assert trace.operators["phase"].tolist() == [step[4] for step in kept]
    assert trace.operators["device_ns"].tolist() == [1000 * step[3][1] for step in kept]
    assert trace.facts.busy_s == trace.facts.step_time_s == 113e-6
    assert trace.facts.other["span_s"] == 138e-6
    assert trace.facts.step_time_source == "busy"
    assert trace.facts.span_ns == [1000 * step[3][0] for step in kept]
    assert trace.facts.tp_flagged == [n for n, step in enumerate(kept) if step[5]]
    assert trace.facts.batch == 4
    assert trace.facts.device_name == "NVIDIA H100"
    assert trace.facts.optimizer == "unknown (in trace)"
    assert any("host and idle times are not in the source" in w for w in trace.facts.warnings)


def test_the_time_is_the_one_without_overlap(trace):
    assert op(trace, "conv2d")["device_ns"] == 20_000, "not the 30 us from start to end"


def test_work_of_operators_and_of_autograd_nodes(trace):
    assert op(trace, "conv2d")["flop"] == CONVOLUTION
    assert op(trace, "linear")["flop"] == LINEAR
    # The image wants no gradient, the linear layer's input does.
    assert op(trace, "ConvolutionBackward0")["flop"] == CONVOLUTION
    assert op(trace, "AddmmBackward0")["flop"] == 2 * LINEAR
    assert op(trace, "ReluBackward0")["flop"] == 0


def test_a_node_that_shows_only_a_view_gets_the_tensors_of_its_products(trace):
    row = op(trace, "AddmmBackward0")
    assert row["input_shapes"] == [[4, 2], [4, 320], [2, 320]]
    assert row["output_shapes"] == [[4, 320], [2, 320], [2]]
    assert row["read_bytes"] == 4 * (8 + 1280 + 640)
    assert row["batch_flop"] == row["flop"]
    before = op(trace, "LogSoftmaxBackward0")
    assert row["input_ids"][0] == before["output_ids"][0], "it reads the gradient before it"
    after = op(trace, "ReluBackward0")
    storage = trace.tensors["storage_id"]
    assert storage[row["output_ids"][0]] == storage[after["input_ids"][0]], "and feeds the next"
    assert any("1 backward nodes show only a view" in w for w in trace.facts.warnings)


def test_backward_finds_its_forward(trace):
    names = trace.operators["name"]
    joined = {
        names[row.op_id].rpartition(" ")[2]: names[row.forward_op_id]
        for row in trace.operators.itertuples()
        if row.phase == "backward"
    }
    assert joined == {
        "LogSoftmaxBackward0": "aten::cross_entropy_loss",
        "AddmmBackward0": "aten::linear",
        "ReluBackward0": "aten::relu_",
        "ConvolutionBackward0": "aten::conv2d",
    }


def test_parameters_gradients_and_layers(trace):
    sizes = {g["name"]: g["size_bytes"] for g in trace.facts.gradients}
    assert sizes == {"layers.1.0": 4 * 640, "layers.1.1": 4 * 2, "layers.0.0": 4 * 135}
    assert all(g["gradient_storage_id"] >= 0 for g in trace.facts.gradients)
    assert [unit["name"] for unit in trace.facts.units] == ["layers.0", "layers.1"]
    assert op(trace, "relu_")["module"] == "layers.0"
    categories = trace.tensors.groupby("category")["storage_id"].nunique()
    assert categories["parameter"] == categories["gradient"] == 3
    assert categories["input"] == 3, "image, target, and the gradient that the dropped loss made"


def test_what_only_backward_reads_was_kept_by_forward(trace):
    saved = op(trace, "LogSoftmaxBackward0")["input_ids"][1]
    assert trace.tensors["producer_op_id"][saved] == op(trace, "cross_entropy_loss")["op_id"]


def test_undefined_tensors_have_no_bytes(trace):
    row = op(trace, "ConvolutionBackward0")
    assert row["output_shapes"] == [[], [5, 3, 3, 3], []]
    assert row["write_bytes"] == 4 * 135


@pytest.mark.parametrize("plan", ["single", "ddp", "gpipe"])
def test_plans_run_on_an_imported_trace(trace, plan, tmp_path):
    save_trace(trace, tmp_path / "saved")
    loaded = load_trace(tmp_path / "saved")
    graph = extrapolate(loaded, named_plan(plan, 1 if plan == "single" else 2), ProportionalModel())
    mine = graph.tasks[(graph.tasks["rank"] == 0) & (graph.tasks["kind"] == "compute")]
    if plan == "single":
        assert mine["duration_s"].sum() == pytest.approx(113e-6, rel=1e-12)
    if plan == "ddp":
        reduced = graph.tasks[(graph.tasks["rank"] == 0) & (graph.tasks["kind"] == "collective")]
        assert reduced["message_bytes"].sum() == 4 * (640 + 2 + 135)
    if plan == "gpipe":
        sent = graph.tasks[graph.tasks["kind"] == "send"]["message_bytes"]
        assert set(sent) == {2 * 4 * 320}, "one micro-batch of two samples crosses the cut"


def test_what_the_files_do_not_say_is_asked_for(folder):
    with pytest.raises(TraceError, match=r"does not say the gpu.*--gpu"):
        import_triosim(folder, ImportOptions(precision="tf32"))
    with pytest.raises(TraceError, match=r"does not say the precision.*--precision"):
        import_triosim(folder, ImportOptions(gpu="NVIDIA H100"))
    with pytest.raises(TraceError, match="says batch 4, --batch says 8"):
        import_triosim(folder, ImportOptions(gpu="x", precision="tf32", batch=8))
    with pytest.raises(TraceError, match="no elements of 2 bytes, so its precision is not bf16"):
        import_triosim(folder, ImportOptions(gpu="x", precision="bf16"))


def test_the_batch_is_asked_for_where_no_image_goes_in(tmp_path):
    folder = write_files(tmp_path / "late", STEPS[3:])
    with pytest.raises(TraceError, match=r"does not say the batch.*--batch"):
        import_triosim(folder, OPTIONS)
    trace = import_triosim(folder, ImportOptions(gpu="x", precision="fp32", batch=4))
    assert trace.facts.batch == 4


def test_without_an_optimizer_the_types_tell_the_parameters(tmp_path):
    trace = import_triosim(write_files(tmp_path / "two", STEPS[:-1]), OPTIONS)
    assert trace.facts.optimizer == "none"
    assert sum(g["size_bytes"] for g in trace.facts.gradients) == 4 * (640 + 2 + 135)


def test_an_id_that_stands_for_two_tensors_is_told_apart_by_its_place(tmp_path):
    folder = write_files(tmp_path / "reused")
    rows = tensor_rows()
    # Tensor 54 is renamed to 4, the image's number: freed numbers come back.
    for row in rows[-12:]:
        row[1] = 4 if row[1] == 54 else row[1]
    trace = trace_rows()
    trace[6][3] = "[4]"
    trace[7][2] = "[4; 4; 6]"
    write_rows(folder / "tensor.csv", TENSOR, rows)
    write_rows(folder / "trace.csv", TRACE, trace)
    row = op(import_triosim(folder, OPTIONS), "ConvolutionBackward0")
    assert row["input_shapes"] == [[4, 5, 8, 8], [4, 3, 8, 8], [5, 3, 3, 3]]


def test_a_tensor_table_with_one_row_a_tensor_works_too(tmp_path):
    folder = write_files(tmp_path / "unique")
    rows = {row[1]: row for row in reversed(tensor_rows())}
    write_rows(folder / "tensor.csv", TENSOR, sorted(rows.values(), key=lambda row: row[1]))
    trace = import_triosim(folder, OPTIONS)
    assert op(trace, "ConvolutionBackward0")["flop"] == CONVOLUTION
    assert any("do not stand together in tensor.csv" in w for w in trace.facts.warnings)


def test_the_documented_spellings_are_accepted(tmp_path):
    folder = write_files(tmp_path / "documented")
    header = [title.replace("timenooverlap", "time_nooverlap") for title in TRACE]
    write_rows(folder / "trace.csv", header, trace_rows())
    shorter = [title.replace("Storgeid", "Storageid") for title in TENSOR[1:]]
    write_rows(folder / "tensor.csv", shorter, [row[1:] for row in tensor_rows()])
    assert import_triosim(folder, OPTIONS).facts.busy_s == 113e-6


def change(file, line, column, value):
    """Return a function that writes one cell; line 1 is the header."""

    def write(folder):
        header, rows = (TRACE, trace_rows()) if file == "trace.csv" else (TENSOR, tensor_rows())
        rows[line - 2][header.index(column)] = value
        write_rows(folder / file, header, rows)

    return write


def put(file, text):
    """Return a function that replaces a whole file."""
    content = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / file).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (change("trace.csv", 3, "OperatorID", 1), "trace.csv, line 3, column OperatorID: 1 stands on line 2 too"),
        (change("trace.csv", 3, "OperatorID", "x"), "'x' is not a whole number"),
        (change("trace.csv", 3, "OperatorName", ""), "line 3, column OperatorName: '' is not a name"),
        (change("trace.csv", 3, "Operator_input", "10"), "column Operator_input: '10' is not a list of whole numbers"),
        (change("trace.csv", 3, "Operator_input", "[10; 4]"), "1 sizes found for 2 tensors in Operator_input"),
        (
            change("trace.csv", 3, "Operator_input", "[999]"),
            "line 3, column Operator_input: tensor 999 is not in tensor.csv",
        ),
        (
            change("trace.csv", 3, "OutputSize", "[7]"),
            "column OutputSize: tensor 10 has 1280 elements in tensor.csv, here 7",
        ),
        (
            change("trace.csv", 3, "Operator_cudatimenooverlap", -1),
            "column Operator_cudatimenooverlap: '-1' is not a number",
        ),
        (change("trace.csv", 3, "Operator_cudatime", "nan"), "'nan' is not a number"),
        (change("trace.csv", 3, "Operator_cudatime", 1e12), "is not a number from 0 to 1e+09"),
        (change("trace.csv", 3, "Operator_cudatime", 2), "5 us without overlap is longer than the 2 us"),
        (change("trace.csv", 3, "gpuid", 1), "column gpuid: 1 in a file whose first row has 0"),
        (
            change("trace.csv", 3, "stage", "update"),
            "column stage: 'update' is not one of forward, backward, optimizer",
        ),
        (change("trace.csv", 3, "tpflag", 2), "column tpflag: '2' is not 0 or 1"),
        (change("tensor.csv", 3, "Index", 0), "tensor.csv, line 3, column Index: 0 stands on line 2 too"),
        (change("tensor.csv", 3, "TensorShape", "5x3"), "column TensorShape: '5x3' is not a shape"),
        (change("tensor.csv", 3, "TensorNumElement", 134), "134 elements do not fill the shape"),
        (change("tensor.csv", 3, "TensorNumElement", 1 << 41), "is not a whole number from 0 to"),
        (change("tensor.csv", 3, "TensorEachByte", 0), "column TensorEachByte: elements of 0 bytes"),
        (change("tensor.csv", 3, "TensorEachByte", 3), "column TensorEachByte: '3' is not the size"),
        (change("tensor.csv", 3, "TensorStorgeid", ""), "column TensorStorgeid: '' is not a whole number"),
        (put("trace.csv", ""), "trace.csv: the file is empty"),
        (put("trace.csv", ",".join(TRACE) + "\n"), "a header without rows"),
        (put("trace.csv", "OperatorID,OperatorName\n1,x\n"), "line 1: column Operator_input is missing"),
        (
            put("tensor.csv", ",".join([*TENSOR, "TensorStorageid"]) + "\n1" + ",1" * 8),
            "are the same; leave one of them out",
        ),
        (put("tensor.csv", ",".join(TENSOR) + "\n0,4\n"), "line 2: 2 cells and 8 columns"),
        (put("tensor.csv", ",".join(TENSOR) + '\n0,"4\n'), "line 2: not a comma-separated file"),
        (put("tensor.csv", b"\xff\xfe\x00"), "tensor.csv: not UTF-8"),
        (lambda folder: (folder / "tensor.csv").unlink(), "small: tensor.csv is missing; give the folder with both"),
    ],
)
def test_bad_files_are_refused_with_the_place(folder, spoil, words):
    spoil(folder)
    with pytest.raises(TraceError) as error:
        import_triosim(folder, OPTIONS)
    assert words in str(error.value)


def test_a_trace_without_any_time_is_refused(tmp_path):
    steps = [(*step[:3], (0, 0) if step[3] else None, *step[4:]) for step in STEPS]
    with pytest.raises(TraceError, match="no operator takes any time"):
        import_triosim(write_files(tmp_path / "idle", steps), OPTIONS)


def test_absurd_work_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("trioflow.trace.store.MOST_WORK", CONVOLUTION)
    with pytest.raises(TraceError, match=r"row 0, column flop: .* of 'aten::conv2d' is more than any step"):
        import_triosim(write_files(tmp_path / "huge"), OPTIONS)


A, B = (3, 2), (4,)


@pytest.mark.parametrize(
    ("name", "shapes", "arguments", "written"),
    [
        ("aten::mul", [A, A], [0, 1], set()),
        ("aten::add_", [A, A], [0, 1], {0}),
        ("aten::__and__", [A, A], [0, 1], set()),
        ("aten::_foreach_add_", [A, B, A, B], [0, 0, 1, 1], {0}),
        ("aten::_foreach_mul_", [A, B], [0, 0], {0}),
        ("aten::_foreach_sqrt", [A, B], [0, 0], set()),
        ("aten::_foreach_lerp_", [A, B, A, B], [0, 0, 1, 1], {0}),
        ("aten::_foreach_addcdiv_", [A, B] * 3, [0, 0, 1, 1, 2, 2], {0}),
        ("aten::_fused_adamw_", [A, B] * 4 + [(), ()], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], {0, 2, 3, 4}),
    ],
)
def test_lists_are_told_apart_by_their_shapes(name, shapes, arguments, written):
    assert find_arguments(name, shapes) == (arguments, frozenset(written))


def test_a_lone_operator_is_joined_only_where_it_shares_a_tensor(tmp_path):
    steps = [*STEPS[:5], ("aten::relu", [26], [28], (1, 1), "backward", 0), *STEPS[5:]]
    trace = import_triosim(write_files(tmp_path / "lone", steps), OPTIONS)
    row = trace.operators[trace.operators["phase"] == "backward"].iloc[0]
    assert str(row["forward_op_id"]) == "<NA>"
    assert any("1 backward operators have no forward" in w for w in trace.facts.warnings)


def test_node_names_are_read(trace):
    assert NODE in op(trace, "AddmmBackward0")["name"], "names stay those of the source"


def test_the_two_files_are_their_folder(tmp_path):
    folder = write_files(tmp_path / "two", STEPS)
    files = [folder / "tensor.csv", folder / "trace.csv"]
    for sources in (files, files[:1], [folder]):
        assert import_trace(sources, OPTIONS).facts.source == "TrioSim"
