"""The page of ``trioflow ui``: it answers as ``simulate`` does, and whoever else asks, or asks for more, is refused."""

import asyncio
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import Browser, list_faults, list_requests, read_axe, run_driver
from trioflow.cli.answer import add_run, predict_options
from trioflow.cli.main import build_parser, main
from trioflow.parallel.plan import make_plan
from trioflow.ui.page import Command, Studio, list_fields, serve

FORM = {"model": "gpt2-b8", "platform": "dgx1-v100", "ranks": 4, "plan": "ddp", "batch": 32}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.yaml").write_text("name: own")
    found: list[str] = []
    loop = asyncio.new_event_loop()
    task = loop.create_task(
        serve(Studio(Command(build_parser(["simulate"]), predict_options, add_run), folder), 0, found.append)
    )
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    while not found:
        time.sleep(0.05)
    yield found[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(timeout=30)


def ask(address: str, content: Any, place: str = "answer", **headers: str) -> tuple[int, Any]:
    """Return status and answer of a question; ``content``: bytes, or what is sent as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"Content-Type": "application/json", "Origin": address.rstrip("/")} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    request = urllib.request.Request(address + place, body, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as found:
            text = found.read().decode()
            return found.status, text if place == "html" else json.loads(text)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_answers_as_the_command_that_it_gives(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    form = FORM | {"scale_network": 2, "price_per_gpu_hour": 2.5}
    status, found = ask(address, {"form": form})
    assert status == 200 and len(found["items"]) >= 3 and "80 % interval" in found["html"]
    assert "operator times" in found["html"] and ">cost model" not in found["html"]
    words = found["command"].split()
    assert words[0] == "trioflow" and main([*words[1:], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    kept = yaml.safe_load(found["yaml"])
    assert kept["command"] == found["command"] and kept["form"] == form
    numbers = ("step_time_s", "low_s", "high_s")
    assert [kept["answer"][name] for name in numbers] == pytest.approx([answer[name] for name in numbers])
    assert kept["answer"]["confidence"] == answer["confidence"]
    assert kept["from"]["platform"] == "dgx1-v100"


def test_the_first_answer_recomputes_no_more_than_the_command() -> None:
    assert list_fields(build_parser(["simulate"]))["recompute"].value == make_plan().recompute


def test_two_forms_are_compared_and_kept_as_a_page(address: str) -> None:
    status, found = ask(address, {"form": FORM, "against": FORM | {"plan": "fsdp"}})
    assert status == 200 and "Why one plan is faster" in found["html"]
    status, page = ask(address, {"form": FORM}, "html")
    assert status == 200 and page.startswith("<!DOCTYPE html>") and "default-src 'none'" in page


def test_a_slider_is_answered_in_a_second_once_the_graph_is_known(address: str) -> None:
    ask(address, {"form": FORM})
    begin = time.process_time()
    status, _ = ask(address, {"form": FORM | {"scale_network": 0.5}})
    assert status == 200 and time.process_time() - begin < 1, (
        "CPU time, of the server too: it is a thread of this process"
    )


HOSTILE = {
    "path": {"form": FORM | {"model": "../../etc/passwd"}},
    "file": {"form": FORM | {"platform": "/etc/passwd"}},
    "code": {"form": FORM | {"model": "os:system"}},
    "script": {"form": FORM | {"model": "<script>alert(1)</script>"}},
    "flag": {"form": FORM | {"plan": "--timeline=/tmp/x.json"}},
    "huge": {"form": FORM | {"ranks": 10**30}},
    "negative": {"form": FORM | {"batch": -8}},
    "fraction": {"form": FORM | {"ranks": 2.5}},
    "no number": {"form": FORM | {"batch": "8; rm -rf /"}},
    "truth": {"form": FORM | {"batch": True}},
    "controls": {"form": FORM | {"model": "gpt2\u0000\u202e"}},
    "unknown key": {"form": FORM | {"trace": "x"}},
    "unknown part": {"form": FORM, "html": "x"},
    "list": {"form": [FORM]},
    "nothing": {},
    "NaN": b'{"form": {"model": "gpt2-b8", "platform": "dgx1-v100", "batch": NaN}}',
    "infinite": b'{"form": {"model": "gpt2-b8", "platform": "dgx1-v100", "batch": 1e999}}',
    "digits": b'{"form": {"batch": ' + b"9" * 9000 + b"}}",
    "deep": b"[" * 9000,
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_questions_are_refused_in_a_sentence(address: str, name: str) -> None:
    status, text = ask(address, HOSTILE[name])
    problem = json.loads(text)["problem"]
    assert status == 400 and problem and "Traceback" not in problem and "<script>" not in problem
    assert ask(address, {"form": FORM})[0] == 200, "and it goes on"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content_Type": "text/plain"}, 415),
    ],
)
def test_other_pages_and_names_may_not_ask(address: str, headers: dict[str, str], status: int) -> None:
    assert ask(address, {"form": FORM}, **headers)[0] == status


def test_a_request_is_small_and_only_the_page_is_served(address: str) -> None:
    with pytest.raises((urllib.error.URLError, ConnectionError, AssertionError)):
        status, _ = ask(address, b" " * 1_000_000)
        assert status == 200
    assert ask(address, {"form": FORM}, "../../etc/passwd")[0] == 404
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=30) as page:
        policy, text = page.headers["Content-Security-Policy"], page.read().decode()
    assert "unsafe-inline'; img" in policy and "script-src 'nonce-" in policy
    assert "own.yaml" in text and "Access-Control-Allow-Origin" not in page.headers


def check_looks(browser: Browser, axe: str) -> None:
    for width in (1280, 420):
        browser.resize(width, 900)
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            assert browser.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
            assert not list_faults(browser, axe), (width, scheme)
    assert not [one for one in browser.log("browser") if one["level"] == "SEVERE"]


def test_without_bokeh_all_else_runs_and_one_sentence_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("trioflow.report.charts", "trioflow.ui.page"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    build_parser()
    assert main(["ui", "--no-browser"]) == 2
    assert (
        main(["memory", "gpt2-b8", "--plan", "ddp", "--ranks", "2", "--platform", "dgx1-v100", "--html", "x.html"]) == 2
    )
    problems = capsys.readouterr().err.splitlines()
    assert len(problems) == 2 and all("pictures need bokeh" in one and "[ui]" in one for one in problems)


@pytest.mark.slow
@pytest.mark.pages
def test_in_a_browser_a_slider_moves_the_charts_and_axe_finds_nothing(address: str, tmp_path: Path) -> None:
    axe = read_axe(tmp_path / "axe")
    with run_driver(tmp_path / "log.txt") as driver:
        browser = Browser(driver, tmp_path / "profile")
        browser.open(address)
        browser.wait_for("document.documentElement.dataset.answers >= 1")
        first = browser.evaluate("document.getElementById('verdict').textContent")
        for name, value in (("model", "gpt2-b8"), ("platform", "dgx1-v100")):
            browser.evaluate(f"document.getElementById('field-{name}').value = '{value}'")
        slide = "document.getElementById('field-scale_network')"
        browser.evaluate(f"({slide}.value = 20, {slide}.dispatchEvent(new Event('input', {{bubbles: true}})))")
        browser.wait_for("document.documentElement.dataset.answers >= 2")
        assert browser.evaluate("document.getElementById('verdict').textContent") != first
        assert not browser.evaluate("document.getElementById('problem').textContent")
        check_looks(browser, axe)
        file = tmp_path / "answer.html"
        file.write_text(ask(address, {"form": FORM, "against": FORM | {"plan": "fsdp"}}, "html")[1])
        browser.open(file.as_uri())
        browser.wait_for("document.documentElement.dataset.drawn >= 4")
        check_looks(browser, axe)
        fetched = [one for one in list_requests(browser) if not one.startswith(("data:", "blob:"))]
        assert set(fetched) <= {address, f"{address}answer", file.as_uri()}
        browser.close()
