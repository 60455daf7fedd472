"""The workloads that ship by name: parameters and FLOPs against published ones and closed forms.

Everything is built on the meta device, so the largest take no memory.
"""

import argparse
import csv
from dataclasses import asdict
from functools import cache

import pytest
from trioflow.base.errors import InputError, TableError
from trioflow.base.experiments import load_workloads
from trioflow.base.settings import FAMILIES, OPTIMIZERS, PRECISIONS, SIZES
from trioflow.trace.tensors import count_flop
from trioflow.trace.workloads.catalog import CATALOG, change_workload, find_workload

torch = pytest.importorskip("torch", reason="workloads need torch (extra [capture])")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

ROWS = load_workloads(CATALOG)
CNNS = [name for name, row in ROWS.items() if row.family == "torchvision"]
LANGUAGE = [name for name, row in ROWS.items() if row.family != "torchvision"]
PAPER = [
    *(f"VGG-{n}" for n in (11, 13, 16, 19)),
    *(f"ResNet-{n}" for n in (18, 34, 50, 101, 152)),
    *(f"DenseNet-{n}" for n in (121, 161, 169, 201)),
    *("GPT-2", "BERT-base", "T5-small", "FLAN-T5-small", "Llama-3.2-1B"),
]
BATCH = 2
FIRST = {
    "vgg11",
    "resnet18",
    "resnet50",
    "densenet121",
    "gpt2",
    "bert-base",
    "t5-small",
    "flan-t5-small",
    "llama-3-2-1b",
    "gpt3-175b",
}
"""One of each architecture; the others, which are wider or deeper, are counted in the slow tier."""


def mark_counted(names):
    return [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in names]


with (CATALOG.parent / "model_facts.tsv").open(encoding="utf-8") as _file:
    FACTS = {row["workload"]: row for row in csv.DictReader(_file, delimiter="\t")}


@cache
def built(name, **changes):
    from trioflow.trace.workloads.build import build_workload

    return build_workload(asdict(change_workload(ROWS[name], changes)), device="meta")


class OwnCount(TorchDispatchMode):
    """Counts every dispatched operator with trioflow's own formulas."""

    def __init__(self):
        super().__init__()
        self.flop = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        shapes = [list(a.shape) for a in args if isinstance(a, torch.Tensor)]
        results = out if isinstance(out, tuple | list) else [out]
        made = [list(r.shape) if isinstance(r, torch.Tensor) else [] for r in results]
        name = str(function.overloadpacket).replace(".", "::")
        self.flop += count_flop(name, shapes, made) or 0
        return out


def count(workload, backward=False):
    """FLOPs of a forward, or of a forward and backward: PyTorch's count and our own."""
    from trioflow.trace.capture.workload import call_model

    inputs, targets = workload.make_batch(BATCH, 0, "meta")
    with OwnCount() as own, FlopCounterMode(display=False) as theirs, torch.set_grad_enabled(backward):
        loss = workload.loss(call_model(workload.model, inputs), targets)
        if backward:
            loss.backward()
    return theirs.get_total_flops(), own.flop


@cache
def count_forward(name):
    return count(built(name))


def parameters_of(model):
    """Number of parameters; a tied one counts once."""
    return sum(p.numel() for p in model.parameters())


# vocabulary, positions, hidden, layers, inner width of the feed-forward, width of the attention
SIZES_OF = {
    "gpt2": (50257, 1024, 768, 12, 3072, 768),
    "gpt2-345m": (50257, 1024, 1024, 24, 4096, 1024),
    "bert-base": (30522, 512, 768, 12, 3072, 768),
    "bert-large": (30522, 512, 1024, 24, 4096, 1024),
    "t5-small": (32128, 0, 512, 6, 2048, 512),
    "t5-base": (32128, 0, 768, 12, 3072, 768),
    "flan-t5-small": (32128, 0, 512, 8, 1024, 384),
    "llama-3-2-1b": (128256, 0, 2048, 16, 8192, 2048),
    "gpt3-175b": (50257, 2048, 12288, 96, 49152, 12288),
    "gpt-145b": (51200, 2048, 12288, 80, 49152, 12288),
}
LLAMA_KEY_WIDTH = 8 * 64
"""Heads of keys and values times the size of a head."""


def closed_form(name):
    """Parameters, weights in matrix products that each token meets, and attentions of a layer."""
    vocabulary, positions, hidden, layers, inner, width = SIZES_OF[name]
    embedding = vocabulary * hidden
    if name.startswith(("t5", "flan")):
        products = layers * (12 * hidden * width + 2 * (3 if "flan" in name else 2) * hidden * inner)
        heads = width // 64
        # Norms: two and three a layer, one after each half; buckets of distances in each half.
        small = layers * 5 * hidden + 2 * hidden + 2 * 32 * heads
        tables = 2 if "flan" in name else 1
        return products + small + tables * embedding, products + embedding, 3
    if name.startswith("llama"):
        products = layers * (2 * hidden * width + 2 * hidden * LLAMA_KEY_WIDTH + 3 * hidden * inner)
        return products + (2 * layers + 1) * hidden + embedding, products + embedding, 1
    products = layers * (4 * hidden * width + 2 * hidden * inner)
    biases_and_norms = layers * (4 * width + inner + hidden + 4 * hidden)
    base = products + biases_and_norms + embedding + positions * hidden + 2 * hidden
    if name.startswith("bert"):
        # Two kinds of segment, and a head with one more layer, a norm and a bias a token.
        head = hidden * hidden + 3 * hidden + vocabulary
        return base + 2 * hidden + head, products + hidden * hidden + embedding, 1
    own = ROWS[name].family == "transformer"  # its head is not tied to the embedding
    return base + (embedding if own else 0), products + embedding, 1


def test_the_paper_s_eighteen_and_the_named_others_are_there():
    for name in [*PAPER, "BERT-Large", "GPT-2-345M", "T5-base", "GPT3-175B", "GPT-145B"]:
        assert find_workload(ROWS, name) is not None, name
    assert len(PAPER) == 18
    assert set(FACTS) == set(ROWS), "every workload has its published facts"
    assert all(row["source"] for row in FACTS.values())


@pytest.mark.parametrize("name", ROWS)
def test_parameters_are_the_published_ones(name):
    count = parameters_of(built(name).model)
    if ROWS[name].family == "transformer":  # published with a tied head
        count -= ROWS[name].vocabulary * ROWS[name].hidden
    assert abs(count - int(FACTS[name]["parameters"])) <= int(FACTS[name]["parameters_within"])


@pytest.mark.parametrize("name", LANGUAGE)
def test_parameters_are_those_of_the_closed_form(name):
    assert parameters_of(built(name).model) == closed_form(name)[0]


def test_flan_t5_shares_one_table_between_its_halves_and_not_with_its_head():
    model = built("flan-t5-small").model
    assert model.encoder.embed_tokens is model.shared
    assert model.decoder.embed_tokens is model.shared
    assert model.lm_head.weight is not model.shared.weight
    assert parameters_of(model) == 76_961_152


@pytest.mark.parametrize("name", mark_counted(CNNS))
def test_forward_flop_of_images_are_twice_the_published_multiply_adds(name):
    facts = FACTS[name]
    assert ROWS[name].image_size == int(facts["image_size"])
    gmac = count_forward(name)[0] / 2 / BATCH / 1e9
    # Written with three decimals there.
    assert abs(gmac - float(facts["gmac"])) <= float(facts["gmac_within"]) * (1 + 1e-9)


@pytest.mark.parametrize("name", mark_counted(LANGUAGE))
def test_forward_flop_of_tokens_are_those_of_the_closed_form(name):
    _, weights, attentions = closed_form(name)
    tokens = ROWS[name].sequence
    _, _, _, layers, _, width = SIZES_OF[name]
    scores_and_mixture = 2 * 2 * tokens * tokens * width * attentions * layers
    assert count_forward(name)[0] == BATCH * (2 * weights * tokens + scores_and_mixture)


@pytest.mark.parametrize("name", mark_counted(ROWS))
def test_our_own_count_of_a_forward_is_pytorch_s(name):
    theirs, own = count_forward(name)
    assert own == theirs > 0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vgg11", {}),
        ("resnet18", {}),
        ("gpt2", {"layers": 1}),
        ("bert-base", {"layers": 1}),
        ("llama-3-2-1b", {"layers": 1}),
        ("flan-t5-small", {"layers": 1}),
        ("gpt3-175b", {"layers": 1}),
    ],
)
def test_our_own_count_of_a_step_is_pytorch_s(name, changes):
    workload = built(name, **changes)
    theirs, own = count(workload, backward=True)
    assert own == theirs
    forward = count(workload)[0]
    # A backward is two forwards, less the gradient of an image, which nobody needs.
    assert theirs == 3 * forward or (name in CNNS and 2.9 < theirs / forward < 3)


@pytest.mark.parametrize("name", CNNS)
def test_published_facts_of_images_are_torchvision_s_own(name):
    from trioflow.trace.workloads.recipe import import_torchvision_models

    meta = import_torchvision_models().get_model_weights(ROWS[name].model).IMAGENET1K_V1.meta
    assert int(FACTS[name]["parameters"]) == meta["num_params"]
    assert float(FACTS[name]["gmac"]) == meta["_ops"]


@pytest.mark.parametrize("name", ROWS)
def test_units_cover_every_parameter_once(name):
    workload = built(name)
    if name.startswith(("t5", "flan")):
        assert workload.units == {}, "an encoder-decoder model is not a chain"
        return
    paths = [path for paths in workload.units.values() for path in paths]
    assert len(paths) == len(set(paths))
    owners = [
        [path for path in paths if parameter.startswith(f"{path}.")]
        for parameter, _ in workload.model.named_parameters()
    ]
    assert all(len(found) == 1 for found in owners)
    assert len(workload.units) >= 4


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_tensor_split_holds_all_weights_of_the_blocks(name):
    """Megatron's split leaves only norms and row biases of a block whole."""
    from fnmatch import fnmatchcase

    workload = built(name)
    modules = dict(workload.model.named_modules())
    split = {
        path: kind for pattern, kind in workload.tensor_split.items() for path in modules if fnmatchcase(path, pattern)
    }
    for pattern in workload.tensor_split:
        assert any(fnmatchcase(path, pattern) for path in modules), pattern
    in_blocks = {
        path
        for path, module in modules.items()
        if type(module).__name__ in ("Linear", "Conv1D") and any(p.isdecimal() for p in path.split("."))
    }
    assert set(split) == in_blocks
    layers = ROWS[name].layers or SIZES_OF[name][3]
    rows = sum(kind == "row" for kind in split.values())
    # After attention and after the feed-forward; a T5 layer of both halves has five such sums.
    assert rows == layers * (5 if name.startswith(("t5", "flan")) else 2)


@pytest.mark.parametrize("name", [n for n in LANGUAGE if ROWS[n].family == "transformers"])
def test_depth_and_sequence_follow_the_row(name):
    shallow = built(name, layers=1, sequence=8)
    inputs, targets = shallow.make_batch(3, 0, "meta")
    for part in inputs.values() if isinstance(inputs, dict) else [inputs]:
        assert part.shape == (3, 8)
    assert targets.shape == (3, 8)
    two = built(name, layers=2, sequence=8)
    a_layer = parameters_of(two.model) - parameters_of(shallow.model)
    whole = parameters_of(shallow.model) + (SIZES_OF[name][3] - 1) * a_layer
    assert whole == parameters_of(built(name).model)


@pytest.mark.parametrize("name", ["gpt2", "bert-base"])
def test_a_sequence_longer_than_the_positions_is_refused(name):
    with pytest.raises(InputError, match=r"reads at most \d+ tokens, not 4096"):
        built(name, sequence=4096)


# Choosing by name, as the command does.


def choose(workload, **changes):
    from trioflow.cli.traces import choose_workload

    keys = ("workloads", "sequence", "precision", "optimizer", "layers")
    options = {**dict.fromkeys(keys), "batch": 4, "workload": workload, **changes}
    return choose_workload(argparse.Namespace(**options))


def test_a_project_s_own_row_wins_and_the_catalogue_stands_behind_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert choose("resnet18")["image_size"] == 224
    assert choose("gpt2-tiny")["hidden"] == 256, "the shipped example's rows come last"
    (tmp_path / "config").mkdir()
    header, *rows = CATALOG.read_text().splitlines()
    own = next(row for row in rows if row.startswith("resnet18")).replace("\t224\t", "\t64\t")
    (tmp_path / "config" / "workloads.tsv").write_text(f"{header}\n{own}\n")
    assert choose("resnet18")["image_size"] == 64
    assert choose("resnet18", workloads="catalog")["image_size"] == 224
    assert choose("ResNet-50")["workload"] == "resnet50"
    assert choose("Llama-3.2-1B")["model"] == "llama-3.2-1b"


def test_changes_on_the_command_line_reach_the_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = choose("gpt2", sequence=64, layers=2, precision="tf32", optimizer="sgd-fused")
    assert [row[k] for k in ("sequence", "layers", "precision", "optimizer")] == [64, 2, "tf32", "sgd-fused"]
    assert choose("gpt2")["layers"] is None


@pytest.mark.parametrize(
    ("workload", "changes", "words"),
    [
        ("gpt9", {}, "no workload 'gpt9'.*gpt2"),
        ("resnet18", {"sequence": 8}, "--sequence: workload resnet18 has none"),
        ("resnet18", {"layers": 8}, "--layers: workload resnet18 has none"),
        ("gpt2", {"layers": 0}, "--layers: 0 is below 1"),
        ("gpt2", {"precision": "int8"}, "--precision: 'int8' is not one of fp32, tf32"),
        ("gpt2", {"optimizer": "lion"}, "--optimizer: 'lion' is not one of sgd, sgd-foreach"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(tmp_path, monkeypatch, workload, changes, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        choose(workload, **changes)


def test_a_function_of_the_user_s_own_needs_no_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = choose("My_Models.vision:make_net", precision="bf16")
    assert row["workload"] == "my-models-vision-make-net"
    assert (row["family"], row["model"]) == ("user", "My_Models.vision:make_net")
    assert (row["precision"], row["batches"]) == ("bf16", (4,))


def test_a_missing_table_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TableError, match=r"mine\.tsv: no such file"):
        choose("gpt2", workloads="mine.tsv")


def test_the_words_of_the_tables_are_all_built():
    from trioflow.trace.workloads.build import _BUILDERS

    assert set(_BUILDERS) == {*FAMILIES, "language", "configured"}, "these have a configuration, no row"
    assert set(PRECISIONS) == {"fp32", "tf32", "bf16", "fp16"}
    assert len(OPTIMIZERS) == 9
    assert {size for both in FAMILIES.values() for sizes in both for size in sizes} == set(SIZES)
