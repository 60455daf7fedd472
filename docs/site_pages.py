"""Pages of the site that are no file of docs/: generated from the code, or kept where others look for them.

mkdocs calls these functions (`hooks` of mkdocs.yml); `make site` does it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from trioflow import tables
from trioflow.cli.main import COMMANDS, build_parser
from trioflow.report.pages import FILES

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "config/README.md": "config_reference.md",
    "workflow/DESIGN.md": "design.md",
    "workflow/resources/cost_models/README.md": "shipped_models.md",
}
"""Markdown that lies outside docs/, and what it is called in the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add what is generated."""
    pages = {name: (ROOT / source).read_text("utf-8") for source, name in ELSEWHERE.items()}
    pages["command_reference.md"] = "\n".join(describe_commands())
    pages["table_reference.md"] = "\n".join(describe_tables())
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to what lies outside docs/ to its page of the site."""
    for source, name in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return markdown


def describe_commands() -> Iterator[str]:
    """Describe every subcommand as its own help does."""
    os.environ["COLUMNS"] = "100"
    yield "# Commands\n\nWhat `trioflow COMMAND --help` says, of every command.\n"
    actions = build_parser()._actions
    parsers = next(action for action in actions if action.dest == "command").choices
    for name, (summary, _) in COMMANDS.items():
        text = parsers[name].format_help()
        yield f"## {name}\n\n{summary.capitalize()}.\n\n```text\n{text}```\n"


def describe_tables() -> Iterator[str]:
    """Describe every table's file and columns, from the schemas that readers and writers check."""
    yield "# Tables\n\nEvery table is a Parquet file; units stand in the names of columns and here.\n"
    for name, schema in tables.SCHEMAS.items():
        yield f"## {name}\n"
        if name in FILES:
            yield f"`{FILES[name]}` below the results' folder.\n"
        yield "| Column | Type | Unit | Meaning |\n|---|---|---|---|"
        for field in schema:
            facts = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
            cells = (
                f"`{field.name}`",
                str(field.type),
                facts.get("unit", ""),
                facts.get("meaning", ""),
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""
