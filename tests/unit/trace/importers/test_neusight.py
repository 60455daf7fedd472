"""NeuSight's operator tables, from one small enough to check by hand."""

import csv
import json
from math import prod

import pytest
from same_model import ProportionalModel
from trioflow.base.errors import TraceError
from trioflow.costmodel.uncertainty import Anchoring
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.trace.importers.neusight import import_neusight, recognise
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.store import load_trace, save_trace

HEADER = [
    "op",
    "target",
    "_input_nodes",
    "meta",
    "input_shapes",
    "latency",
    "fw_latency",
    "bw_latency",
    "acc_latency",
    "output_shape",
    "dtype",
    "Name",
]
FLOOR, VIEW = 0.007, 0.008
BATCH, LENGTH, WIDTH, WORDS, LAYERS = 2, 4, 6, 50, 3
X = (BATCH, LENGTH, WIDTH)


class Table:
    """Writes rows as NeuSight does: every node with the shapes of what it reads."""

    def __init__(self):
        self.rows, self.shapes = [], {}

    def add(self, op, name, target, inputs, shape, dtype, times, module="", kind=""):
        stack = "{}"
        if module:
            stack = f"{{'nn_module_stack': OrderedDict([('{module}', <class '{kind or 'x.Module'}'>)])}}"
        listed = ", ".join(f"{one}: None" for one in inputs)
        forward, backward, accumulate = times
        self.rows.append(
            [
                op,
                target,
                f"{{{listed}}}",
                stack,
                json.dumps([list(self.shapes[i]) for i in inputs]),
                forward + backward + accumulate,
                forward,
                backward,
                accumulate,
                f"({shape[0]},)" if len(shape) == 1 else str(tuple(shape)),
                dtype,
                name,
            ]
        )
        self.shapes[name] = tuple(shape)

    def value(self, name, target, inputs):
        self.add("call_method", name, target, inputs, (1,), "", (FLOOR, 0.0, 0.0))

    def tensor(self, op, name, target, inputs, shape, times, module="", kind=""):
        self.add(op, name, target, inputs, shape, "torch.float32", times, module, kind)


def small_table(training=True):
    """Embedding, one layer of norm, projection, split and dropout with a shortcut, head."""

    def times(forward, backward=0.0, accumulate=0.0):
        return (forward, backward, accumulate) if training else (forward, 0.0, 0.0)

    nn = "torch.nn.modules"
    table = Table()
    table.add("placeholder", "ids", "ids", [], (BATCH, LENGTH), "torch.int64", (0.0, 0.0, 0.0))
    table.value("size", "size", ["ids"])
    table.add("call_method", "view", "view", ["ids", "size"], (BATCH, LENGTH), "torch.int64", (VIEW, 0.0, 0.0))
    table.tensor("call_module", "words", "words", ["view"], X, times(0.05, 0.3, 0.2), "words", f"{nn}.sparse.Embedding")
    table.tensor(
        "call_module",
        "norm",
        "h.0.norm",
        ["words"],
        X,
        times(0.02, 0.03, 0.02),
        "h.0.norm",
        f"{nn}.normalization.LayerNorm",
    )
    flat = (BATCH * LENGTH, WIDTH)
    table.tensor("call_method", "flat", "view", ["norm"], flat, times(VIEW), "h.0.wide")
    table.tensor("get_attr", "bias", "h.0.wide.bias", [], (2 * WIDTH,), times(0.0), "h.0.wide")
    table.tensor("get_attr", "weight", "h.0.wide.weight", [], (WIDTH, 2 * WIDTH), times(0.0), "h.0.wide")
    wide = (BATCH * LENGTH, 2 * WIDTH)
    table.tensor(
        "call_function",
        "addmm",
        "<built-in method addmm of type object at 0x15>",
        ["bias", "flat", "weight"],
        wide,
        times(0.5, 0.9, 0.04),
        "h.0.wide",
    )
    table.add("call_method", "split", "split", ["addmm"], (1,), "", times(0.012), "h.0")
    for part in ("left", "right"):
        table.tensor("call_function", part, "<built-in function getitem>", ["split"], flat, times(FLOOR), "h.0")
    table.tensor(
        "call_function", "product", "<built-in function mul>", ["left", "right"], flat, times(0.03, 0.06), "h.0"
    )
    table.tensor("call_method", "back", "view", ["product"], X, times(VIEW), "h.0")
    drop = (0.04, 0.05) if training else (0.009, 0.0)
    table.tensor("call_module", "drop", "h.0.drop", ["back"], X, (*drop, 0.0), "h.0.drop", f"{nn}.dropout.Dropout")
    table.tensor("call_function", "sum", "<built-in function add>", ["words", "drop"], X, times(0.015, FLOOR), "h.0")
    out = (BATCH, LENGTH, WORDS)
    table.tensor("call_module", "head", "head", ["sum"], out, times(2.0, 4.0, 0.2), "head", f"{nn}.linear.Linear")
    table.tensor("output", "output", "output", ["head"], out, times(0.0))
    return table


LAYER_MS = {"forward": 0.02 + 0.5 + 0.03 + 0.04 + 0.015, "backward": 0.05 + 0.94 + 0.06 + 0.05}
OUTSIDE_MS = {"forward": 0.05 + 2.0, "backward": 0.5 + 4.2}


def write_table(folder, table, name="tiny-train-4-2", sidecar=None):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([HEADER, *table.rows])
    measured = {"num_layer": LAYERS, "e2e_latency": 10.0, "fw_latency": 4.0, "bwall_latency": 6.0}
    path.with_suffix(".json").write_text(json.dumps(measured if sidecar is None else sidecar))
    return path


@pytest.fixture
def path(tmp_path):
    return write_table(tmp_path / "NVIDIA_H100_80GB_HBM3", small_table())


@pytest.fixture
def trace(path):
    return import_neusight(path, ImportOptions())


@pytest.fixture
def layer(tmp_path):
    """The trace with its layer once."""
    path = write_table(tmp_path / "once" / "NVIDIA_H100", small_table(), sidecar={"num_layer": 1})
    return import_neusight(path, ImportOptions())


def op(trace, name, phase="forward"):
    rows = trace.operators
    return rows[(rows["name"] == name) & (rows["phase"] == phase)].iloc[0]


def phase_ms(trace):
    return (trace.operators.groupby("phase")["device_ns"].sum() / 1e6).to_dict()


def test_a_table_is_recognised_by_its_header(path, tmp_path):
    assert recognise(path)
    assert not recognise(path.with_suffix(".json"))
    assert not recognise(tmp_path)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n")
    assert not recognise(other)


def test_facts_come_from_folder_name_and_sidecar(trace):
    facts = trace.facts
    assert facts.device_name == "NVIDIA H100 80GB HBM3"
    assert (facts.model, facts.mode, facts.batch) == ("tiny", "train", 2)
    assert (facts.precision, facts.optimizer) == ("fp32", "none")
    assert facts.measured_end_to_end_s == 0.010
    assert facts.measured_forward_s == 0.004
    assert facts.measured_backward_s == 0.006
    assert facts.step_time_source == "busy"


def test_the_layer_occurs_as_often_as_the_sidecar_says(trace):
    expected = {p: OUTSIDE_MS[p] + LAYERS * LAYER_MS[p] for p in OUTSIDE_MS}
    assert phase_ms(trace) == pytest.approx(expected, rel=1e-12)
    total_s = sum(expected.values()) / 1e3
    assert trace.facts.step_time_s == pytest.approx(total_s, rel=1e-12)
    assert trace.facts.other["busy_over_measured"] == pytest.approx(total_s / 0.010, rel=1e-9)
    assert any("than the whole model's measured 10 ms" in w for w in trace.facts.warnings)
    assert [u["name"] for u in trace.facts.units] == ["embeddings", "h.0", "h.1", "h.2", "head"]


def test_rows_without_a_kernel_take_no_device_time(trace, layer):
    assert not (trace.operators["name"] == "aten::size").any(), "a size is not a tensor"
    views = trace.operators[trace.operators["name"].isin(["aten::view", "aten::split"])]
    assert len(views) == 1 + 3 * LAYERS
    assert views["device_ns"].sum() == 0
    assert trace.facts.timer_floor_s == FLOOR / 1e3
    per_layer = 2 * VIEW + 0.012 + 2 * FLOOR + FLOOR  # two views, the split, the addition's gradient
    outside = FLOOR + VIEW
    assert layer.facts.other["host_only_s"] == pytest.approx((outside + per_layer) / 1e3)
    assert trace.facts.other["host_only_s"] == pytest.approx((outside + LAYERS * per_layer) / 1e3)


def test_in_inference_dropout_hands_its_input_on(tmp_path):
    folder = tmp_path / "Tesla_V100"
    path = write_table(folder, small_table(training=False), "tiny-inf-4-2", {"num_layer": 1})
    trace = import_neusight(path, ImportOptions())
    assert trace.facts.mode == "inf"
    assert op(trace, "aten::native_dropout")["device_ns"] == 0
    assert op(trace, "aten::native_dropout")["read_bytes"] == 0
    assert set(trace.operators["phase"]) == {"forward"}
    assert trace.facts.gradients == []
    assert not any("gradient" in warning for warning in trace.facts.warnings)
    assert (trace.tensors["category"] == "parameter").sum() == 5


def test_forward_operators_have_aten_names_shapes_and_work(layer):
    assert op(layer, "aten::addmm")["flop"] == 2 * 8 * WIDTH * 2 * WIDTH
    head = op(layer, "aten::linear")
    assert head["input_shapes"] == [list(X), [WORDS, WIDTH]], "tied to the embedding: no bias"
    assert head["flop"] == 2 * 8 * WIDTH * WORDS
    assert op(layer, "aten::embedding")["input_shapes"] == [[WORDS, WIDTH], [BATCH, LENGTH]]
    assert op(layer, "aten::layer_norm")["input_shapes"] == [list(X), [WIDTH], [WIDTH]]
    assert op(layer, "aten::addmm")["module"] == "h.0.wide"
    assert op(layer, "aten::mul")["batch_read_bytes"] == 2 * 4 * 8 * WIDTH


def test_backward_runs_in_reverse_and_finds_its_forward(layer):
    rows = layer.operators[layer.operators["phase"] == "backward"]
    assert rows["name"].tolist() == [
        "aten::linear_backward",
        "aten::add_",
        "aten::native_dropout_backward",
        "aten::mul_backward",
        "aten::addmm_backward",
        "aten::add_",
        "aten::native_layer_norm_backward",
        "aten::add_",
        "aten::embedding_dense_backward",
        "aten::add_",
    ]
    names = layer.operators["name"]
    for row in rows[rows["name"] != "aten::add_"].itertuples():
        base = names[row.forward_op_id].removeprefix("aten::").removeprefix("native_")
        assert base in row.name
    backward = op(layer, "aten::addmm_backward", "backward")
    assert backward["output_shapes"] == [[2 * WIDTH], [8, WIDTH], [WIDTH, 2 * WIDTH]]
    assert backward["flop"] == 2 * op(layer, "aten::addmm")["flop"]
    dropout = op(layer, "aten::native_dropout_backward", "backward")
    storage = layer.tensors["storage_id"]
    head = op(layer, "aten::linear_backward", "backward")
    assert storage[dropout["input_ids"][0]] == storage[head["output_ids"][0]], (
        "the addition in between passes its gradient on"
    )
    assert storage[dropout["input_ids"][1]] == storage[op(layer, "aten::native_dropout")["output_ids"][1]]


def test_accumulation_moves_the_parameters_gradients(layer):
    rows = layer.operators[layer.operators["name"] == "aten::add_"]
    norm = rows.iloc[2]
    assert norm["module"] == "h.0.norm"
    assert (norm["read_bytes"], norm["write_bytes"]) == (2 * 2 * 4 * WIDTH, 2 * 4 * WIDTH)
    assert norm["device_ns"] == 20_000


def test_parameters_and_gradients_are_those_of_the_whole_model(trace):
    shapes = {
        "words.weight": (WORDS, WIDTH),
        **{f"h.{n}.norm.{p}": (WIDTH,) for n in range(LAYERS) for p in ("weight", "bias")},
        **{f"h.{n}.wide.bias": (2 * WIDTH,) for n in range(LAYERS)},
        **{f"h.{n}.wide.weight": (WIDTH, 2 * WIDTH) for n in range(LAYERS)},
    }
    assert {p["name"]: tuple(p["shape"]) for p in trace.facts.parameters} == shapes
    gradients = {g["name"]: g for g in trace.facts.gradients}
    assert {n: g["size_bytes"] for n, g in gradients.items()} == {
        name: 4 * prod(shape) for name, shape in shapes.items()
    }
    ready = gradients["words.weight"]["ready_after_op_id"]
    assert ready == len(trace.operators) - 1, "a tied weight is ready when the embedding is done"


def test_plans_run_on_the_trace(trace, tmp_path):
    save_trace(trace, tmp_path / "saved")
    loaded = load_trace(tmp_path / "saved")
    for way, told in (("none", "step_time_s"), ("timer", "measured_end_to_end_s")):
        single = extrapolate(loaded, named_plan("single", 1), ProportionalModel(), anchoring=Anchoring(way)).tasks
        compute = single[single["kind"] == "compute"]["duration_s"].sum()
        assert compute == pytest.approx(getattr(trace.facts, told), rel=1e-12)
    ddp = extrapolate(loaded, named_plan("ddp", 2), ProportionalModel()).tasks
    mine = ddp[(ddp["rank"] == 0) & (ddp["kind"] == "collective")]
    assert mine["message_bytes"].sum() == sum(g["size_bytes"] for g in trace.facts.gradients)
    pipe = extrapolate(loaded, named_plan("gpipe", 2), ProportionalModel()).tasks
    sent = set(pipe[pipe["kind"] == "send"]["message_bytes"])
    assert sent == {4 * LENGTH * WIDTH}, "one sample's activations between two layers"


def test_the_configuration_beside_the_labels_tells_the_embeddings(tmp_path):
    table = small_table()
    folder = tmp_path / "label" / "NVIDIA_A100"
    path = write_table(folder, table, sidecar={"num_layer": 1})
    config = tmp_path / "data" / "DLmodel_configs" / "tiny.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"vocab_size": 70}')
    trace = import_neusight(path, ImportOptions())
    assert op(trace, "aten::embedding")["input_shapes"][0] == [70, WIDTH]
    assert op(trace, "aten::linear")["input_shapes"][1:] == [[WORDS, WIDTH], [WORDS]], "not tied"
    config.write_text("[]")
    with pytest.raises(TraceError, match=r"tiny.json: not a JSON object"):
        import_neusight(path, ImportOptions())


def test_what_the_path_does_not_say_is_asked_for(tmp_path):
    path = write_table(tmp_path / "downloads", small_table(), "table", {})
    with pytest.raises(TraceError, match=r"does not say the gpu.*--gpu"):
        import_neusight(path, ImportOptions(repeat_layers=2))
    with pytest.raises(TraceError, match=r"does not say the repeat layers.*--repeat-layers"):
        import_neusight(path, ImportOptions(gpu="x"))
    trace = import_neusight(path, ImportOptions(gpu="x", repeat_layers=2))
    assert phase_ms(trace)["forward"] == pytest.approx(OUTSIDE_MS["forward"] + 2 * LAYER_MS["forward"])
    assert trace.facts.mode == "train"
    assert trace.facts.measured_end_to_end_s is None
    with pytest.raises(TraceError, match="says batch 2, --batch says 4"):
        import_neusight(path, ImportOptions(gpu="x", repeat_layers=2, batch=4))


def change(line, column, value):
    """Return a function that sets one cell of a table's rows."""

    def spoil(table):
        table.rows[line - 2][HEADER.index(column)] = value

    return spoil


def drop(line):
    return lambda table: table.rows.pop(line - 2)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (change(5, "op", "call"), "line 5, column op: 'call' is not one of placeholder"),
        (change(5, "target", ""), "line 5, column target: '' is not"),
        (change(5, "Name", "ids"), "line 5, column Name: ids stands on line 2 too"),
        (change(5, "Name", "a b"), "'a b' is not the name of a node"),
        (change(5, "_input_nodes", "view"), "column _input_nodes: 'view' is not a list of nodes"),
        (change(5, "_input_nodes", "{other: None}"), "no row above is node other"),
        (change(5, "input_shapes", "[[2, 5]]"), "node view has shape [2, 4] on line 4, here [2, 5]"),
        (change(5, "input_shapes", "[2, 4]"), "'[2, 4]' is not a list of shapes"),
        (change(5, "input_shapes", "[[2, 4], [1]]"), "2 shapes found for 1 input nodes"),
        (change(5, "output_shape", "2 x 4"), "column output_shape: '2 x 4' is not a shape"),
        (change(5, "output_shape", f"({10**9}, {10**9})"), "more than any device holds"),
        (change(5, "dtype", "torch.int4"), "column dtype: 'torch.int4' is not a known element type"),
        (change(5, "fw_latency", "-0.1"), "line 5, column fw_latency: '-0.1' is not a number"),
        (change(5, "bw_latency", ""), "column bw_latency: '' is not a number"),
        (change(5, "acc_latency", "inf"), "column acc_latency: 'inf' is not a number"),
        (change(5, "meta", "{}"), "column meta: module class (none) is not known here"),
        (change(14, "acc_latency", "0.5"), "node product accumulates gradients, but it has no parameter"),
        (change(6, "meta", "('g.1.norm', <class 'torch.nn.LayerNorm'>)"), "the table holds the layers g.1 and h.0"),
        (change(12, "dtype", ""), "line 12, column dtype: a part of split has no element type"),
        (drop(2), "column _input_nodes: no row above is node ids"),
        (change(2, "output_shape", "(3, 4)"), "node ids has shape [3, 4] on line 2, here [2, 4]"),
    ],
)
def test_bad_rows_are_refused_with_the_place(tmp_path, spoil, words):
    table = small_table()
    spoil(table)
    path = write_table(tmp_path / "NVIDIA_H100", table)
    with pytest.raises(TraceError) as error:
        import_neusight(path, ImportOptions())
    assert words in str(error.value)


def test_bad_files_are_refused(path, tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        import_neusight(tmp_path / "none.csv", ImportOptions())
    renamed = write_table(path.parent, small_table(), "tiny-train-4-8")
    with pytest.raises(TraceError, match="the input has 2 samples, the file's name says 8"):
        import_neusight(renamed, ImportOptions())
    half = write_table(path.parent, small_table(training=False), "half-train-4-2")
    with pytest.raises(TraceError, match="says train, but no row has a gradient's time"):
        import_neusight(half, ImportOptions())
    for text, words in (
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"num_layer": 1.5}', "num_layer: 1.5 is not a number of layers"),
        ('{"num_layer": "36"}', "'36' is not a number from 0 on"),
        ('{"num_layer": 0}', "does not say the repeat layers"),
        ('{"num_layer": 2, "e2e_latency": -1}', "e2e_latency: -1 is not a number from 0 on"),
    ):
        path.with_suffix(".json").write_text(text)
        with pytest.raises(TraceError) as error:
            import_neusight(path, ImportOptions())
        assert words in str(error.value)


def test_a_model_without_numbered_layers_cannot_be_repeated(tmp_path):
    table = small_table()
    for row in table.rows:
        row[1], row[3] = row[1].replace("h.0.", "h."), row[3].replace("h.0", "h")
    path = write_table(tmp_path / "NVIDIA_H100", table)
    with pytest.raises(TraceError, match="no module of the table is a numbered layer"):
        import_neusight(path, ImportOptions())
    path.with_suffix(".json").unlink()
    trace = import_neusight(path, ImportOptions(repeat_layers=1))
    assert phase_ms(trace)["forward"] == pytest.approx(OUTSIDE_MS["forward"] + LAYER_MS["forward"])


def test_a_block_that_ends_in_a_view_follows_itself(tmp_path):
    """A view runs nothing in backward: the gradient has one shape before it and another after."""
    table = small_table()
    flat = (BATCH * LENGTH, WIDTH)
    names = [row[-1] for row in table.rows]
    head = table.rows[names.index("head") :]
    del table.rows[names.index("back") :]
    table.tensor("call_method", "short", "view", ["words"], flat, (VIEW, 0.0, 0.0), "h.0")
    table.tensor(
        "call_function", "sum", "<built-in function add>", ["short", "product"], flat, (0.015, 0.02, 0.0), "h.0"
    )
    table.tensor("call_method", "back", "view", ["sum"], X, (VIEW, 0.0, 0.0), "h.0")
    for row in head:
        row[2] = row[2].replace("sum", "back")
    table.rows += head
    path = write_table(tmp_path / "NVIDIA_H100", table)
    backward_ms = phase_ms(import_neusight(path, ImportOptions()))["backward"]
    layer_ms = LAYER_MS["backward"] - 0.05 + 0.02  # an addition in the place of the dropout
    assert backward_ms == pytest.approx(OUTSIDE_MS["backward"] + LAYERS * layer_ms)
