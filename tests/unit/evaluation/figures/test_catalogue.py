"""What each figure needs, and which of them public data add to."""

from pathlib import Path

import pytest
from trioflow.base.errors import InputError
from trioflow.base.settings import list_descriptions
from trioflow.sweeps.description import load_sweep
from trioflow_evaluation.figures.catalogue import (
    FIGURES,
    find_descriptions,
    find_figure,
    list_figures,
    list_inputs,
)

FOLDER = Path(__file__).parents[4] / "config/figures"
DESCRIPTIONS = list_descriptions(FOLDER)


def test_all_figures_of_the_paper_from_6_to_16_are_there() -> None:
    assert list(FIGURES) == [f"fig{number:02}" for number in range(6, 17)]
    assert list_figures(DESCRIPTIONS, published=False) == list(FIGURES)


def test_public_data_add_to_those_that_have_any() -> None:
    names = list_figures(DESCRIPTIONS, published=True)
    assert [name.removeprefix("published-") for name in names] == list(FIGURES)
    plain = {name for name in names if not name.startswith("published-")}
    assert plain == {"fig07", "fig14", "fig15", "fig16"}


def test_every_description_is_one_and_belongs_to_a_figure() -> None:
    used = {
        name
        for figure in list_figures(DESCRIPTIONS, published=True)
        for name in find_descriptions(figure, DESCRIPTIONS)
    }
    assert used == set(DESCRIPTIONS)
    for file in DESCRIPTIONS.values():
        assert load_sweep(file).scenarios


def test_inputs_follow_from_what_a_figure_compares() -> None:
    def inputs(name: str) -> dict[str, list[str]]:
        return list_inputs(name, DESCRIPTIONS, ["net"], ["net-tp"], ["some-set"])

    assert inputs("fig07") == {"predictions": ["figures/predictions/fig07.parquet"]}
    assert inputs("fig14") == {"times": ["figures/simulator_times.parquet"]}
    assert inputs("fig15") == {"study": ["studies/wafer.parquet"]}
    assert inputs("fig09")["timelines"] == ["timelines/net-tp/timeline.parquet"]
    public = inputs("published-fig11")
    assert public["validation"] == ["validation/new-gpu.parquet"]
    assert public["published"] == ["published/some-set.parquet"] and "errors" not in public
    assert public["predictions"][1] == "figures/predictions/published-fig11.parquet"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="no figure 'fig99'"):
        find_figure("fig99")
    with pytest.raises(InputError, match=r"fig08 has no description fig08\.yaml"):
        list_inputs("fig08", {}, [], [], [])
