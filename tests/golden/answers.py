"""Ask the command what `questions.txt` lists and keep the answers, to compare the library before and after a move.

    python tests/golden/answers.py BEFORE.json            (PYTHONPATH says which library is asked)
    python tests/golden/answers.py --compare BEFORE.json AFTER.json

An answer is what is printed, errors too, and every row of what is written; `simulate` prints JSON and writes its
timeline where the question asks for no other form. Only how long the simulator took is left out. A minute of one core.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pyarrow.parquet as pq
import trioflow
from trioflow.cli.main import main

QUESTIONS = Path(__file__).with_name("questions.txt")
LIBRARY = Path(trioflow.__file__).parent
WALL = re.compile(r'"simulator_wall_s": [^,}]*|(?<= events in )\S+ \w+')
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


def _write_inputs(folder: Path) -> None:
    """Write what questions name as @NAME: a sharded step, arguments of Megatron-LM, platforms of each topology."""
    (folder / "sharded_step.py").write_text(SHARDED)
    (folder / "MEGATRON.sh").write_text(MEGATRON)
    for builder in BUILDERS:
        fields = f"{SIZES.get(builder, '')} bandwidth_bytes_per_s: 5.0e9, latency_s: 5.0e-6"
        sourced = re.sub(r"(\w+): ([\w.-]+)", r"\1: {value: \2, source: golden}", fields)
        links = f"ranks: 8\ntopology: {{builder: {builder}, {sourced}}}\ncommunication_on_compute_stream: "
        (folder / f"{builder.upper()}.yaml").write_text(
            f"name: {builder}\ndevice: {{sheet: a40}}\n{links}false\n"
        )
        if builder == "switch":  # the shipped CPU with its host's costs, and more of them
            gloo = (LIBRARY / "data/platforms/cpu2-gloo.yaml").read_text()
            text = re.sub("^ranks: 2$.*^host:", f"{links}true\nhost:", gloo, flags=re.M | re.S)
            (folder / "GLOO.yaml").write_text(text)


def answer_all(folder: Path) -> dict[str, dict[str, str]]:
    """Return digest and beginning of every answer; files are written below ``folder``."""
    _write_inputs(folder)
    sys.path.insert(0, str(folder))
    questions = QUESTIONS.read_text().splitlines()
    return {question: _ask(question, folder, f"answer{i}") for i, question in enumerate(questions)}


def _ask(question: str, folder: Path, name: str) -> dict[str, str]:
    said = StringIO()
    words = question.replace("@OUT", f"{folder}/{name}").replace("@", f"{folder}/").split()
    if words[0] == "simulate" and not {"--by", "--help"} & set(words):
        words += ["--json", "--timeline", f"{folder}/{name}.parquet"]
    with redirect_stdout(said), redirect_stderr(said):
        try:
            status = main(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
    text = said.getvalue().replace(str(folder), "").replace(str(LIBRARY), "")
    text = f"{status} {WALL.sub('', text)}"
    digest = hashlib.sha256(text.encode())
    for path in sorted(folder.glob(f"{name}[./]*")):
        table = path.suffix == ".parquet"
        digest.update(
            pq.read_table(path).to_pandas().to_csv().encode() if table else path.read_bytes()
        )
    return {"digest": digest.hexdigest(), "text": text[:300]}


def compare(before: Path, after: Path) -> int:
    """Print the questions whose answers differ; return the exit status."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    differ = [question for question in {**old, **new} if old.get(question) != new.get(question)]
    for question in differ:
        print(question, *(f"  {found.get(question)}" for found in (old, new)), sep="\n")
    print(f"{len(differ)} of {len({**old, **new})} answers differ")
    return int(bool(differ))


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        sys.exit(compare(Path(sys.argv[2]), Path(sys.argv[3])))
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(json.dumps(answer_all(Path(scratch)), indent=1))
