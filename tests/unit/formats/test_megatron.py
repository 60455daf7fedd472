"""Every argument of Megatron-LM has a class: followed, without effect, assumed otherwise, refused."""

import json

import pytest
import yaml
from trioflow.base.errors import InputError
from trioflow.cli.main import main
from trioflow.formats.fields import Fields
from trioflow.formats.megatron import (
    ASSUMED,
    FOLLOWED,
    REFUSED,
    find_argument,
    known_arguments,
    parse_arguments,
    read_megatron,
)

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 99"
    " --max-position-embeddings 32 --micro-batch-size 2 --overlap-grad-reduce "
)
CASES = "NVIDIA+Megatron-LM/tests/functional_tests/test_cases"


def read(words):
    """The configuration of a command line; later words win."""
    return read_megatron(parse_arguments(SIZES + words, "run.sh"), "run.sh", "x")


@pytest.fixture
def taken(monkeypatch):
    """Names that readers take of a file's arguments."""
    names, take = set(), Fields.take
    monkeypatch.setattr(Fields, "take", lambda self, name, *more: names.add(name) or take(self, name, *more))
    return names


def test_every_argument_of_megatron_s_own_tests_is_known(taken, mirror):
    files = sorted((mirror / CASES).rglob("model_config.yaml"))
    refused = {}
    for file in files:
        arguments = yaml.safe_load(file.read_text()).get("MODEL_ARGS")
        if not isinstance(arguments, dict):
            continue
        names = [name.lstrip("-").replace("_", "-") for name in arguments]
        assert not [name for name in names if find_argument(name) is None], file
        try:
            notes = read_megatron(arguments, file.name, "x").notes
            assert not [note for note in notes if "nobody here knows" in note]
        except InputError as error:
            refused[file] = str(error)
    assert not [file for file, why in refused.items() if "Megatron-LM refuses it" in why]
    assert 0 < len(refused) < len(files) // 2
    assert taken == {name for name, one in known_arguments().items() if one["class"] == FOLLOWED}


def test_the_table_says_of_each_class_what_it_has_to():
    known = known_arguments()
    assert {one["class"] for one in known.values()} == {FOLLOWED, REFUSED, ASSUMED, "none"}
    for name, one in known.items():
        assert one["says"] or one["class"] in (FOLLOWED, "none"), name
    # An argument that a pattern means is not classed before its own row.
    assert find_argument("rl-anything")["class"] == find_argument("grpo-iterations")["class"] == REFUSED
    assert find_argument("lr-decay-style")["class"] == "none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bf16 --perform-rl-step --grpo-iterations 2", "alternates generation and training"),
        ("--model-provider mamba", "--model-provider mamba: only pretrain_gpt.py's own network"),
        ("--bf16 --fp8-format hybrid --fp8-recipe mxfp8", "'mxfp8' is not known here"),
        ("--fp16 --fp8-format hybrid", "FP8 is built in a model in bf16 alone"),
        ("--bf16 --fp4-format e2m1", "FP4 is not built"),
        ("--optimizer muon", "'muon' is not known here"),
        ("--encoder-num-layers 4 --decoder-num-layers 4", "an encoder-decoder is not built"),
        ("--recompute-granularity selective --recompute-modules moe_act mlp", "moe_act: recomputing these"),
        ("--window-size 127,0", "attention within a window"),
        ("--step-batch-size-schedule 96", "step-batch-size-schedule: '' is not a whole number"),
        ("--num-tokens-to-generate 30", "generates text"),
    ],
)
def test_what_changes_a_step_much_is_refused_by_its_name(words, message):
    with pytest.raises(InputError, match=message):
        read(words)


def test_another_program_trains_another_network():
    line = "torchrun examples/bert/pretrain_{}.py " + SIZES
    with pytest.raises(InputError, match="--model-provider bert"):
        read_megatron(parse_arguments(line.format("bert"), "x"), "x", "x")
    assert read_megatron(parse_arguments(line.format("gpt"), "x"), "x", "x").model.layers == 4


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("--bf16 --recompute-num-layers 0 --lr 1e-4 --cuda-graph-scope full", ""),
        ("--bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 0", ""),
        ("--bf16 --num-experts 8 --moe-layer-freq ([0]*1+[1]*3)*1 --moe-token-dispatcher-type alltoall", ""),
        ("--bf16 --num-experts 8 --moe-layer-freq [0,1]+[1,1]", ""),
        ("--bf16 --cross-entropy-loss-fusion", "--cross-entropy-loss-fusion (the loss casts the scores"),
        ("--bf16 --position-embedding-type alibi --embed-layernorm", "(the embedding is not normalised)"),
        ("--bf16 --cross-entropy-loss-fusion --cross-entropy-fusion-impl te", ""),
        ("--bf16 --deterministic-mode", ""),
        ("--bf16 --overlap-grad-reduce false", "--overlap-grad-reduce False (gradients are reduced beside"),
        (
            "--bf16 --step-batch-size-schedule '0:96 10B:192'",
            "0:96 10B:192 (a step has its first batch, unless --batch",
        ),
        ("--bf16 --nobody-knows 3", "not followed: --nobody-knows 3 (nobody here"),
        ("--bf16 --swigl", "not followed: --swigl (did you mean swiglu?) (nobody here"),
    ],
)
def test_what_is_harmless_or_easy_is_taken_and_what_is_assumed_is_said(words, notes):
    found = read(words.replace("(", "'(").replace("*1 ", "*1' ") if "freq (" in words else words)
    assert (notes in " ".join(found.notes)) if notes else not found.notes
    assert found.step.get("deterministic", False) == ("deterministic" in words)
    assert found.degrees.get("recompute", "none") == "none"
    assert found.global_batch == (96 if "schedule" in words else None)
    assert found.model.dense_layers == ("freq" in words)


@pytest.mark.parametrize(
    "words",
    [
        "--bf16 --fp16",
        "--bf16 --swiglu --squared-relu",
        "--expert-model-parallel-size 2",
        "--bf16 --num-experts 6 --expert-model-parallel-size 4",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-layers-per-virtual-pipeline-stage 1",
        "--max-position-embeddings 16",
        "--hidden-size 66",
        "--tensor-model-parallel-size 8",
        "--context-parallel-size 3",
        "--tensor-model-parallel-size 2 --tp-comm-overlap",
        "--overlap-param-gather",
        "--recompute-granularity selective --recompute-method uniform",
        "--recompute-granularity full",
        "--deterministic-mode --use-flash-attn",
        "--moe-grouped-gemm --num-experts 4",
        "--train-iters 3 --train-samples 9",
        "--enable-cuda-graph --external-cuda-graph",
        "--mtp-num-layers 1",
        "--bf16 --num-experts 4 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
    ],
)
def test_arguments_that_contradict_each_other_are_refused_as_megatron_refuses_them(words):
    with pytest.raises(InputError, match="Megatron-LM refuses it"):
        read(words)


def test_modules_that_are_recomputed_whole_are_followed():
    words = "--bf16 --recompute-granularity selective --recompute-modules"
    assert read(f"{words} core_attn").degrees["recompute"] == "selective"
    assert read(f"{words} mlp core_attn").degrees["recompute"] == "modules:mlp,core_attn"


@pytest.mark.parametrize("ranks, overlaps", [(4, True), (1, False)])
def test_weights_are_gathered_during_forward_where_replicas_share_the_optimizer(ranks, overlaps, tmp_path, capsys):
    words = f"{SIZES}--bf16 --use-distributed-optimizer --overlap-param-gather --global-batch-size 8"
    (tmp_path / "run.sh").write_text(f"python pretrain_gpt.py {words}")
    command = ["simulate", "--megatron", str(tmp_path / "run.sh"), "--ranks", str(ranks), "--platform", "dgx-h100"]
    assert main([*command, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["plan_text"]
    assert ("weights gathered during forward" in text) == overlaps


def test_a_padded_vocabulary_and_a_gated_gelu_are_followed():
    model = read("--bf16 --quick-geglu --padded-vocab-size 200").model
    assert (model.gated, model.vocabulary, model.feed_forward) == (True, 200, 4 * 64)


def test_a_pattern_that_repeats_itself_for_ever_is_bounded():
    with pytest.raises(InputError, match="as the first ones alone"):
        read("--bf16 --num-experts 4 --moe-layer-freq '" + "(" * 9 + "[1]" + "*99999)" * 9 + "'")
