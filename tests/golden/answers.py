"""Golden answers: what the library says to the questions of `questions.txt`, kept in `expected.jsonl`.

A question is a command, an expression of Python behind `python` (with the names of `made.py`), or a sweep's
description behind `sweep`. Kept of an answer are its numbers (of long lists and tables their count, sum, and sum by
place), its names, and the class of an error; no sentence. `test_answers.py` compares them to 1e-9. After a change that
is meant:

    python tests/golden/answers.py "why they changed"

asks all questions again and writes the lines that differ anew, each with the reason. A minute of one core.
"""

import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import asdict, is_dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pandas as pd
import pyarrow.parquet as pq
import trioflow
from msgspec import Struct, structs
from trioflow.base.errors import TrioflowError
from trioflow.cli.main import main
from trioflow.sweeps.description import load_sweep
from trioflow.sweeps.scenarios import cut_chunks, simulate_sweep

FOLDERS = ("..", "../unit", "../unit/parallel", "../unit/trace/importers")
sys.path += [str(Path(__file__).parent / folder) for folder in FOLDERS]
QUESTIONS, EXPECTED = (Path(__file__).with_name(name) for name in ("questions.txt", "expected.jsonl"))
LIBRARY = Path(trioflow.__file__).parent
TOLERANCE = 1e-9
FITS, FIT_TOLERANCE = re.compile(r"python \w+_fit\("), 1e-4
"""Questions that fit a model anew: the last digits of a fit are its processor's."""
MOST = 8
"""Longer lists are kept by count and sums."""
LEFT_OUT = re.compile(r"simulator_wall_s|version|digest|created|[.]inputs")
NAME = re.compile(r"[\w.:/+*-]{1,40}")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")
SHARDED = """
import torch
from torch.distributed.fsdp import fully_shard
def make_step(row):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(row["batch"], 64)
    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return step
"""
MEGATRON = """--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 1024
--max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 32 --tensor-model-parallel-size 2
--pipeline-model-parallel-size 2 --bf16 --use-distributed-optimizer"""
SIZES = {"mesh": "rows: 2, columns: 4,", "torus": "rows: 2, columns: 4,", "fat_tree": "arity: 4,"}
BUILDERS = ("switch", "ring", "double_ring", "fully_connected", *SIZES)


SIMAI = """HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 2 pp: 1 vpp: 1 ga: 1 all_gpus: 8 checkpoints: 0
2
grad -1 0 NONE 0 0 NONE 0 5000 REDUCESCATTER 1000000 100
block -1 200000 ALLREDUCE 4000000 110000 ALLREDUCE 4000000 100000 NONE 0 100
"""
SWEEP = """description: golden
grid:
  trace: gpt2-b8
  platform: [dgx-a100, dgx-h100]
  ranks: [2, 16]
  tensor: [1, 2]
  sharding: [fsdp, none]
list:
  - {trace: gpt2-b8, platform: dgx-a100, data: 8, samples: 64}
"""


def _write_inputs(folder: Path) -> None:
    """Write what questions name as @NAME: a sharded step, arguments of Megatron-LM, other tools' files, platforms."""
    (folder / "sharded_step.py").write_text(SHARDED)
    (folder / "MEGATRON.sh").write_text(MEGATRON)
    (folder / "SIMAI.txt").write_text(SIMAI)
    (folder / "SWEEP.yaml").write_text(SWEEP)
    _write_other_tools(folder)
    for builder in BUILDERS:
        fields = f"{SIZES.get(builder, '')} bandwidth_bytes_per_s: 5.0e9, latency_s: 5.0e-6"
        sourced = re.sub(r"(\w+): ([\w.-]+)", r"\1: {value: \2, source: golden}", fields)
        links = f"ranks: 8\ntopology: {{builder: {builder}, {sourced}}}\ncommunication_on_compute_stream: "
        (folder / f"{builder.upper()}.yaml").write_text(f"name: {builder}\ndevice: {{sheet: a40}}\n{links}false\n")
        if builder == "switch":  # the shipped CPU with its host's costs, and more of them
            gloo = (LIBRARY / "data/platforms/cpu2-gloo.yaml").read_text()
            text = re.sub("^ranks: 2$.*^host:", f"{links}true\nhost:", gloo, flags=re.M | re.S)
            (folder / "GLOO.yaml").write_text(text)


def _write_other_tools(folder: Path) -> None:
    """Write a file of each other format, as the tests of their readers do."""
    import test_neusight
    import test_nsight
    import test_xla
    import triosim_files
    from small_step import small_step

    for name, content in zip(("KINETO.json", "GRAPH.json"), small_step(), strict=True):
        (folder / name).write_text(json.dumps(content))
    triosim_files.write_files(folder / "TRIOSIM")

    test_nsight.steps().write(folder / "NSIGHT.sqlite")
    test_neusight.write_table(folder / "NVIDIA_H100_80GB_HBM3", test_neusight.small_table())
    steps = [event for n in range(3) for event in test_xla.on_gpu(1000 * n, n)]
    test_xla.write(folder, *steps, name="XLA.trace.json.gz")


@cache
def _make_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    _write_inputs(Path(folder.name))
    sys.path.insert(0, folder.name)
    return folder


@cache
def _capture_sharded_step() -> None:
    ask(QUESTIONS.read_text().splitlines()[0])


def ask(question: str) -> dict[str, Any]:
    """Return what is kept of the answer to a question: a flat object of numbers and names."""
    folder = Path(_make_folder().name)
    place = f"{crc32(question.encode()):08x}"
    words = question.replace("@OUT", f"{folder}/{place}").replace("@", f"{folder}/")
    if "@TRACED" in question and not question.startswith("capture"):
        _capture_sharded_step()
    with chdir(folder):
        if question.startswith("python "):
            answer = _evaluate(words.removeprefix("python "))
        elif question.startswith("sweep "):
            answer = _predict_sweep(Path(words.removeprefix("sweep ")), folder / f"{place}.parquet")
        else:
            answer = _run(words.split(), folder / place)
    files = sorted(file for file in folder.rglob(f"{place}*/**/*") if file.is_file())
    files += sorted(file for file in folder.glob(f"{place}*") if file.is_file())
    for file in files:
        name = file.relative_to(folder).as_posix().removeprefix(place)
        answer |= {f"{name}{key}": value for key, value in _read_file(file)}
    return answer


@cache
def _list_made() -> dict[str, Any]:
    """Return the names of `made.py`."""
    import made

    return vars(made)


def _evaluate(expression: str) -> dict[str, Any]:
    try:
        value = eval(expression, {name: getattr(trioflow, name) for name in trioflow.__all__} | _list_made())
    except TrioflowError as error:
        return {"error": type(error).__name__}
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Struct):
        value = structs.asdict(value)
    return dict(_flatten("", asdict(value) if is_dataclass(value) else value))


def _predict_sweep(description: Path, target: Path) -> dict[str, Any]:
    (chunk,) = cut_chunks(load_sweep(description))
    simulate_sweep(description, chunk.digest, target)
    return {}


def _run(words: list[str], target: Path) -> dict[str, Any]:
    """Run the command; `simulate` prints JSON and writes its timeline where the question asks for no other form."""
    if words[0] == "simulate" and not {"--by", "--help"} & set(words):
        words = [*words, "--json", "--timeline", f"{target}.parquet"]
    printed, failures = StringIO(), []

    def refuse(_: str) -> int:
        failures.append(type(sys.exc_info()[1]).__name__)
        return 2

    with redirect_stdout(printed), redirect_stderr(StringIO()), patch.dict(main.__globals__, {"_refuse": refuse}):
        try:
            status = main(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
    answer: dict[str, Any] = {"status": status}
    if failures:
        answer["error"] = failures[0]
    text = printed.getvalue().replace(str(target.parent), "")
    if status:
        return answer
    if text.startswith(("{", "[")):
        return answer | dict(_flatten("", json.loads(text)))
    if "--help" in words:
        return answer | {"options": " ".join(sorted(set(re.findall(r"(?<=\s)--[\w-]+", text))))}
    text = re.sub(r"(?<= events in )\S+ \w+", "", text)
    return answer | dict(_flatten("printed", [float(word) for word in NUMBER.findall(text)]))


def _read_file(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield what is kept of a written file: of a table its columns, of Chakra its nodes, of others the bytes."""
    if file.suffix == ".parquet":
        yield from _sum_columns("", pq.read_table(file).to_pandas())
    elif file.suffix == ".csv":
        yield from _sum_columns("", pd.read_csv(file))
    elif file.suffix == ".et":
        import chakra_wire

        yield from _sum_columns("", pd.json_normalize(chakra_wire.read(file)[1]))
    elif file.suffix == ".json":
        yield from _flatten("", json.loads(file.read_text()))
    else:
        yield "", crc32(file.read_bytes())


def _sum_columns(path: str, frame: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    for name in frame.columns:
        if not LEFT_OUT.search(str(name)):
            yield from _flatten(f"{path}.{name}", [*range(MOST + 1), *frame[name].tolist()])


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and names in a value, by their paths; long lists by count, sum and sum by place."""
    if LEFT_OUT.search(path):
        return
    if isinstance(value, Mapping):
        for key in value:
            yield from _flatten(f"{path}.{key}", value[key])
    elif isinstance(value, pd.DataFrame):
        yield from _sum_columns(path, value)
    elif isinstance(value, str):
        if NAME.fullmatch(value):
            yield path, value
    elif isinstance(value, Sequence):
        if len(value) <= MOST:
            for place, one in enumerate(value):
                yield from _flatten(f"{path}.{place}", one)
        elif all(isinstance(one, Mapping) for one in value):
            yield from _sum_columns(path, pd.DataFrame(value))
        else:
            numbers = [_number(one) for one in value]
            yield (path, [len(value), math.fsum(numbers), math.fsum(i * n for i, n in enumerate(numbers, 1))])
    elif hasattr(value, "item"):
        yield from _flatten(path, value.item())
    elif value is None or isinstance(value, bool | int | float):
        yield path, None if isinstance(value, float) and math.isnan(value) else value


def _number(value: Any) -> float:
    """Return a number for a cell: text by its checksum, nothing as 0, what holds others by their sum."""
    if isinstance(value, Mapping):
        return math.fsum(map(_number, value.values()))
    if isinstance(value, list | tuple):
        return math.fsum(map(_number, value))
    if isinstance(value, int | float):
        return 0.0 if math.isnan(value) else float(value)
    return 0.0 if value is None else float(crc32(str(value).encode()) % 10**6)


def list_differences(old: Mapping[str, Any], new: Mapping[str, Any], question: str = "") -> list[str]:
    """Return a line for each value that is not what was kept: numbers to `TOLERANCE`, of `FITS` to theirs."""
    tolerance = FIT_TOLERANCE if FITS.match(question) else TOLERANCE
    return [
        f"{key}: {old.get(key, 'not there')} -> {new.get(key, 'not there')}"
        for key in {**old, **new}
        if key not in old or key not in new or not _same(old[key], new[key], tolerance)
    ]


def _same(old: Any, new: Any, tolerance: float) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_same(*pair, tolerance) for pair in zip(old, new, strict=True))
    if isinstance(old, float) or isinstance(new, float):
        numbers = isinstance(old, int | float) and isinstance(new, int | float)
        return numbers and math.isclose(old, new, rel_tol=tolerance, abs_tol=1e-15)
    return bool(old == new)


def read_expected() -> dict[str, dict[str, Any]]:
    """Return the kept lines by question: the reason of the last change and the values."""
    lines = EXPECTED.read_text().splitlines() if EXPECTED.exists() else []
    return {line["question"]: line for line in map(json.loads, lines)}


def rewrite(reason: str, word: str = "") -> None:
    """Ask all questions in which a word stands; write the lines that differ anew with a reason, and print what differs."""
    expected = read_expected()
    lines = []
    for question in QUESTIONS.read_text().splitlines():
        line = expected.get(question)
        values = ask(question) if word in question or not line else line["values"]
        differences = list_differences(line["values"], values, question) if line else ["new"]
        if differences:
            print(question, *(f"    {one}" for one in differences[:MOST]), sep="\n")
            line = {"question": question, "reason": reason, "values": values}
        lines.append(json.dumps(line))
    EXPECTED.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    rewrite(*sys.argv[1:])
