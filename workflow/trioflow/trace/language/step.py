"""What is asked of a model by its configuration: the sizes and formats of one training step."""

from __future__ import annotations

from dataclasses import dataclass

from trioflow.base.errors import InputError
from trioflow.base.precision_recipes import choose_recipe
from trioflow.base.settings import OPTIMIZERS

ATTENTIONS = ("flash", "fused-softmax", "eager")
"""flash keeps no scores; fused-softmax keeps them in half precision, one kernel scaling, masking and normalising
them, as Megatron-LM and Transformer Engine do without flash; eager keeps them in fp32, as transformers does."""


@dataclass(frozen=True)
class LanguageStep:
    """A training step of a language model on one device.

    Attributes
    ----------
    sequence : int
        Tokens of a sample.
    batch : int
        Samples.
    precision : str
        Name of a recipe of `trioflow.base.precision_recipes`.
    attention : str
        One of `ATTENTIONS`.
    optimizer : str
        One of `trioflow.base.settings.OPTIMIZERS`.
    """

    sequence: int
    batch: int = 1
    precision: str = "bf16"
    attention: str = ATTENTIONS[0]
    optimizer: str = "adamw-fused"

    def __post_init__(self) -> None:
        for name in ("sequence", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)} is below 1")
        choose_recipe(self.precision)
        for flag, value, words in (
            ("--attention", self.attention, ATTENTIONS),
            ("--optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value not in words:
                raise InputError(f"{flag}: unknown word {value!r}", fix=f"use {', '.join(words)}")
