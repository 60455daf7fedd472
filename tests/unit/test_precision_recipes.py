import pytest
from trioflow.base.errors import InputError
from trioflow.base.precision_recipes import RECIPES, choose_recipe

ADAM_STATES = 2


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"),
    [
        ("bf16", 16),
        ("fsdp2-mixed", 18),
        ("megatron-bf16", 18),
        ("megatron-fp32", 16),
        ("megatron-tf32", 16),
        ("pure-bf16", 8),
    ],
)
def test_bytes_a_parameter_are_the_published_ones(name, bytes_per_parameter):
    # Megatron Core's table: bf16 weights with fp32 gradients 18, all in fp32 16.
    recipe = RECIPES[name]
    held = recipe.parameter_bytes + recipe.gradient_bytes + recipe.main_parameter_bytes
    assert held + ADAM_STATES * recipe.state_bytes == bytes_per_parameter


def test_autocast_is_another_word_for_bf16():
    assert choose_recipe("autocast") == choose_recipe("bf16")
    assert "autocast over fp32 weights" in choose_recipe("bf16").describe()


def test_an_unknown_recipe_is_refused_with_those_there_are():
    with pytest.raises(InputError, match=r"fp4.*megatron-bf16"):
        choose_recipe("fp4")
