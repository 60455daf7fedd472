"""Draw the pictures of README and of the tour, docs/figures/*.png, from answers of today's library.

`make pictures` draws all, `python docs/draw_pictures.py NAME...` some. Each is the page of an answer, with some of its
charts, as chromium shows it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import trioflow
from PIL import Image, ImageChops
from trioflow.prediction.assembly import Prediction
from trioflow.report.charts import ChartPage, draw_parts, plot, plot_scaling

FIGURES = Path(__file__).parent / "figures"
WIDTH, HEIGHT, MARGIN = 1000, 2400, 16
"""Of the window, and what is left around the page [pixels]."""
LLAMA = {"sequence": 8192, "precision": "fsdp2-mixed", "batch": 64}


def predict(trace: str, plan: str, ranks: int, platform: str, **more: object) -> Prediction:
    """Return a prediction by names."""
    return trioflow.predict(trace, trioflow.named_plan(plan, ranks), platform, **more)  # type: ignore[arg-type]


def choose(page: ChartPage, *titles: str) -> ChartPage:
    """Return a page with the charts of these titles alone."""
    charts = [chart for title in titles for chart in page.charts if chart.title == title]
    assert len(charts) == len(titles), [chart.title for chart in page.charts]
    return replace(page, charts=charts)


def compare(title: str, verdict: str, answers: Mapping[str, Prediction]) -> ChartPage:
    """Return a page of where the steps of some answers go."""
    return ChartPage(title, verdict, (), [draw_parts(answers)])


def draw_answer() -> ChartPage:
    """Draw an answer as it opens: where the step goes, and what fills the memory."""
    page = plot(predict("llama-3.1-8b", "fsdp", 64, "dgx-h100", fusion="compile", **LLAMA))
    return replace(choose(page, "Where the step goes", "What fills the memory"), facts=(), warnings=())


def draw_which_plan() -> ChartPage:
    """Draw two plans side by side."""
    same = {"sequence": 8192, "precision": "megatron-bf16", "batch": 128}
    degrees = {"data": 32, "tensor": 2, "sequence_parallel": True, "sharding": "distributed", "accumulate": 4}
    first, second = (
        trioflow.predict("llama-3.1-8b", plan, "dgx-h100", **same)
        for plan in (trioflow.named_plan("fsdp", 64), trioflow.make_plan(**degrees))
    )
    page = plot(first, second)
    return replace(page, facts=(), warnings=(), charts=page.charts[:2])


def draw_will_it_fit() -> ChartPage:
    """Draw what fills the memory, and when."""
    page = plot(predict("llama-3.1-8b", "fsdp", 8, "dgx-h100", **LLAMA | {"batch": 8}))
    return replace(choose(page, "Memory over the step", "What fills the memory"), facts=(), warnings=())


def draw_cost() -> ChartPage:
    """Draw throughput and MFU of one batch on more and more GPUs."""
    words = "llama-3.1-8b --plan fsdp --gpus 8..512xH100 --batch 512 --json"
    command = [sys.executable, "-m", "trioflow", "scaling", *words.split()]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return replace(plot_scaling(answer), facts=(), warnings=())


def draw_my_model() -> ChartPage:
    """Draw the timeline of a captured model."""
    page = plot(predict("resnet50-b128", "ddp", 8, "dgx-h100"))
    return replace(choose(page, "When it runs"), facts=(), warnings=())


def draw_my_cluster() -> ChartPage:
    """Draw one plan on networks of several speeds."""
    rates = {"400 GB/s between nodes": 400e9, "100 GB/s": 100e9, "25 GB/s": 25e9, "TCP sockets": "tcp"}
    answers = {
        name: predict("llama-3.1-8b", "fsdp", 64, "dgx-h100", inter_node_bandwidth=rate, **LLAMA)
        for name, rate in rates.items()
    }
    return compare("Llama 3.1 8B, FSDP on 64 H100", "The network between nodes decides below some 50 GB/s.", answers)


def draw_healthy() -> ChartPage:
    """Draw what a slow network does to a step, as `explain` finds it."""
    plan = trioflow.make_plan(data=8, tensor=8, sequence_parallel=True, sharding="distributed")
    more = LLAMA | {"precision": "nanotron-bf16"}
    answers = {
        name: trioflow.predict("llama-3.1-8b", plan, platform, **more)
        for name, platform in (("as described", "p5-h100"), ("as measured", "p5-h100-slow"))
    }
    return compare(
        "Llama 3.1 8B, DP8 x TP8 on 64 H100", "The same plan on the cluster as described and as measured.", answers
    )


def draw_compare_gpus() -> ChartPage:
    """Draw one plan on three GPUs."""
    platforms = {"A100": "dgx-a100", "H100": "dgx-h100", "B200": "dgx-b200"}
    answers = {name: predict("llama-3.1-8b", "fsdp", 64, platform, **LLAMA) for name, platform in platforms.items()}
    return compare("Llama 3.1 8B, FSDP on 64 GPUs", "8 nodes of 8 GPUs, 64 sequences of 8,192 tokens.", answers)


PICTURES: Mapping[str, Callable[[], ChartPage]] = {
    name.removeprefix("draw_"): made
    for name, made in list(globals().items())
    if name.startswith("draw_") and name != "draw_parts"
}


def photograph(page: ChartPage, path: Path) -> None:
    """Write a page as chromium shows it, without its end and the empty space around it."""
    hidden = "<style>details, footer, main > h2, main > pre { display: none } body { padding-bottom: 0 }</style></head>"
    for chart in page.charts:
        chart.figure.toolbar_location = None
    with tempfile.TemporaryDirectory() as folder:
        shown, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        shown.write_text(page.render().replace("</head>", hidden, 1), encoding="utf-8")
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        size = f"--window-size={WIDTH},{HEIGHT}"
        wait = "--virtual-time-budget=5000"
        words = [*command, f"--user-data-dir={folder}/profile", size, wait, f"--screenshot={shot}", shown.as_uri()]
        subprocess.run(words, check=True, capture_output=True)
        image = Image.open(shot).convert("RGB")
    ground = Image.new("RGB", image.size, image.getpixel((0, 0)))
    left, top, right, bottom = ImageChops.difference(image, ground).getbbox()
    box = (max(left - MARGIN, 0), max(top - MARGIN, 0), right + MARGIN, bottom + MARGIN)
    image.crop(box).quantize(64).save(path, optimize=True)


def main(names: list[str]) -> None:
    """Draw the pictures of these names, or all."""
    for name in names or PICTURES:
        photograph(PICTURES[name](), FIGURES / f"{name}.png")
        print(name, (FIGURES / f"{name}.png").stat().st_size // 1000, "kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
