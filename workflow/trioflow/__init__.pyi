from typing import TYPE_CHECKING

if TYPE_CHECKING:  # mypy then reads the modules first
    from trioflow.base.errors import TrioflowError as TrioflowError
    from trioflow.base.plan_row import Plan as Plan
    from trioflow.costmodel.choices import load_named_platform as load_named_platform
    from trioflow.hardware.machine import Platform as Platform
    from trioflow.parallel.plan import make_plan as make_plan
    from trioflow.parallel.plan import named_plan as named_plan
    from trioflow.prediction.assembly import Prediction as Prediction
    from trioflow.prediction.assembly import predict as predict
    from trioflow.prediction.fitting import find_largest as find_largest
    from trioflow.prediction.known import models as models
    from trioflow.prediction.known import platforms as platforms
    from trioflow.prediction.question import Options as Options
    from trioflow.report.charts import plot as plot
    from trioflow.sweeps.search import SearchResult as SearchResult
    from trioflow.sweeps.search import plan as plan
    from trioflow.sweeps.search import search as search
    from trioflow.trace.store import Trace as Trace
    from trioflow.trace.store import load_trace as load_trace

__version__: str
__all__ = [
    "Options",
    "Plan",
    "Platform",
    "Prediction",
    "SearchResult",
    "Trace",
    "TrioflowError",
    "find_largest",
    "load_named_platform",
    "load_trace",
    "make_plan",
    "models",
    "named_plan",
    "plan",
    "platforms",
    "plot",
    "predict",
    "search",
]
