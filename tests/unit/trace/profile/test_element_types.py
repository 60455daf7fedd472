"""Every element type of PyTorch, as gcc, clang with libc++ and MSVC spell it in a profile."""

import re
from pathlib import Path

import pytest
import torch
from trioflow.trace.profile.profiler_fields import element_bytes, element_type, noted_bytes

_HEADER = Path(torch.__file__).parent / "include/torch/headeronly/core/ScalarType.h"
_LIST = re.search(
    r"define AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS\(_\)(.*?)\n\n", _HEADER.read_text(), re.S
)
TYPES = re.findall(r"_\((.*?), (\w+)\)", _LIST[1])
SPELLINGS = {  # gcc, clang on Linux, clang on macOS, MSVC
    "uint8_t": ("unsigned char",) * 4,
    "int8_t": ("signed char",) * 4,
    "int16_t": ("short int", "short", "short", "short"),
    "int64_t": ("long int", "long", "long long", "__int64"),
    "uint16_t": ("short unsigned int", "unsigned short", "unsigned short", "unsigned short"),
    "uint32_t": ("unsigned int",) * 4,
    "uint64_t": ("long unsigned int", "unsigned long", "unsigned long long", "unsigned __int64"),
}


@pytest.mark.parametrize(("kind", "name"), TYPES)
def test_every_element_type_is_known_in_each_compiler_s_spelling(kind, name):
    dtype = {
        "Byte": "uint8",
        "Char": "int8",
        "Short": "int16",
        "Int": "int32",
        "Long": "int64",
        "Half": "float16",
        "Float": "float32",
        "Double": "float64",
        "ComplexHalf": "complex32",
        "ComplexFloat": "complex64",
        "ComplexDouble": "complex128",
    }.get(name, name.lower())
    size = getattr(torch, dtype).itemsize
    assert noted_bytes(name) == size
    classes = re.sub(r"c10::", "struct c10::", kind)
    spellings = SPELLINGS.get(kind, (kind, kind, kind, classes))
    assert {element_type(one) for one in spellings} == {spellings[0]}
    assert {element_bytes(one) for one in spellings} == {size}


def test_the_sweep_has_every_type_and_unknown_ones_stay_unknown():
    assert len(TYPES) >= 46
    assert element_bytes("float9") is None and noted_bytes("Float9") is None
    assert element_type("TensorList") == "TensorList"
