"""Ends of workers by the program itself, as the interpreter tells of them."""

from __future__ import annotations

import re

from diagnostics.core.rules.exit_meaning import ExitMeaning, ExitRule
from diagnostics.core.rules.table import Rule
from outlast.failures import FailureClass

PROGRAM: tuple[ExitRule, ...] = (
    Rule(
        name="shapes and arguments",
        means=ExitMeaning(fault_class=FailureClass.PROGRAM_ERROR, in_stderr=False),
        pattern=re.compile(
            r"shapes cannot be multiplied|must match the size of tensor|"
            r"shape '\[.*\]' is invalid for input|size mismatch|inconsistent tensor size|"
            r"Expected all tensors to be on the same device|does not require grad|"
            r"modified by an inplace operation"
        ),
        matches=(
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 2x3)",
            "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at "
            "non-singleton dimension 1",
            "RuntimeError: shape '[2]' is invalid for input of size 3",
            "RuntimeError: inconsistent tensor size, expected tensor [3] and src [4]",
        ),
        misses=("RuntimeError: Connection closed by peer",),
    ),
    Rule(
        name="not there",
        means=ExitMeaning(fault_class=FailureClass.MISSING, in_stderr=False),
        pattern=re.compile(
            r"^(?:FileNotFoundError|PermissionError|IsADirectoryError|NotADirectoryError|"
            r"ImportError|ModuleNotFoundError)\b"
        ),
        matches=(
            "FileNotFoundError: [Errno 2] No such file or directory: 'train.txt'",
            "PermissionError: [Errno 13] Permission denied: '/data/train.txt'",
            "ModuleNotFoundError: No module named 'flash_attn'",
            "ImportError: libcudart.so.12: cannot open shared object file",
        ),
        misses=(
            "OSError: [Errno 5] Input/output error",
            "ValueError: FileNotFoundError in a message",
        ),
    ),
    Rule(
        name="interpreter",
        means=ExitMeaning(fault_class=FailureClass.PROGRAM_ERROR, in_stderr=False),
        pattern=re.compile(
            r"^(?:KeyError|IndexError|AttributeError|TypeError|ValueError(?!: (?:cannot )?mmap )|"
            r"NameError|UnboundLocalError|AssertionError|ZeroDivisionError|SyntaxError|"
            r"IndentationError|RecursionError|NotImplementedError)\b"
        ),
        matches=(
            "KeyError: 'input_ids'",
            "AssertionError: heads must divide by tp",
            "SyntaxError: invalid syntax (model.py, line 3)",
        ),
        misses=(
            "RuntimeError: KeyError in a message",
            "OSError: [Errno 5] Input/output error",
            # Of what was read, which may be damaged.
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0",
            "ValueError: cannot mmap an empty file",
            "ValueError: mmap length is greater than file size",
        ),
    ),
)
