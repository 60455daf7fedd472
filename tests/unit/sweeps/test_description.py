"""Descriptions of sweeps: what they spell out, and every mistake named with its place and fix."""

from pathlib import Path

import pytest
from sweep_files import SMALL, write_sweep
from trioflow.base.errors import InputError, PlanError
from trioflow.sweeps.description import PARAMETERS, fill_values, load_sweep

ONE = {"trace": "gpt2-tiny-b8", "platform": "cpu2-gloo"}


def test_a_grid_a_list_and_a_table_give_each_different_scenario_once(tmp_path: Path) -> None:
    table = tmp_path / "rows.tsv"
    table.write_text(
        "trace\tplatform\tdata\tcompute_scale\tsequence_parallel\n"
        "gpt2-tiny-b8\tdgx-a100\t-\t2\tfalse\n\n"
        "gpt2-tiny-b8\tcpu2-gloo\t2\t1\t-\n"
    )
    sweep = load_sweep(
        write_sweep(
            tmp_path,
            {
                "description": "all three", "defaults": {"batch": 16},
                "grid": {**ONE, "data": [1, 2], "tensor": [1, 2]},
                "list": [{**ONE, "data": 2}, {**ONE, "data": 8, "batch": 32}],
                "table": str(table),
            },
        )
    )  # fmt: skip
    told = [
        (v["platform"], v["data"], v["tensor"], v["batch"], v["compute_scale"])
        for v in sweep.scenarios
    ]
    assert told == [
        ("cpu2-gloo", 1, 1, 16, 1.0), ("cpu2-gloo", 1, 2, 16, 1.0), ("cpu2-gloo", 2, 1, 16, 1.0),
        ("cpu2-gloo", 2, 2, 16, 1.0), ("cpu2-gloo", 8, 1, 32, 1.0), ("dgx-a100", 0, 1, 16, 2.0),
    ]  # fmt: skip
    assert all(list(values) == list(PARAMETERS) for values in sweep.scenarios)


def test_a_seed_that_draws_nothing_is_no_other_scenario(tmp_path: Path) -> None:
    grid = {**ONE, "seed": [0, 1, 2], "rank_spread": [0, 0.1]}
    sweep = load_sweep(write_sweep(tmp_path, {"description": "seeds", "grid": grid}))
    assert [(v["seed"], v["rank_spread"]) for v in sweep.scenarios] == [
        (0, 0.0), (0, 0.1), (1, 0.1), (2, 0.1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("description: x\ngird: []", ["gird", "unknown key", "did you mean grid?"]),
        ("grid: []", ["'description' is a required property"]),
        ("description: x", ["no scenarios", "give a grid, a list or a table"]),
        ("description: [", ["not readable as YAML"]),
        ("- 1", ["not a mapping"]),
        ("description: x\ndescription: y", ["written twice"]),
        (
            "description: x\ngrid: [{trace: gpt2-tiny-b8, platform: cpu2-gloo, tenser: 2}]",
            ["grid.0.tenser", "unknown key", "did you mean tensor?"],
        ),
        (
            "description: x\ngrid: [{trace: gpt2-tiny-b8, platform: cpu2-gloo, tensor: [1, 0]}]",
            ["grid.0.tensor.1", "0 is below 1"],
        ),
        (
            "description: x\nlist: [{trace: gpt2-tiny-b8, platform: cpu2-gloo, data: many}]",
            ["list.0.data", "'many' is not of type integer"],
        ),
        (
            "description: x\nlist: [{trace: gpt2-tiny-b9, platform: cpu2-gloo}]",
            ["list.0.trace", "unknown trace 'gpt2-tiny-b9'", "did you mean gpt2-tiny-b8?"],
        ),
        ("description: x\nlist: [{trace: gpt2-tiny-b8}]", ["list.0.platform", "the platform is missing"]),
        (
            "description: x\nlist: [{trace: gpt2-tiny-b8, platform: cpu2-gloo, sharding: fspd}]",
            ["list.0.sharding", "'fspd' is not one of none, zero1"],
        ),
        ("description: x\ntraces: {Big: a}\nlist: [{trace: Big, platform: cpu2-gloo}]", ["'Big'", "small letters"]),
        ("description: x\ntable: nowhere.tsv", ["nowhere.tsv", "no such file", "key table"]),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_file_place_and_fix(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = write_sweep(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_sweep(file)
    for word in (str(tmp_path) if "nowhere" not in text else "nowhere", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("gpt2-tiny-b8\tcpu2-gloo\ttwo", ["(line 2), column data", "'two' is not of type integer"]),
        ("gpt2-tiny-b8\tcpu2-gloo", ["line 2", "2 cells found where 3 are due"]),
        ("gpt2-tiny-b8\tnowhere\t1", ["(line 2).platform", "unknown platform 'nowhere'"]),
    ],
)
def test_a_mistake_in_a_table_is_told_with_its_line(
    tmp_path: Path, row: str, words: list[str]
) -> None:
    table = tmp_path / "rows.tsv"
    table.write_text(f"trace\tplatform\tdata\n{row}\n")
    with pytest.raises(InputError) as caught:
        load_sweep(write_sweep(tmp_path, {"description": "x", "table": str(table)}))
    for word in (str(table), *words):
        assert word in str(caught.value)
    table.write_text("trace\tplatfrom\n")
    with pytest.raises(
        InputError, match=r"line 1\): unknown or repeated column 'platfrom'; did you mean platform"
    ):
        load_sweep(write_sweep(tmp_path, {"description": "x", "table": str(table)}))


def test_no_file_and_too_many_scenarios_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_sweep(tmp_path / "missing.yaml")
    monkeypatch.setattr("trioflow.sweeps.description.MOST_SCENARIOS", 3)
    with pytest.raises(InputError, match=r"grid\.0: more than 3 scenarios"):
        load_sweep(write_sweep(tmp_path, SMALL))


def test_the_shipped_descriptions_are_sound() -> None:
    folder = Path(__file__).parents[3] / "config/sweeps"
    sweeps = [load_sweep(file) for file in sorted(folder.glob("*.yaml"))]
    assert "example" in [sweep.name for sweep in sweeps]
    for sweep in sweeps:
        assert {values["trace"] for values in sweep.scenarios} >= {"gpt2-b8", "resnet50-b128"}


@pytest.mark.parametrize(
    "name", [name for name, entry in PARAMETERS.items() if entry.get("minimum") == 1]
)
@pytest.mark.parametrize("value", [0, -2])
def test_zero_does_not_mean_left_out(name: str, value: int, tmp_path: Path) -> None:
    told = {"description": "none", "list": [{**ONE, name: value}]}
    with pytest.raises(InputError, match=f"{value} is below 1"):
        load_sweep(write_sweep(tmp_path, told))
    with pytest.raises(PlanError, match=f"{name} {value} is below 1"):
        fill_values({**ONE, name: value})
