"""The tables that a user edits: every mistake is named with its place and its fix."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from trioflow.base.errors import InputError, TableError
from trioflow.base.experiments import (
    TABLES,
    Experiment,
    as_rows,
    load_experiments,
    load_plans,
    load_workloads,
    row_schema,
)
from trioflow.base.settings import check_settings

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "workflow/schemas/config.schema.json").read_text())


def edited(tmp_path: Path, table: str, old: str, new: str) -> Path:
    """Copy a table of the project with one replacement."""
    text = (ROOT / "config" / f"{table}.tsv").read_text()
    assert old in text
    path = tmp_path / f"{table}.tsv"
    path.write_text(text.replace(old, new, 1))
    return path


def load_all(folder: Path) -> dict[str, Experiment]:
    def find(name: str) -> Path:
        path = folder / name
        return path if path.exists() else ROOT / "config" / name

    workloads, plans = load_workloads(find("workloads.tsv")), load_plans(find("plans.tsv"))
    return load_experiments(find("experiments.tsv"), workloads, plans)


def test_the_projects_own_tables_are_read_into_typed_rows() -> None:
    workloads = load_workloads(ROOT / "config/workloads.tsv")
    plans = load_plans(ROOT / "config/plans.tsv")
    experiments = load_experiments(ROOT / "config/experiments.tsv", workloads, plans)
    gpt = workloads["gpt2-tiny"]
    assert gpt.causal is True and workloads["bert-tiny"].causal is False
    assert gpt.image_size is None and workloads["resnet18"].hidden is None
    assert gpt.traces == tuple(f"gpt2-tiny-b{batch}" for batch in gpt.batches)
    assert {plans[row.plan].ranks for row in experiments.values()} == {1, 2}
    for name, rows in (("workloads", workloads), ("plans", plans), ("experiments", experiments)):
        validator = Draft202012Validator(row_schema(name))
        for row in as_rows(rows.values()):
            validator.validate(json.loads(json.dumps(row)))


def test_experiments_on_one_rank_run_at_batches_that_no_trace_has() -> None:
    workloads = load_workloads(ROOT / "config/workloads.tsv")
    for row in load_all(ROOT).values():
        if row.plan == "single":
            assert row.batch not in workloads[row.workload].batches


@pytest.mark.parametrize(
    ("table", "old", "new", "words"),
    [
        ("experiments", "\tddp2\t", "\tdpd2\t", ["row 3 (line 4)", "column plan", "'dpd2'", "ddp2?"]),
        ("experiments", "\tresnet18\t", "\tresnet\t", ["row 1", "column workload", "resnet18?"]),
        ("experiments", "\tddp2\t32", "\tddp2\t31", ["column batch", "31", "multiple of 2"]),
        ("experiments", "\tgpipe2-m4\t16", "\tgpipe2-m4\t6", ["column batch", "multiple of 4"]),
        ("experiments", "\tsingle\t8", "\ttp2\t8", ["column plan", "transformer"]),
        ("experiments", "\tsingle\t8", "\tsingle\t8.5", ["column batch", "'8.5'", "integer"]),
        ("experiments", "\tsingle\t8", "\tsingle\t0", ["column batch", "below 1"]),
        ("experiments", "\tsingle\t8", "\tsingle", ["line 2", "4 cells", "5 columns"]),
        ("experiments", "resnet18-ddp2", "resnet18-batch8", ["row 3", "row 1", "own name"]),
        ("experiments", "resnet18-ddp2", "ResNet/ddp2", ["column experiment", "small letters"]),
        ("experiments", "\tplan\t", "\tplans\t", ["line 1", "'plans'", "did you mean plan?"]),
        ("experiments", "\tbatch\n", "\n", ["line 1", "'batch' is missing"]),
        ("plans", "gpipe2-m2\t1\t1\t2\tgpipe", "gpipe2-m2\t1\t1\t2\tnone", ["column schedule"]),
        ("plans", "ddp2\t2\t1\t1\tnone\t1", "ddp2\t2\t1\t1\tnone\t3", ["column micro_batches"]),
        ("plans", "\tgpipe\t", "\tgpip\t", ["column schedule", "'gpip'", "did you mean gpipe?"]),
        ("plans", "\tgpipe\t", "\tzigzag\t", ["column schedule", "'zigzag'", "use one of gpipe"]),
        (
            "workloads",
            "\ttorchvision\t",
            "\ttorchvison\t",
            ["column family", "torchvision, trans", "did you mean torchvision?"],
        ),
        ("workloads", "resnet18\t16,4\t64", "resnet18\t16,4\t-", ["column image_size", "give the"]),
        ("workloads", "\t64\t-\t", "\t64\t128\t", ["column sequence", "128", "write -"]),
        ("workloads", "\t16,4\t", "\t16,x\t", ["column batches", "'16,x'"]),
        ("workloads", "\t16,4\t", "\t4,4\t", ["column batches", "'4,4'"]),
        ("workloads", "\ttrue\t", "\tmaybe\t", ["column causal", "'maybe'", "boolean"]),
        ("workloads", "\t256\t4\t4\t", "\t256\t4\t3\t", ["column heads", "divisor of hidden"]),
    ],
)
def test_a_mistake_is_refused_with_place_value_and_fix(
    tmp_path: Path, table: str, old: str, new: str, words: list[str]
) -> None:
    path = edited(tmp_path, table, old, new)
    with pytest.raises(TableError) as caught:
        load_all(tmp_path)
    for word in (str(path), *words):
        assert word in str(caught.value)


HEADER = "workload family model batches image_size sequence hidden layers heads vocabulary causal optimizer precision"


@pytest.mark.parametrize(
    "row",
    [
        "a transformers gpt2 8 - 128 - - - - - adamw-fused tf32",
        "a transformers t5-small 8 - 128 - 2 - - - adam-foreach fp16",
        "a user mine:make 8 - - - - - - - sgd fp32",
        "a user mine:make 8 32 128 - 3 - - true sgd-fused bf16",
    ],
)
def test_sizes_that_a_family_can_do_without_may_be_left_out(tmp_path: Path, row: str) -> None:
    path = tmp_path / "workloads.tsv"
    path.write_text(f"{HEADER}\n{row}\n".replace(" ", "\t"))
    (found,) = as_rows(load_workloads(path).values())
    written = dict(zip(HEADER.split(), row.split(), strict=True))
    for column, value in found.items():
        assert (value is None) == (written[column] == "-"), column
    Draft202012Validator(row_schema("workloads")).validate(json.loads(json.dumps(found)))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a transformers gpt2 8 - - - - - - - sgd fp32", ["column sequence", "give the size"]),
        ("a transformers gpt2 8 64 128 - - - - - sgd fp32", ["column image_size", "write -"]),
        ("a transformers gpt2 8 - 128 64 - - - - sgd fp32", ["column hidden", "write -"]),
        ("a torchvision vgg11 8 64 - - 3 - - - sgd fp32", ["column layers", "write -"]),
        ("a user make 8 - - - - - - - sgd fp32", ["column model", "module:function"]),
        ("a user a:b 8 - - - - - - - sgd-fast fp32", ["column optimizer", "sgd-foreach"]),
        ("a user a:b 8 - - - - - - - sgd fp8", ["column precision", "fp32, tf32, bf16, fp16"]),
    ],
)
def test_a_row_that_its_family_does_not_understand_is_refused(tmp_path: Path, row: str, words: list[str]) -> None:
    path = tmp_path / "workloads.tsv"
    path.write_text(f"{HEADER}\n{row}\n".replace(" ", "\t"))
    with pytest.raises(TableError) as caught:
        load_workloads(path)
    for word in words:
        assert word in str(caught.value)


def test_scaled_gradients_are_refused_in_a_pipeline(tmp_path: Path) -> None:
    edited(tmp_path, "workloads", "true\tadamw\tfp32", "true\tadamw\tfp16")
    with pytest.raises(TableError, match="gradients \\(fp16\\), which is not measured in a pipeline"):
        load_all(tmp_path)


def test_a_missing_table_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"plans\.tsv: no such file"):
        load_plans(tmp_path / "plans.tsv")
    (tmp_path / "plans.tsv").write_text("")
    with pytest.raises(TableError, match="'plan' is missing"):
        load_plans(tmp_path / "plans.tsv")


def test_a_table_without_rows_is_legal(tmp_path: Path) -> None:
    header = (ROOT / "config/plans.tsv").read_text().splitlines()[0]
    (tmp_path / "plans.tsv").write_text(header + "\n\n")
    assert load_plans(tmp_path / "plans.tsv") == {}


def test_defaults_are_filled_at_every_depth() -> None:
    """Snakemake's own validation fills nested defaults only where the parent is given."""
    settings = check_settings({"capture": {"warm_up": 9}}, SCHEMA, "config.yaml")
    assert settings["capture"]["warm_up"] == 9
    assert settings["capture"]["timed_steps"] == 15
    assert settings["measure"]["rounds"] == 15
    assert settings["tables"]["plans"] == "config/plans.tsv"


def test_what_the_user_wrote_is_left_as_it_is() -> None:
    written = {"capture": {"warm_up": 9}}
    check_settings(written, SCHEMA, "x")
    assert written == {"capture": {"warm_up": 9}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sed": 1}, ["config.yaml, sed", "unknown key", "did you mean seed?"]),
        ({"capture": {"warmup": 3}}, ["capture.warmup", "did you mean warm_up?"]),
        ({"capture": {"warm_up": 0}}, ["capture.warm_up", "0 is below 1"]),
        ({"device": "tpu"}, ["device", "'tpu'", "auto, cpu, cuda"]),
        ({"measure": {"rounds": "1M"}}, ["measure.rounds", "1M"]),
        ({"capture": 3}, ["capture", "3", "object"]),
        ({"results": "../elsewhere/"}, ["results", "pattern"]),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        check_settings(settings, SCHEMA, "config.yaml")
    for word in words:
        assert word in str(caught.value)


def test_every_schema_is_closed_and_says_what_columns_mean() -> None:
    for name in TABLES:
        schema = row_schema(name)
        Draft202012Validator.check_schema(schema)
        assert schema["additionalProperties"] is False
        assert all(entry["description"] for entry in schema["properties"].values())


def test_the_written_settings_are_the_documented_defaults() -> None:
    yaml = pytest.importorskip("yaml")
    written = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    assert check_settings(written, SCHEMA, "x") == check_settings({}, SCHEMA, "x")
