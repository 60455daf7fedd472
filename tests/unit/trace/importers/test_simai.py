"""Workload files of SimAI, written by hand."""

import re
from dataclasses import replace

import pytest
from trioflow import predict
from trioflow.base.errors import TraceError
from trioflow.cli.main import main
from trioflow.parallel.plan import make_plan
from trioflow.trace.importers.detect import detect_format, import_trace
from trioflow.trace.importers.sources import ImportOptions

SAID = ImportOptions(gpu="NVIDIA A100-SXM4-80GB", batch=4, precision="bf16")
HEAD = "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 2 pp: 1 vpp: 1 ga: 1 all_gpus: 8 checkpoints: 0"
LAYERS = (
    "grad -1 0 NONE 0 0 NONE 0 5000 REDUCESCATTER 1000000 100",
    "block -1 200000 ALLREDUCE 4000000 110000 ALLREDUCE 4000000 100000 NONE 0 100",
    "moe -1 300000 ALLTOALL_EP 2000000 310000 NONE 0 1000 REDUCESCATTER_DP_EP 500000 100",
)


def write(tmp_path, head=HEAD, layers=LAYERS, count=None):
    path = tmp_path / "gpt.txt"
    path.write_text("\n".join([head, str(len(layers) if count is None else count), *layers]) + "\n")
    return path


def test_rank_0_runs_forward_then_backward_and_waits_as_simai_does(tmp_path):
    path = write(tmp_path)
    assert detect_format([path]) == "simai"
    trace = import_trace([path], SAID)
    rows = zip(*(trace.operators[c].tolist() for c in ("name", "phase", "device_ns")), strict=True)
    assert [(name, phase[0], time) for name, phase, time in rows] == [
        ("block", "f", 200_000),
        ("all_reduce", "f", 0),
        ("after a message", "f", 100),
        ("moe", "f", 300_000),
        ("all_to_all", "f", 0),
        ("after a message", "f", 100),
        ("moe", "b", 310_000),
        ("moe", "b", 1000),
        ("reduce_scatter", "b", 0),
        ("block", "b", 110_000),
        ("all_reduce", "b", 0),
        ("after a message", "b", 100),
        ("block", "b", 100_000),
        ("grad", "b", 5000),
        ("reduce_scatter", "b", 0),
        ("after a message", "o", 100),
        ("after a message", "o", 100),
    ]
    sent = [(m["group"], m["ranks"], m["message_bytes"], m["asynchronous"]) for m in trace.facts.communication]
    assert sent == [
        ("TP", [0, 1], 4_000_000, False),
        ("EP", [0, 2], 2_000_000, False),
        ("DP_EP", [0, 4], 500_000, True),
        ("TP", [0, 1], 4_000_000, False),
        ("DP", [0, 2, 4, 6], 1_000_000, True),
    ]
    assert trace.facts.program == {"rank": 0, "world_size": 8, "streams": {}, "waits": [[15, 8], [16, 14]]}
    assert trace.facts.step_time_s == pytest.approx(1_026_500e-9)


def test_the_number_of_ranks_is_a_flag_where_the_file_leaves_it_out(tmp_path):
    whole = import_trace([write(tmp_path)], SAID)
    path = write(tmp_path, HEAD.replace("all_gpus: 8", ""))
    assert import_trace([path], replace(SAID, world_size=8)).facts.program == whole.facts.program
    with pytest.raises(TraceError, match="says world size 8, --world-size says 16"):
        import_trace([write(tmp_path)], replace(SAID, world_size=16))


def test_the_program_runs_on_all_ranks_and_on_no_other_gpu(tmp_path, capsys):
    """The step is its compute and the messages that are awaited; a file without work is tied to its GPU."""
    path = write(tmp_path)
    said = ["--gpu", SAID.gpu, "--batch", "4", "--precision", "bf16", "-o", str(tmp_path / "t")]
    assert main(["import", str(path), *said]) == 0
    assert main(["simulate", str(tmp_path / "t"), "--as-traced", "--platform", "dgx-a100", "--json"]) == 0
    assert '"ranks": 8' in capsys.readouterr().out
    found = predict(str(tmp_path / "t"), make_plan(data=8), "dgx-a100", as_traced=True)
    assert 1.0e-3 < found.step_time_s < 1.0265e-3 + found.communication_s + 1e-9
    capsys.readouterr()
    assert main(["simulate", str(tmp_path / "t"), "--as-traced", "--platform", "dgx-h100"]) == 2
    assert "choose a platform of the GPU that was timed" in capsys.readouterr().err


def test_what_the_file_leaves_out_is_said(tmp_path):
    staged = HEAD.replace("pp: 1", "pp: 4").replace("all_gpus: 8", "all_gpus: 32")
    layers = ["block -1 1 ALLREDUCE 8 1 NONE 0 1 NONE 0 100"]
    warnings = import_trace([write(tmp_path, staged, layers)], SAID).facts.warnings
    assert any("one of 4 pipeline stages" in w and "a lower bound" in w for w in warnings)
    assert any("AICB was run without measuring" in w for w in warnings)


@pytest.mark.parametrize(
    ("head", "layers", "count", "words"),
    [
        (
            HEAD.replace("HYBRID_TRANSFORMER_FWD_IN_BCKWD", "HYBRID_DLRM"),
            LAYERS,
            None,
            "line 1: the loop is HYBRID_DLRM; give",
        ),
        (HEAD.replace("all_gpus: 8", ""), LAYERS, None, "does not say the world size; give it with --world-size"),
        (HEAD.replace("all_gpus: 8", "all_gpus: 9"), LAYERS, None, "line 1: 9 ranks are no whole number of 2 tensor"),
        (HEAD.replace("all_gpus: 8", f"all_gpus: {1 << 30}"), LAYERS, None, "or more than 131072"),
        (HEAD.replace("ep: 2", "ep: 3"), LAYERS, None, "x 3 expert ranks"),
        (
            HEAD.replace("group: 2", "group: two"),
            LAYERS,
            None,
            "column model_parallel_NPU_group: 'two' is not a whole number",
        ),
        (HEAD.replace("group: 2", "group: 0"), LAYERS, None, "8 ranks are no whole number of 0 tensor"),
        (HEAD.replace("checkpoints: 0", "checkpoints: 1 2"), LAYERS, None, "it recomputes layers"),
        (HEAD, LAYERS, 4, "3 layers follow, line 2 says 4; copy or generate"),
        (HEAD, (LAYERS[0][:-4], *LAYERS[1:]), None, "line 3: 11 words, a layer has 12"),
        (
            HEAD,
            [LAYERS[1].replace("ALLREDUCE 4000000 11", "BROADCAST 4000000 11")],
            None,
            "line 3, column forward's message: 'BROADCAST' is not NONE or one of ALLREDUCE",
        ),
        (HEAD, [LAYERS[1].replace("200000", "-1")], None, "line 3, column forward's time: '-1' is not a whole number"),
        (HEAD, [LAYERS[1].replace("200000", "1e5")], None, "'1e5' is not a whole number"),
        (HEAD, [LAYERS[1].replace("4000000", "9" * 18)], None, "forward's bytes"),
        (HEAD, ["x -1 0 NONE 0 0 NONE 0 0 NONE 0 0"], None, "no layer has a time; generate it with times"),
        (HEAD, [], 0, "no layer has a time"),
    ],
)
def test_a_broken_file_is_refused_by_line(tmp_path, head, layers, count, words):
    path = write(tmp_path, head, layers, count)
    with pytest.raises(TraceError, match=re.escape(words)) as caught:
        import_trace([path], SAID)
    assert str(caught.value).startswith(str(path))


def test_no_expert_ranks_and_an_empty_file_are_named(tmp_path):
    path = write(tmp_path, head=HEAD.replace(" ep: 2", " ep: 0"))
    with pytest.raises(TraceError, match=r"line 1: 8 ranks are no whole number of .* 0 expert ranks"):
        import_trace([path], SAID)
    path.write_text("")
    with pytest.raises(TraceError, match="line 1: the loop is nothing; give a file of HYBRID"):
        import_trace([path], SAID, "simai")


@pytest.mark.parametrize("name", ["gpu", "batch", "precision"])
def test_what_the_file_does_not_say_is_asked_for(tmp_path, name):
    said = {"gpu": SAID.gpu, "batch": 4, "precision": "bf16"} | {name: None}
    with pytest.raises(TraceError, match=f"give it with --{name}"):
        import_trace([write(tmp_path)], ImportOptions(**said))
