"""No sentence that a user can meet is one of those that took a second reading, or has a word that the field does not use.

What users meet: README, the documents, the help of the command, and texts in the library (strings, templates, tables).
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from trioflow.cli.main import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
OLD = """
with what the allocator keeps free
with context and communicators
added up as shards
messages of tensor parallelism beside
beside backward's products
plans outlined
outlines of the simulated plans
a plan to choose from
shared by plans as far as both depend
at the price given
from shapes alone
by the share of the roofline
no time was recorded
too little to decide the word of confidence
gets equally many tokens, and none
a cost model has to give them
devices wait
returns a model alone
nothing joins a rank
without a plan; give --plan or degrees
of a step that has none; name a language model
heads cannot be shared by
warnings that say the same are one
that speak through files
what cut them
tensor parallelism gathers before it
names of one gpu are one gpu
ranks drift
closest to half
is missing the report says so
throughput lost by the plan chosen
judged by a fit that saw it
is what `make reproduce` measured
a project on top
whose commands are tests
other simulators took
""".strip().splitlines()
"""Of each sentence what is its own, in lower case."""
IDIOMS = {
    r"\b(samples?|tokens/s|GB|bytes|FLOP/s|tokens|ports|NICs?|cards|GPUs|H100|A100|links?) an? (rank|GPU|node|circuit)\b": "per GPU",
    r"\bmatrix products?\b|\bproducts? in (bf16|fp16|fp32|tf32|fp8)\b|\bgrouped products?\b": "GEMM, matmul",
    r"\b(messages|exchanges|communication) beside\b": "overlap",
    r"\bplans? (is|are|were) outlined\b|\boutlines? (of|by) (a|the|plans)\b": "estimate",
    r"\branks? (is|are|were) folded\b|\bfolded ranks\b": "identical ranks simulated once",
    r"\b(a|each|the) (thousand|million) a (rank|GPU|second)\b": "per",
    r"\bcarried over (to|from)\b": "transferred",
}
"""What the field says otherwise, with its word."""


def read_strings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield where a module's texts are, and the texts; no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own and " " in node.value:
            yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def list_texts() -> Iterator[tuple[str, str]]:
    """Yield every text that a user can meet, with its place."""
    pages = [ROOT / "README.md", ROOT / "config/README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    library = ROOT / "workflow"
    tables = [path for end in ("html", "toml", "rst", "yaml") for path in library.glob(f"trioflow*/data/**/*.{end}")]
    for path in pages + tables:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line
    for path in library.glob("trioflow*/**/*.py"):
        yield from read_strings(path)
    parsers = next(action for action in build_parser()._actions if action.dest == "command").choices
    for name in COMMANDS:
        yield f"trioflow {name} --help", " ".join(parsers[name].format_help().split())


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    return [*list_texts()]


def test_no_sentence_is_one_that_took_a_second_reading(texts: list[tuple[str, str]]) -> None:
    assert len(texts) > 5000
    found = [f"{place}: {old}" for place, text in texts for old in OLD if old in text.lower()]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("idiom", IDIOMS)
def test_texts_have_the_words_of_the_field(texts: list[tuple[str, str]], idiom: str) -> None:
    found = [f"{place}: {hit[0]}" for place, text in texts if (hit := re.search(idiom, text))]
    assert not found, f"the field says {IDIOMS[idiom]}:\n" + "\n".join(found)
