"""Tables of the evaluation, as ``trioflow.tables``: columns stand in ``data/tables.tsv``."""

from collections.abc import Mapping

import pyarrow as pa
from trioflow import tables
from trioflow.report.errors import CASE_SCORES, COUNTS
from trioflow.tables import column
from trioflow.tables.schemas import read_schemas

from trioflow_evaluation import DATA

MEASURED_HERE = "measured here"
MEASURED_PUBLIC = "measured, public"
ONLY_SIMULATED = "only simulated"
EVIDENCE_KINDS = (MEASURED_HERE, MEASURED_PUBLIC, ONLY_SIMULATED)
"""What a number rests on: runs of this machine, public tables of others, or no measurement at all."""

_TABLES = read_schemas(f"{DATA}/tables", tables.SCHEMAS)
EVIDENCE, SHARES = _TABLES["evidence"], _TABLES["shares"]
SIMULATOR_TIMES, COSTS = _TABLES["simulator_times"], _TABLES["costs"]
WAFER, HOP = _TABLES["wafer"], _TABLES["hop"]
TIMESTAMPS, ACTIVITY = _TABLES["timestamps"], _TABLES["activity"]
OPERATORS, CLASSES = _TABLES["operators"], _TABLES["classes"]
PARAMETERS, CHECKS = _TABLES["parameters"], _TABLES["checks"]
"""Comparisons that are not a set of cases of their own."""
CLUSTER_MEMORY, CLUSTER_STEPS = _TABLES["cluster_memory"], _TABLES["cluster_steps"]
CLUSTER_PEAKS, CLUSTER_RATES = _TABLES["cluster_peaks"], _TABLES["cluster_rates"]
DRIFT_HALVES, DRIFT_CAUSES = _TABLES["drift_halves"], _TABLES["drift_causes"]
ANALYTICAL = _TABLES["analytical"]

_MAY_LACK = {"oracle_mean_absolute_error", "beside_oracle_error", "coverage", "mean_relative_width", "interval_score"}

SUMMARY = pa.schema(
    [
        *(tables.VALIDATION.field(name) for name in ("set", "quantity", "group", "model")),
        *(
            column(name, tables.INT if name in COUNTS else tables.FLOAT, text, null=name in _MAY_LACK)
            for name, text in CASE_SCORES.items()
        ),
    ]
)

SCHEMAS: Mapping[str, pa.Schema] = {"summary": SUMMARY, "diagnosed operators": OPERATORS, "diagnosed classes": CLASSES}
"""Of the page of cost models, by the names of its tables."""
