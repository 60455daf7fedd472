"""A small fit of every kind, as text: what `test_kernels` compares between processors' kernels."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from trioflow.costmodel.collectives.message_curve import fit_message_curve
from trioflow.costmodel.collectives.methods import fit_alpha_beta
from trioflow.costmodel.collectives.points import thin
from trioflow.costmodel.new_gpu.data import pair_rows
from trioflow.costmodel.new_gpu.fit import describe_pairs, fit_exponents
from trioflow.costmodel.operators.curves import FORMS, fit_curve
from trioflow.costmodel.operators.device_fit import fit_device_model
from trioflow.costmodel.operators.model import METHODS, fit_operator_model

from costmodel.gpu_synthetic import LIMITS, law_rows, make_gpu_traces

SIZES = 40


def digest_fits() -> str:
    """Return every fitted number of a few models."""
    traces = make_gpu_traces()
    models = [fit_device_model(traces, LIMITS)[0]]
    models += [fit_operator_model(traces, method=method)[0] for method in METHODS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        found = []
        for model in models:
            model.save(path)
            found.append(json.loads(path.read_text()) | {"provenance": None})
    laws = str(fit_exponents(describe_pairs(pair_rows(law_rows()))))
    return json.dumps([found, _fit_curves(), _fit_collectives(), laws])


def _noisy(times: np.ndarray) -> np.ndarray:
    """Return times that miss by some per cent, the same everywhere."""
    return times * (1 + 0.01 * (np.arange(len(times)) * 7 % 11 - 5))


def _fit_curves() -> dict[str, tuple[float, ...]]:
    """Return all forms fitted to sizes of which two nearly say the same."""
    flop = 2.0**20 * (1 + np.arange(SIZES) * 13 % 29)
    features = np.column_stack([flop, flop * 3 + np.arange(SIZES), flop[::-1]])
    times = _noisy(5e-6 + features[:, 1] / 1e12 + features[:, 0] / 3e13)
    return {form: fit_curve(form, features, times).coefficients for form in FORMS}


def _fit_collectives() -> list[object]:
    sizes = np.round(2.0 ** np.linspace(10, 30, 200))
    times = _noisy(2e-5 + sizes / 1e11)
    points = pd.DataFrame(
        {
            "collective": "all_reduce", "ranks": 4, "nodes": 1, "message_bytes": sizes,
            "time_s": times, "library": "made up", "dataset": "made up", "rounds": 1,
        }
    )  # fmt: skip
    line = fit_message_curve(sizes, times * 1e9)
    thinned = thin(points)["time_s"].tolist()
    return [line.alpha_s, line.beta_s_per_byte, thinned, str(fit_alpha_beta(points).lines)]


if __name__ == "__main__":
    sys.stdout.write(digest_fits())
