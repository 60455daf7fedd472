"""A mirror that holds more than the catalogue names gives the same answers."""

from pathlib import Path

import pandas as pd
import pytest
from trioflow.datasets.catalogue import SINGLE_PRODUCTS, load_catalogue
from trioflow_evaluation.fits.half_precision import read_tensor_products
from trioflow_evaluation.fits.new_gpu import load_cases, read_rows
from trioflow_evaluation.fits.operators import load_published

MODELS = ["neusight/labels-a100-pcie-80gb", "neusight/labels-v100-pcie-32gb"]
BATCH = "bert_large-train-512-2"
STEP = "triosim/vgg13-h100-b128"
RAW = "triosim/vgg13-h100-b512-raw"


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source)


@pytest.fixture(scope="module")
def folders(mirror: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a small mirror, and one that has another file of the same shape beside each."""
    catalogue = load_catalogue()
    files = [
        *(f for e in (".csv", ".json") for f in catalogue.held_files(mirror, MODELS, BATCH + e)),
        *catalogue.held_files(mirror, [STEP, RAW, *SINGLE_PRODUCTS]),
        *catalogue.held_files(mirror, ["neusight/operators-test"], "softmax.csv"),
    ]
    few, more = (tmp_path_factory.mktemp(name) for name in ("few", "more"))
    for file in files:
        place = file.relative_to(mirror)
        link(file, few / place)
        link(file, more / place)
        beside = place.with_name(file.name.replace("-2.", "-3.").replace("iter41", "iter42"))
        if beside == place:
            beside = place.parent.with_name(place.parent.name + "-again") / file.name
        link(file, more / beside)
    # Operators that were measured one by one, on a GPU that has a sheet and is not in the catalogue.
    name = "NVIDIA H200"
    convolutions = catalogue.held_files(mirror, ["neusight/operators-train"], "V100-PCIE-32GB.csv")
    trained = next(file for file in convolutions if "conv" in file.parts)
    extra = (more / trained.relative_to(mirror)).with_name(f"{name}.csv")
    extra.parent.mkdir(parents=True)
    pd.read_csv(trained, nrows=9).assign(Device=name).to_csv(extra, index=False)
    return few, more


def test_models_and_single_operators_are_those_of_the_catalogue(folders: tuple[Path, Path]) -> None:
    few, more = (read_rows(folder, load_cases(folder)) for folder in folders)
    pd.testing.assert_frame_equal(few, more)
    assert set(few["workload"]) == {"bert_large", "single operators", "single products, bf16"}


def test_traces_are_those_of_the_catalogue(folders: tuple[Path, Path]) -> None:
    few, more = (load_published(folder) for folder in folders)
    assert [device.name for device in few] == [device.name for device in more]
    for one, other in zip(few, more, strict=True):
        assert one.sources() == other.sources()
        assert one.traces


def test_tables_of_products_are_those_of_the_catalogue(folders: tuple[Path, Path]) -> None:
    few, more = (read_tensor_products(folder) for folder in folders)
    assert len(few) == len(more) == len(SINGLE_PRODUCTS)
    for one, other in zip(few, more, strict=True):
        pd.testing.assert_frame_equal(one, other)
