"""The data of a figure: all of a set, each row with its label, and an error that names what is empty."""

from pathlib import Path

import pandas as pd
import pytest
from trioflow.base.errors import InputError, TableError
from trioflow.tables import to_arrow, validate
from trioflow_evaluation.figures.build import SCHEMAS, build_figure_data, keep_rivals
from trioflow_evaluation.figures.catalogue import FIGURES
from trioflow_evaluation.tables import EVIDENCE_KINDS

from evaluation.figures.figure_cases import (
    make_errors,
    make_evidence,
    make_plans,
    make_sweep,
    write,
    write_files,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return write_files(tmp_path_factory.mktemp("figures"))


BUILT = [name for name, figure in FIGURES.items() if not figure.study and figure.form != "speed"]
EVIDENCED = [name for name in BUILT if FIGURES[name].form != "shares"]


@pytest.mark.parametrize("name", BUILT)
def test_a_figure_holds_its_kind_of_rows_in_its_schema(
    name: str, files: dict[str, list[str]]
) -> None:
    frame = build_figure_data(name, files, make_plans())
    figure = FIGURES[name]
    schema = SCHEMAS[figure.form]
    validate(to_arrow(frame, name, schema=schema), name, schema=schema)
    assert set(frame["figure"]) == {name}
    live = frame[frame["evidence"] == "measured here"]
    assert figure.live == (len(live) > 0)
    assert (frame["evidence"] == "only simulated").any()
    assert set(frame["evidence"]) <= set(EVIDENCE_KINDS)


@pytest.mark.parametrize("name", EVIDENCED)
def test_public_measurements_come_with_the_published_name_only(
    name: str, files: dict[str, list[str]]
) -> None:
    figure = FIGURES[name]
    plain = build_figure_data(name, files, make_plans())
    assert "measured, public" not in set(plain["evidence"])
    if figure.validation or figure.published:
        frame = build_figure_data(f"published-{name}", files, make_plans())
        public = frame[frame["evidence"] == "measured, public"]
        assert len(public) and public["measured_s"].notna().all()
        assert len(frame) == len(plain) + len(public)


def test_the_papers_averages_stand_where_they_are_drawn(files: dict[str, list[str]]) -> None:
    frame = build_figure_data("fig08", files, make_plans())
    told = dict(zip(frame["evidence"], frame["paper"], strict=True))
    assert told["measured here"] and told["only simulated"] == ""
    frame = build_figure_data("fig11", files, make_plans())
    assert (frame[frame["family"] == "DDP"]["paper"] != "").all(), "nothing was measured there"


def test_tensor_parallelism_is_told_in_busy_time(files: dict[str, list[str]]) -> None:
    frame = build_figure_data("fig09", files, make_plans())
    assert set(frame["quantity"]) == {"busy time"}
    live = frame[frame["evidence"] == "measured here"]
    assert live["measured_s"].tolist() == pytest.approx([2.0 * 0.8])


def test_an_empty_or_missing_set_is_named_with_its_figure(
    files: dict[str, list[str]], tmp_path: Path
) -> None:
    few = write(make_errors(("one",)), "errors", tmp_path / "error.parquet")
    with pytest.raises(
        InputError, match="fig08: no measured experiment with a plan of the kind DDP"
    ):
        build_figure_data("fig08", {**files, "errors": [few]}, make_plans())
    with pytest.raises(InputError, match="fig08: no file of its errors"):
        build_figure_data("fig08", {}, make_plans())
    with pytest.raises(InputError, match="published-fig06: the set batch-change is missing"):
        build_figure_data("published-fig06", {**files, "validation": []}, make_plans())
    empty = write(make_sweep()[:0], "sweep_results", tmp_path / "net.parquet")
    with pytest.raises(InputError, match="fig07: no predicted scenario"):
        build_figure_data("fig07", {**files, "predictions": [empty]}, make_plans())
    with pytest.raises(TableError, match="fig15: not a study table"):
        build_figure_data("fig15", {"study": [few]}, make_plans())


def test_rivals_are_the_plans_of_one_training() -> None:
    rows = [
        make_evidence(case=case, plan=plan, workload=net)
        for case, plan, net in (
            ("a", "ddp4", "net"),
            ("b", "tp4", "net"),
            ("c", "ddp4", "lone"),
        )
    ]
    assert [row["case"] for row in keep_rivals(rows)] == ["a", "b"]
    with pytest.raises(InputError, match="under several plans"):
        keep_rivals(rows[2:])


def test_nothing_depends_on_the_order_of_the_files(files: dict[str, list[str]]) -> None:
    one = build_figure_data("published-fig06", files, make_plans())
    other = build_figure_data(
        "published-fig06", {**files, "validation": files["validation"][::-1]}, make_plans()
    )
    pd.testing.assert_frame_equal(one, other)
