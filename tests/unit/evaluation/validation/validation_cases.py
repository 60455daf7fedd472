"""Made-up cases of the cost models' validation, with errors that can be worked by hand."""

from pathlib import Path

import pandas as pd
from trioflow import tables
from trioflow_evaluation.tables import CLASSES, OPERATORS, SCHEMAS

A100, H100 = "NVIDIA A100 80GB PCIe", "NVIDIA H100 80GB HBM3"
FOUR = "4 ranks from 2 and 8, from 64 KiB"
EIGHT = "8 ranks from 2 and 4, from 64 KiB"


def make_case(name: str, model: str, case: str, group: str, error: float, **told: object) -> dict:
    """Return a row whose prediction misses a measured second by ``error``."""
    row: dict[str, object] = {
        "set": name,
        "model": model,
        "case": case,
        "group": group,
        "device": A100,
        "source": "recorded at batch 2",
        "quantity": "operator_sum",
        "measured_s": 1.0,
        "predicted_s": 1.0 + error,
        "low_s": None,
        "high_s": None,
        "oracle_s": None,
        "extrapolated": 0.0,
    }
    return row | told


def batch_changes() -> list[dict]:
    """Return two pairs of training, one of inference, of our model, a baseline and the oracle."""
    rows = []
    for model, factor in (("shipped", 1.0), ("proportional", 10.0)):
        for case, group, error, device in (
            ("net train 2 -> 8", "train", 0.02, A100),
            ("net train 8 -> 2", "train", -0.01, A100),
            ("net inf 2 -> 8", "inf", 0.12, H100),
            ("net inf 2 -> 8", "inf forward", 0.12, H100),
        ):
            told: dict[str, object] = {"device": device, "oracle_s": 1.0}
            if model == "shipped":
                told |= {"low_s": 0.95, "high_s": 1.05 + error}
            rows.append(make_case("batch-change", model, case, group, factor * error, **told))
        rows.append(
            make_case("batch-change", model, "net train 2 -> 8", "train", 0.05, quantity="end_to_end", oracle_s=1.04)
        )
    rows.append(
        make_case("batch-change", "recorded", "net train 2 -> 8", "train", 0.04, quantity="end_to_end", oracle_s=1.04)
    )
    for case, measured, predicted in (
        ("net inf 2 -> 8: aten::mm 8x4", 0.75, 0.85),
        ("net inf 2 -> 8: aten::add 8", 0.25, 0.27),
        ("net inf 8 -> 2: aten::mm 2x4", 0.5, 0.4),
        ("net inf 8 -> 2: aten::add 2", 0.125, 0.125),
    ):
        group = "gemm forward" if "mm" in case else "elementwise forward"
        told = {"quantity": "operator", "measured_s": measured, "predicted_s": predicted, "device": H100}
        rows.append(make_case("batch-change", "shipped", case, group, 0.0, **told))
    return rows


def collectives() -> list[dict]:
    """Return all-reduces of 1 MB whose bus bandwidth is 1, 4 and 2 GB/s on 2, 4 and 8 ranks."""
    rows = []
    sizes = {2: 1.0e-3, 4: 1.5 * 1e6 / 4e9, 8: 1.75 * 1e6 / 2e9}
    for model, factor in (("measured", 1.0), ("one-bandwidth", 3.0)):
        for ranks, time_s in sizes.items():
            for group, error in (("sizes from 64 KiB", 0.01), (FOUR, 0.5), (EIGHT, 0.1)):
                if group != "sizes from 64 KiB" and not group.startswith(str(ranks)):
                    continue
                told = {
                    "device": "box",
                    "source": "others; NCCL 2, some/table",
                    "quantity": "collective",
                    "measured_s": time_s,
                    "predicted_s": time_s * (1 + factor * error),
                    "low_s": time_s * 0.9,
                    "high_s": time_s * 1.2,
                }
                case = f"all_reduce, {ranks} ranks, 1000000 bytes"
                rows.append(make_case("collectives", model, case, group, 0.0, **told))
    return rows


def make_cases() -> pd.DataFrame:
    """Return all of them as a table of ``tables.VALIDATION``."""
    frame = pd.DataFrame([*batch_changes(), *collectives()], columns=tables.VALIDATION.names)
    return frame.astype(dict.fromkeys(("low_s", "high_s", "oracle_s"), "float64"))


def make_diagnoses() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return operators and classes of one GPU; one class launches nothing."""
    operators = [
        {
            "device": A100,
            "method": "shipped",
            "workload": f"net{at % 2}",
            "mode": "train",
            "batch": 2,
            "name": "aten::mm",
            "operator_class": "gemm",
            "phase": "forward",
            "flop": 1e9 * at,
            "read_bytes": 1e6 * at,
            "write_bytes": 1e5 * at,
            "occurrences": 3,
            "recorded_s": 1e-4 * at,
            "held_out_s": 1.1e-4 * at,
            "relative_error": 0.1,
        }
        for at in range(1, 6)
    ]
    classes = [
        {
            "device": A100,
            "method": "shipped",
            "operator_class": name,
            "phase": "forward",
            "driver": driver,
            "operators": 5,
            "r_squared": fit,
            "time_share": share,
            "held_out_error": 0.1,
            "held_out_absolute_error": 0.1,
        }
        for name, driver, fit, share in (("gemm", "flop", 0.987, 1.0), ("view", "none", None, 0.0))
    ]
    return pd.DataFrame(operators), pd.DataFrame(classes).astype({"r_squared": "float64"})


def write_files(folder: Path) -> tuple[list[Path], tuple[Path, Path]]:
    """Write everything that the page reads."""
    cases, files = make_cases(), []
    for name, part in cases.groupby("set"):
        files.append(folder / "validation" / f"{name}.parquet")
        tables.write_table(part, "validation", files[-1])
    paths = folder / "operators.parquet", folder / "classes.parquet"
    for frame, path, name in zip(make_diagnoses(), paths, ("diagnosed operators", "diagnosed classes"), strict=True):
        tables.write_table(frame, name, path, schema=SCHEMAS[name])
    assert set(make_diagnoses()[0]) == set(OPERATORS.names)
    assert set(make_diagnoses()[1]) == set(CLASSES.names)
    return files, paths
