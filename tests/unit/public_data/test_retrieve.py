"""Retrieval against a real server that truncates, corrupts, refuses, hangs; and from a mirror."""

import hashlib
import random
import resource
import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from trioflow.base.errors import DatasetError, InputError
from trioflow.datasets.catalogue import DatasetFile
from trioflow.datasets.retrieve import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    THERE,
    Retrieval,
    Source,
    choose_source,
    retrieve_file,
)

from . import server as on

CONTENT = on.make_content()
ENTRY = on.make_entry(CONTENT)
OTHER = on.make_content(len(CONTENT) + 32)[32:]
"""Another content of the same size."""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "TRIOFLOW_DATA_MIRROR"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "data" / ENTRY.key


@pytest.fixture
def waits() -> list[float]:
    return []


def get(
    served: on.Served, target: Path, waits: list[float] | None = None, entry: DatasetFile = ENTRY, **options: object
) -> Retrieval:
    sleep = (lambda _: None) if waits is None else waits.append
    lfs_url, mirror = options.pop("lfs_url", ""), options.pop("mirror", None)
    source = Source(served.url, lfs_url, mirror)  # type: ignore[arg-type]
    return retrieve_file(entry, target, source, **{"timeout_s": 5.0, "sleep": sleep, **options})  # type: ignore[arg-type]


def fails(served: on.Served, target: Path, *words: str, **options: object) -> str:
    """Retrieve, expecting one sentence with these words and no file at the target."""
    with pytest.raises(DatasetError) as caught:
        get(served, target, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
    assert not target.exists()
    return text


def test_a_file_comes_from_its_pinned_address_whatever_its_name(target: Path) -> None:
    with on.serve_entry(ENTRY, CONTENT) as served:
        assert get(served, target) == Retrieval(target, f"{served.url}/{ENTRY.address}")
    assert target.read_bytes() == CONTENT
    assert served.asked == [f"/some/data.set/{on.COMMIT}/some%20folder/a%20%281%29%20%5Bx%5D%20%23%2B%25%3F.csv"]
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert target.stat().st_mode & 0o777 == 0o644


def test_a_file_that_is_there_and_right_is_left_alone(target: Path) -> None:
    with on.serve_entry(ENTRY, CONTENT) as served:
        get(served, target)
        made = target.stat().st_mtime_ns
        assert get(served, target).source == THERE
    assert len(served.asked) == 1 and target.stat().st_mtime_ns == made


@pytest.mark.parametrize("wrong", [OTHER, CONTENT[:-1], CONTENT + b"x", b""])
def test_a_file_that_is_there_and_wrong_is_replaced(target: Path, wrong: bytes) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(wrong)
    with on.serve_entry(ENTRY, CONTENT) as served:
        get(served, target)
    assert target.read_bytes() == CONTENT


def test_an_empty_file_needs_no_request(target: Path) -> None:
    with on.serve() as served:
        get(served, target, entry=on.make_entry(b""))
    assert target.read_bytes() == b"" and not served.asked


@dataclass
class Story:
    """What a server answers in turn, and how retrieving from it ends."""

    answers: list[on.Answer]
    waits: list[float]
    words: list[str] = field(default_factory=list)
    """Of the refusal; none where the file arrives."""
    options: dict[str, float] = field(default_factory=dict)


HALF = on.drop_after(70_000)
WRONG = ["something else than was pinned", ENTRY.sha256[:12], ENTRY.key, "TRIOFLOW_DATA_MIRROR"]
GIVEN_UP = ["503", ENTRY.address, "https_proxy", "TRIOFLOW_DATA_MIRROR"]
LOGIN = on.instead(b"<html>please log in</html>", Content_Type="text/html; charset=utf-8")
STORIES = {
    "truncated twice: waits grow": Story([HALF, on.drop_after(50_000)], [FIRST_WAIT_S, 2 * FIRST_WAIT_S]),
    "closed without an answer": Story([on.close, on.close], [1.0, 2.0]),
    "silent": Story([on.say_nothing, on.hang_after(70_000)], [1.0, 2.0], options={"timeout_s": 0.2}),
    "silent for good": Story(
        [on.say_nothing] * 2, [1.0], ["TimeoutError: timed out"], options={"attempts": 2, "timeout_s": 0.1}
    ),
    **{f"busy with {code}": Story([on.status(code)] * 3, [1.0, 2.0, 4.0]) for code in (408, 429, 500, 502, 503, 504)},
    "busy for good": Story([on.status(503)] * 9, [1.0, 2.0, 4.0], GIVEN_UP, options={"attempts": 4}),
    "waits are limited": Story(
        [on.status(503)] * 9, [min(2.0**n, LONGEST_WAIT_S) for n in range(9)], options={"attempts": 10}
    ),
    **{
        f"refused with {code}": Story([on.status(code)], [], [ENTRY.key, f"answers {code}", "TRIOFLOW_DATA_URL"])
        for code in (401, 403, 404, 407, 410)
    },
    "ended early for good": Story([HALF] * 2, [1.0], ["70000 of 200000 bytes came"], options={"attempts": 2}),
    "refused after a half": Story([HALF, on.status(404)], [1.0], ["404"]),
    "wrong content": Story([on.corrupt], [], WRONG),
    "another content": Story([on.instead(OTHER)], [], WRONG),
    "longer content": Story([on.instead(OTHER + b"more")], [], WRONG),
    "a login page": Story([LOGIN, LOGIN], [1.0], ["web page", "login"], options={"attempts": 2}),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_server_s_mishaps_end_with_the_file_or_one_sentence(target: Path, waits: list[float], name: str) -> None:
    story = STORIES[name]
    with on.serve_entry(ENTRY, CONTENT, *story.answers) as served:
        if story.words:
            fails(served, target, *story.words, waits=waits, **story.options)
        else:
            get(served, target, waits, **story.options)
    assert waits == story.waits
    assert len(served.asked) == len(waits) + 1
    assert [path.name for path in target.parent.iterdir()] == ([] if story.words else [target.name])


def test_nothing_listens_there(target: Path, waits: list[float]) -> None:
    with on.serve() as served:
        pass
    fails(served, target, served.url, "refused", "TRIOFLOW_DATA_MIRROR", waits=waits, attempts=3)
    assert waits == [1.0, 2.0]


def test_an_unknown_host_is_told_at_once(target: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find_nothing)
    served = on.Served({}, url="http://data.example")
    words = ("data.example", "gaierror", "https_proxy", "TRIOFLOW_DATA_MIRROR")
    fails(served, target, *words, waits=waits)
    assert waits == []


def test_an_untrusted_certificate_is_told_at_once(
    target: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ssl.SSLCertVerificationError("self-signed certificate in chain")

    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError(error)

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuse)
    served = on.Served({}, url="https://data.example")
    fails(served, target, "self-signed certificate", "SSL_CERT_FILE", waits=waits)
    assert waits == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://[::1", "http://" + "x" * 70])
def test_an_address_that_is_none(target: Path, url: str) -> None:
    fails(on.Served({}, url=url), target, "cannot be retrieved", url, "TRIOFLOW_DATA_URL")


def test_a_redirect_is_followed(target: Path) -> None:
    with (
        on.serve(content={"/there": CONTENT}) as second,
        on.serve_entry(ENTRY, CONTENT, on.redirect(f"{second.url}/there")) as first,
    ):
        get(first, target)
    assert second.asked == ["/there"]
    assert target.read_bytes() == CONTENT


def test_a_redirect_in_circles_ends(target: Path) -> None:
    with on.serve_entry(ENTRY, CONTENT) as served:
        served.answers += [on.redirect(f"{served.url}/{ENTRY.address}")] * 50
        fails(served, target, "302")
    assert len(served.asked) < 20


def test_a_proxy_is_used(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://data.example/{ENTRY.address}"
    with on.serve(content={on.unquote(address): CONTENT}) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        get(on.Served({}, url="http://data.example/"), target)
    assert proxy.asked == [address], "a slash at the end of the base is not a second one"
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("size", [60, 200_000])
def test_a_git_lfs_pointer_is_explained(tmp_path: Path, size: int) -> None:
    """Also where the file is shorter than its pointer."""
    content = on.make_content(size)
    entry = on.make_entry(content)
    with on.serve_entry(entry, content, on.pointer(content)) as served:
        fails(served, tmp_path / "file", "Git LFS pointer", "git lfs pull", entry=entry)
    assert len(served.asked) == 1 and list(tmp_path.iterdir()) == []


def test_a_git_lfs_pointer_leads_to_the_address_of_the_content(target: Path) -> None:
    with (
        on.serve_entry(ENTRY, CONTENT, on.drop_after(70_000)) as large,
        on.serve_entry(ENTRY, CONTENT, on.pointer(CONTENT)) as small,
    ):
        found = get(small, target, lfs_url=large.url + "/")
    assert found.source == f"{large.url}/{ENTRY.address}" and target.read_bytes() == CONTENT
    assert (len(small.asked), len(large.asked)) == (1, 2)


def test_git_lfs_pointers_that_lead_nowhere_are_refused(target: Path) -> None:
    with on.serve_entry(ENTRY, CONTENT, on.pointer(OTHER)) as served:
        digest = hashlib.sha256(OTHER).hexdigest()[:12]
        fails(served, target, "pointer to another file", digest, lfs_url=served.url)
        assert len(served.asked) == 1
        served.answers += [on.pointer(CONTENT)] * 2
        fails(served, target, "Git LFS pointer", "not the file itself", lfs_url=served.url)


def test_every_sequence_of_mishaps_ends_with_the_right_file_or_none(tmp_path: Path) -> None:
    content = on.make_content(5000)
    entry = on.make_entry(content)
    choose = random.Random(20)
    outcomes = set()
    for case in range(150):
        target = tmp_path / str(case) / "file"
        with on.serve_entry(entry, content) as served:
            for _ in range(choose.randint(1, 7)):
                size = choose.randint(0, 5000)
                served.answers.append(
                    choose.choice(
                        [
                            on.well,
                            on.corrupt,
                            on.drop_after(size),
                            on.status(503),
                            on.close,
                            on.instead(content[:size]),
                            on.pointer(content),
                            on.instead(OTHER[:5000]),
                            on.instead(OTHER),
                            on.status(404),
                        ]
                    )
                )
            for _ in range(2):
                try:
                    get(served, target, entry=entry, attempts=4)
                except DatasetError as error:
                    outcomes.add(type(error))
                    assert not target.exists()
                    assert not any(target.parent.iterdir())
                else:
                    outcomes.add(bytes)
                    assert target.read_bytes() == content
                    assert [path.name for path in target.parent.iterdir()] == ["file"]
    assert outcomes == {bytes, DatasetError}


def write_mirror(folder: Path, content: bytes) -> Path:
    file = folder / ENTRY.key
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    return folder


def test_a_mirror_is_asked_first(tmp_path: Path, target: Path) -> None:
    mirror = write_mirror(tmp_path / "mirror", CONTENT)
    with on.serve_entry(ENTRY, CONTENT) as served:
        found = get(served, target, mirror=mirror)
    assert found.source == str(mirror / ENTRY.key) and not served.asked
    assert target.read_bytes() == CONTENT and not target.is_symlink()
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_mirror_without_the_file_leaves_it_to_the_address(tmp_path: Path, target: Path) -> None:
    with on.serve_entry(ENTRY, CONTENT) as served:
        assert get(served, target, mirror=tmp_path).source.startswith(served.url)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("wrong", "words"), [(OTHER, [hashlib.sha256(OTHER).hexdigest()[:12]]), (b"short", ["5 bytes instead of 200000"])]
)
def test_a_mirror_with_another_file_is_refused(tmp_path: Path, target: Path, wrong: bytes, words: list[str]) -> None:
    mirror = write_mirror(tmp_path / "mirror", wrong)
    with on.serve_entry(ENTRY, CONTENT) as served:
        fails(served, target, str(mirror / ENTRY.key), "replace it", *words, mirror=mirror)
    assert not served.asked and list(target.parent.iterdir()) == []


def test_the_environment_chooses_the_source(tmp_path: Path) -> None:
    chosen = choose_source("https://one.example", "https://large.example", {})
    assert (chosen.base_url, chosen.lfs_url, chosen.mirror) == ("https://one.example", "https://large.example", None)
    told = {"TRIOFLOW_DATA_URL": "http://two.example:8/x", "TRIOFLOW_DATA_MIRROR": str(tmp_path)}
    chosen = choose_source("https://one.example", "https://large.example", told)
    assert (chosen.base_url, chosen.lfs_url, chosen.mirror) == (told["TRIOFLOW_DATA_URL"], "", tmp_path)
    assert choose_source("https://one.example", "", {"TRIOFLOW_DATA_MIRROR": " "}).mirror is None


@pytest.mark.parametrize(
    "told",
    [
        {"TRIOFLOW_DATA_URL": "data.example"},
        {"TRIOFLOW_DATA_URL": "file:///etc"},
        {"TRIOFLOW_DATA_URL": "http://user:word@data.example"},
        {"TRIOFLOW_DATA_URL": "http://data.example/?raw"},
        {"TRIOFLOW_DATA_MIRROR": "/no/such/folder"},
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(told: dict[str, str]) -> None:
    ((name, value),) = told.items()
    with pytest.raises(InputError, match=name) as caught:
        choose_source("https://one.example", "", told)
    assert value in str(caught.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with on.serve_entry(ENTRY, CONTENT) as served:
        fails(served, tmp_path / "file" / "below", "cannot be written", "file")
    assert not served.asked


def test_a_full_disk_is_told_and_not_retried(target: Path, waits: list[float]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with on.serve_entry(ENTRY, CONTENT) as served:
            fails(served, target, "cannot be written", "free space", waits=waits)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(served.asked) == 1 and waits == []
