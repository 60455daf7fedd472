"""Names of the messages that are judged."""

from __future__ import annotations

import pytest
from trioflow.base.errors import InputError
from trioflow_evaluation.validation.operators import describe_case, parse_case


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (("all_reduce", 8, 1, 1024), "all_reduce, 8 ranks, 1024 bytes"),
        (("send", 2, 2, 4096), "send, 2 ranks of 2 nodes, 4096 bytes"),
    ],
)
def test_a_name_holds_all_of_its_message(message: tuple[str, int, int, int], text: str) -> None:
    assert describe_case(*message) == text
    assert parse_case(text) == message


def test_other_names_are_refused() -> None:
    with pytest.raises(InputError, match="gpt2 train 2 -> 8"):
        parse_case("gpt2 train 2 -> 8")
