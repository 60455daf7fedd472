"""The command, as a user types it: answers on stdout, errors in one sentence with status 2."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trioflow import __version__
from trioflow.cli import main
from trioflow.cli.main import spare_threads
from trioflow.cli.traces import SHIPPED_WORKLOADS
from trioflow.costmodel.operators.model import SHIPPED_MODELS
from trioflow.trace.store import save_trace, shipped_traces

TRACE = "gpt2-tiny-b8"
PLATFORM = "cpu2-gloo"
STEP = ["simulate", TRACE, "--platform", PLATFORM]
PIPELINE = [*STEP, "--pipeline-parallel", "2", "--schedule"]
CLONE = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *words):
    status = main([str(word) for word in words])
    told = capsys.readouterr()
    return status, told.out, told.err


def answer(capsys, *words):
    status, out, err = run(capsys, *words, "--json")
    assert status == 0, err
    return json.loads(out)


def refuse(capsys, *words):
    status, out, err = run(capsys, *words)
    assert status == 2 and out == ""
    assert err.startswith("trioflow: ") and err.count("\n") == 1
    return err


def test_the_quick_start_answers(capsys):
    assert TRACE in shipped_traces()
    status, out, err = run(
        capsys, "simulate", TRACE, "--plan", "ddp", "--ranks", "2", "--platform", PLATFORM
    )
    assert status == 0 and err == ""
    assert out.startswith("gpt2-tiny on cpu2-gloo: 2 ranks = 2 data, 8 samples a rank")
    for words in ("step time", "80 % interval", "peak memory", "likely to fit", "exposed"):
        assert words in out


def test_single_rank_at_the_traced_batch_is_the_recorded_step(capsys):
    told = answer(capsys, "simulate", TRACE, "--platform", PLATFORM)
    shown = answer(capsys, "show", TRACE)
    assert told["step_time_s"] == pytest.approx(shown["step_time_s"], rel=1e-4)
    assert told["confidence"] == "measured"
    assert told["communication_s"] == 0


def test_degrees_and_names_give_the_same_plan(capsys):
    for name, words in (("tp-layers", ()), ("tp", ("--vocabulary-parallel",))):
        named = answer(
            capsys, "simulate", TRACE, "--plan", name, "--ranks", 2, "--platform", PLATFORM
        )
        degrees = answer(
            capsys, "simulate", TRACE, "--tensor-parallel", 2, *words, "--platform", PLATFORM
        )
        assert named["step_time_s"] == degrees["step_time_s"]
        told = {"tp": "vocabulary parallel", "tp-layers": "embedding and head whole on each rank"}
        assert named["plan_text"].endswith(told[name])


def test_a_larger_batch_takes_longer_but_not_in_proportion(capsys):
    one = answer(capsys, "simulate", TRACE, "--platform", PLATFORM)
    four = answer(capsys, "simulate", TRACE, "--batch", 32, "--platform", PLATFORM)
    assert one["step_time_s"] < four["step_time_s"] < 4 * one["step_time_s"]
    assert four["confidence"] in ("interpolated", "extrapolated")


def test_a_trace_of_another_device_is_priced_by_the_gpu_s_model(capsys):
    told = answer(
        capsys, "simulate", TRACE, "--plan", "ddp", "--ranks", 2, "--platform", "a40x2-pcie"
    )
    assert told["step_time_s"] < 0.1
    assert any("those of a processor" in warning for warning in told["warnings"])
    assert any("no measured collectives" in warning for warning in told["warnings"])


def test_a_model_of_another_device_is_said_to_be_one(capsys):
    model = SHIPPED_MODELS / PLATFORM / "operators.json"
    content = json.loads(model.read_text()) | {"device_name": "another"}
    Path("other.json").write_text(json.dumps(content))
    told = answer(capsys, "simulate", TRACE, "--platform", PLATFORM, "--cost-model", "other.json")
    assert told["confidence"] == "uncalibrated"
    assert any("no cost model of" in warning for warning in told["warnings"])


def test_given_operator_times_replace_recorded_ones(capsys):
    before = answer(capsys, "simulate", TRACE, "--platform", PLATFORM)
    assert main(["show", TRACE, "--operators"]) == 0
    printed = capsys.readouterr().out
    Path("times.csv").write_text(printed)
    same = answer(capsys, "simulate", TRACE, "--platform", PLATFORM, "--override", "times.csv")
    assert same["step_time_s"] == pytest.approx(before["step_time_s"], rel=1e-4)
    name = printed.splitlines()[1].split(",")[0]
    Path("times.csv").write_text(f"name,time_us\n{name},900000\n")
    told = answer(capsys, "simulate", TRACE, "--platform", PLATFORM, "--override", "times.csv")
    assert told["step_time_s"] > before["step_time_s"]
    assert told["confidence"] == "uncalibrated"
    assert any("have times from times.csv" in warning for warning in told["warnings"])
    Path("times.csv").write_text("name,time_us\nnothing,1\n")
    err = refuse(capsys, "simulate", TRACE, "--platform", PLATFORM, "--override", "times.csv")
    assert "times.csv" in err and "line 2" in err


def test_fit_writes_a_model_that_simulate_takes(capsys, tmp_path):
    status, out, _ = run(capsys, "fit", TRACE, "-o", "model.json")
    assert status == 0 and "held-out" in out
    told = answer(
        capsys,
        "simulate",
        TRACE,
        "--batch",
        4,
        "--platform",
        PLATFORM,
        "--cost-model",
        "model.json",
    )
    assert told["cost_model"].startswith("model.json")


def test_timelines_are_written_in_the_asked_form(capsys):
    for name in ("t.parquet", "t.json", "t.json.gz"):
        words = ["simulate", TRACE, "--plan", "ddp", "--ranks", "2", "--platform", PLATFORM]
        assert run(capsys, *words, "--timeline", name)[0] == 0
    timeline = pd.read_parquet("t.parquet")
    told = answer(capsys, "simulate", TRACE, "--plan", "ddp", "--ranks", 2, "--platform", PLATFORM)
    assert timeline["end_s"].max() == pytest.approx(told["step_time_s"])
    assert len(json.loads(Path("t.json").read_text())["traceEvents"]) > len(timeline)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate", "nowhere", "--platform", PLATFORM], "no trace here"),
        ([*STEP, "--network", "wires"], "no network is called 'wires'"),
        ([*STEP, "--plan", "ddp", "--ranks", "2", "--accumulate", "2"], "both given"),
        (["simulate", TRACE, "--platform", "cpu2-glo"], "did you mean cpu2-gloo"),
        (["show", "llama-3.1-8"], "did you mean llama-3.1-8b?"),
        (["simualte", TRACE], "no command is called 'simualte'; did you mean simulate?"),
        (
            ["simulate", TRACE, "--platform", PLATFORM, "--cost-model", "cpu2-glo"],
            "did you mean cpu2-gloo",
        ),
        (
            ["collective", "allreduce", "--bytes", "9", "--ranks", "2", "--platform", PLATFORM],
            "did you mean all_reduce",
        ),
        (["capture", "resnet81", "--batch", "1", "-o", "out"], "did you mean resnet18"),
        (["simulate", TRACE, "--platform", PLATFORM, "--plan", "ddp"], "needs --ranks"),
        (
            [
                "simulate",
                TRACE,
                "--platform",
                PLATFORM,
                "--plan",
                "ddp",
                "--ranks",
                "2",
                "--batch",
                "3",
            ],
            "does not divide",
        ),
        (["simulate", TRACE, "--platform", PLATFORM, "--plan", "ddp", "--ranks", "3"], "3 ranks"),
        (["simulate", TRACE, "--platform", PLATFORM, "--ranks", "2"], "without a plan"),
        (
            ["simulate", TRACE, "--platform", PLATFORM, "--data-parallel", "2", "--ranks", "4"],
            "is not the product",
        ),
        (
            [
                "simulate",
                TRACE,
                "--platform",
                PLATFORM,
                "--plan",
                "tp",
                "--ranks",
                "2",
                "--data-parallel",
                "2",
            ],
            "both given",
        ),
        (["simulate", TRACE, "--platform", PLATFORM, "--timeline", "t.png"], "unknown ending"),
        ([*STEP, "--timeline", ""], "unknown ending"),
        ([*PIPELINE, "gpipe-recomp"], "did you mean gpipe-recompute?"),
        ([*PIPELINE, "gpipe-recompute", "--stages-per-rank", "2"], "this schedule has 1"),
        (["simulate", TRACE, "--platform", PLATFORM, "--batch", "0"], "batch 0"),
        (["simulate", TRACE, "--platform", "this-machine"], "make reproduce"),
        (["simulate", TRACE, "--platform", "mine.yaml"], "no such file"),
        (
            ["collective", "all_reduce", "--bytes", "0", "--ranks", "2", "--platform", PLATFORM],
            "--bytes of 1 to",
        ),
        (
            ["collective", "all_reduce", "--bytes", "nan", "--ranks", "2", "--platform", PLATFORM],
            "--bytes of 1 to",
        ),
        (
            ["simulate", TRACE, "--platform", PLATFORM, "--timeline", "no/where.json"],
            "no folder no",
        ),
        (["simulate", TRACE, "--platform", "/"], "cannot be read"),
        (["simulate", TRACE, "--platform", PLATFORM, "--cost-model", "/"], "cannot be read"),
        (
            ["collective", "all_gossip", "--bytes", "9", "--ranks", "2", "--platform", PLATFORM],
            "all_gossip",
        ),
        (["show", "nowhere"], "no language model is known by this name"),
        (["import", "nowhere", "-o", "out"], "no such file"),
        (["capture", "gpt9", "--batch", "1", "-o", "out"], "no workload 'gpt9'"),
        (["capture", "resnet18", "--batch", "1", "--sequence", "8", "-o", "out"], "has none"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(capsys, tmp_path, words, said):
    assert said in refuse(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_what_is_here_and_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIOFLOW_DATA_MIRROR", str(tmp_path / "gone"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    own = ["numpy>=2.1", 'gone>=1; extra == "report"', 'trioflow[report]; extra == "workflow"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: own)
    found = answer(capsys, "doctor")
    assert found["trioflow"].startswith(__version__)
    assert found["public data"].endswith("gone: no such folder")
    assert found["kept traces"].endswith("traces, empty") and "none that nvidia-smi" in found["GPU"]
    packages = f"numpy {np.__version__}, gone missing (install it: run make in {CLONE}, or pip install '{CLONE}[report]')"
    assert found["packages"] == packages
    assert found["models"].startswith("torchvision's and transformers' can be captured")
    status, out, _ = run(capsys, "doctor")
    assert status == 0 and {line.split("  ")[0] for line in out.splitlines()} == found.keys()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert answer(capsys, "doctor")["GPU"] == "NVIDIA H200, 570.1"


def test_a_model_without_layers_to_split_is_refused(capsys, cnn_trace):
    save_trace(cnn_trace, "cnn")
    said = refuse(capsys, "simulate", "cnn", "--plan", "tp", "--ranks", 2, "--platform", PLATFORM)
    assert "no layers that a tensor split cuts" in said


def test_import_makes_what_capture_made(capsys, raw_transformer):
    status, out, _ = run(capsys, "import", raw_transformer, "-o", "trace")
    assert status == 0 and "trioflow show" in out
    assert answer(capsys, "show", "trace")["workload"] == "test-transformer"


@pytest.mark.slow
def test_capture_from_the_command_line(capsys):
    pytest.importorskip("torch")
    status, out, _ = run(
        capsys, "capture", "gpt2-tiny", "--batch", "1", "--sequence", "16", "-o", "mine"
    )
    assert status == 0 and "next: trioflow show mine" in out
    assert answer(capsys, "show", "mine")["batch"] == 1


def test_a_broken_shipped_file_cannot_pass_unseen():
    assert (SHIPPED_MODELS / PLATFORM / "operators.json").exists()
    assert (SHIPPED_MODELS / PLATFORM / "collectives.json").exists()
    assert SHIPPED_WORKLOADS.exists()


def test_the_shipped_workloads_are_the_configured_ones(request):
    configured = request.config.rootpath / "config" / "workloads.tsv"
    assert SHIPPED_WORKLOADS.read_bytes() == configured.read_bytes()


def test_the_console_script_reports_bad_input_with_status_2(tmp_path):
    script = shutil.which("trioflow", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the console script is not installed beside this Python")
    done = subprocess.run([script, "show", "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_the_step_is_broken_down(capsys):
    words = ("simulate", TRACE, "--platform", PLATFORM, "--pipeline-parallel", 2)
    status, out, _ = run(capsys, *words, "--by", "stage")
    assert status == 0
    table = out.split("\n\n")[1].splitlines()
    assert table[0].startswith("stage") and "idle" in table[0]
    assert [line.split()[0] for line in table[2:]] == ["0", "1"]
    told = answer(capsys, *words, "--by", "module", "--depth", 1, "--breakdown", "modules.parquet")
    assert {row["name"] for row in told["breakdown"]} >= {"embedding", "blocks", "head"}
    assert len(pd.read_parquet("modules.parquet")) == len(told["breakdown"])
    assert "without --by" in refuse(capsys, *words, "--breakdown", "modules.parquet")
    assert "--depth 0" in refuse(capsys, *words, "--by", "module", "--depth", 0)
    assert "use .parquet" in refuse(capsys, *words, "--by", "rank", "--breakdown", "m.csv")


def test_communication_of_the_busiest_rank_and_of_all_are_told_apart(capsys):
    """A late rank hides its messages behind its work; the others wait for them, which is no part of its time."""
    words = (
        "simulate",
        "llama-3.2-1b",
        "--sequence",
        512,
        "--plan",
        "zero1",
        "--ranks",
        4,
        "--platform",
        "dgx-h100",
    )
    main([str(word) for word in (*words, "--slow-rank", 3, 2)])
    printed = capsys.readouterr().out
    assert " exposed, on that rank\n" in printed and ", on average over the ranks\n" in printed
    assert set(answer(capsys, *words)["exposed_by_group_s"]) == {"data"}, "broadcasts too"


@pytest.mark.parametrize(("words", "status"), [("show gpt2-tiny-b8", 0), ("show nowhere", 2)])
def test_program_leaves_at_once_with_its_status_and_all_that_it_said(words, status):
    program = (
        "import atexit, sys\nfrom trioflow.cli import run\n"
        "class Kept:\n    def __del__(self): print('taken apart')\n"
        f"kept = Kept()\natexit.register(print, 'asked at exit')\nsys.argv[1:] = {words.split()}\nrun()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert done.stdout.endswith("asked at exit\n")
    assert len(done.stdout) > 500 if status == 0 else "nowhere" in done.stderr


@pytest.mark.parametrize(
    ("words", "given", "threads"),
    [
        (["show", "x"], {}, "1"),
        (["show"], {"OPENBLAS_NUM_THREADS": "3"}, "3"),
        (["capture"], {}, None),
    ],
)
def test_numpy_s_matrix_library_starts_no_threads_but_for_a_step_that_is_captured(
    words, given, threads
):
    spare_threads(words, given)
    assert given.get("OPENBLAS_NUM_THREADS") == threads
