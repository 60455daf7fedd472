"""Each golden answer is what it was: `answers.py` says how to change one."""

import pytest
from answers import QUESTIONS, ask, list_differences, read_expected

EXPECTED = read_expected()


def test_every_question_has_its_answer():
    assert [*EXPECTED] == QUESTIONS.read_text().splitlines()


@pytest.mark.parametrize("question", EXPECTED)
def test_the_answer_is_as_before(question):
    if "@TRACED" in question:
        pytest.importorskip("torch", reason="capture needs torch (extra [capture])")
    differences = list_differences(EXPECTED[question]["values"], ask(question), question)
    assert not differences, "\n".join(differences[:20])
