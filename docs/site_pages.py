"""Pages of the site that are no file of docs/: generated from the code, or kept where others look for them.

mkdocs calls these functions (`hooks` of mkdocs.yml); `make site` does it.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.structure.files import File, Files
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
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


SHEETS = '<style id="hljs-light"></style><style id="hljs-dark"></style>'
"""What the theme's switch between light and dark looks for, though no code is coloured here."""


def on_config(config: Any) -> Any:
    """Choose the addresses of headings, and note what pages are called."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = name_heading
    return config


def name_heading(text: str, separator: str) -> str:
    """Return a heading's address, which begins with a letter: the theme's script reads it as a selector."""
    return re.sub(r"^(?=\d)", f"n{separator}", slugify(text, separator))


def on_post_page(output: str, **_: Any) -> str:
    """Add what the theme's scripts look for."""
    return output.replace("</head>", f"{SHEETS}</head>", 1)


def on_files(files: Files, config: Any) -> Files:
    """Add what is generated."""
    pages = {name: (ROOT / source).read_text("utf-8") for source, name in ELSEWHERE.items()}
    pages["command_reference.md"] = "\n".join(describe_commands())
    pages["table_reference.md"] = "\n".join(describe_tables())
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = "\n\n".join(describe_notebook(path))
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def list_titles(nav: Any) -> dict[str, str]:
    """Return what the navigation calls each page."""
    if isinstance(nav, dict):
        own = {to: title for title, to in nav.items() if isinstance(to, str)}
        return own | {k: v for to in nav.values() for k, v in list_titles(to).items()}
    return {k: v for one in nav for k, v in list_titles(one).items()} if isinstance(nav, list) else {}


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Lead links to notebooks, and to what lies outside docs/, to their pages of the site, by their titles."""
    titles = list_titles(config["nav"])
    titles |= {source: titles[name] for source, name in ELSEWHERE.items() if name in titles}
    markdown = re.sub(r"\[(?:docs/)?([\w/]+\.md)\](?=\()", lambda m: f"[{titles.get(m[1], m[1])}]", markdown)
    for source, name in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return re.sub(r"\]\(([\w/]+)\.ipynb\)", r"](\1.md)", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Colour code by its language: here, since the theme's own highlighting asks a server for its script."""

    def colour(match: re.Match[str]) -> str:
        text = highlight(html.unescape(match[3]), get_lexer_by_name(match[2]), HtmlFormatter(nowrap=True))
        return f"{match[1]}{text}</code>"

    return re.sub(
        r'(<code class="language-(sh|python|yaml|toml|json|xml)">)(.*?)</code>', colour, content, flags=re.DOTALL
    )


def describe_notebook(path: Path) -> Iterator[str]:
    """Describe a notebook: its text, its code, and what the code gave."""
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield text
            if not number:  # ./ keeps the link to the file itself
                yield f"[This notebook](./{path.name}) to run and change; `make notebooks` executes it."
            continue
        shell = text.startswith("%%bash\n")
        yield f"```{'sh' if shell else 'python'}\n{text.removeprefix('%%bash').strip()}\n```"
        for output in cell["outputs"]:
            data = {kind: "".join(lines) for kind, lines in output.get("data", {}).items()}
            if "image/png" in data:
                name = html.escape(cell["metadata"]["figure"])
                yield f'<img alt="{name}" src="data:image/png;base64,{data["image/png"].strip()}">'
            elif "text/html" in data:
                table = re.sub(r"<style.*?</style>|\n\s*| border=.1.", "", data["text/html"], flags=re.DOTALL)
                table = re.sub("<td>([^<]{20,})</td>", r'<td class="long">\1</td>', table)
                yield f'<div class="output">{fold_warnings(table)}</div>'
            else:
                told = data.get("text/plain") or "".join(output["text"])
                yield f'<div class="output"><pre>{html.escape(told.rstrip())}</pre></div>'


def fold_warnings(table: str) -> str:
    """Put the rows of an answer that are warnings into a table of their own, which opens when pressed."""
    found = re.findall(r"<tr><th[^>]*>warning</th>.*?</tr>", table, flags=re.DOTALL)
    if not found:
        return table
    for row in found:
        table = table.replace(row, "")
    count = f"{len(found)} warning{'s' if len(found) > 1 else ''}"
    return f"{table}<details><summary>{count}</summary><table>{''.join(found)}</table></details>"


def on_post_build(config: Any) -> None:
    """Leave out the theme's page of errors, whose links hold at the root of a server alone."""
    (Path(config["site_dir"]) / "404.html").unlink(missing_ok=True)


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
            cells = (f"`{field.name}`", str(field.type), facts.get("unit", ""), facts.get("meaning", ""))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""
