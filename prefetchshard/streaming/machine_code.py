"""The machine code of a copy whose stores do not go through the cache: LLVM makes it for the processor at hand.

A store through the cache first reads the line that it is about to overwrite, and drives other data out. A streaming (nontemporal) store
writes whole lines straight to memory: two transfers over the memory bus where the other needs three.
"""

from __future__ import annotations

import ctypes
import importlib
import platform
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from prefetchshard.base.memory import AnyArray

CopyRows: TypeAlias = Callable[[int, int, int, int, int, int], None]
"""`(to, source, numbers, count, row_bytes, stride)`: copy the rows `numbers`, `count` of int64, each of `row_bytes`, which begin `stride`
bytes apart at `source`, one after the other to `to`. All but the last three are addresses. Runs without the interpreter's lock."""

# Each row: some bytes up to a whole line of the cache, whole lines by streaming stores, the rest. `fence` orders these stores before
# what this thread writes later, which is how other threads learn that the copy is done.
_CODE = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.umin.i64(i64, i64)
{declarations}

define void @copy_rows(ptr noalias %to, ptr noalias readonly %from, ptr noalias readonly %numbers, i64 %count, i64 %size, i64 %stride) {{
begin:
  %any_row = icmp sgt i64 %count, 0
  br i1 %any_row, label %row, label %end

row:
  %i = phi i64 [0, %begin], [%next_i, %row_done]
  %number_at = getelementptr i64, ptr %numbers, i64 %i
  %number = load i64, ptr %number_at
  %from_offset = mul i64 %number, %stride
  %source = getelementptr i8, ptr %from, i64 %from_offset
  %to_offset = mul i64 %i, %size
  %target = getelementptr i8, ptr %to, i64 %to_offset
  %address = ptrtoint ptr %target to i64
  %negative = sub i64 0, %address
  %to_line = and i64 %negative, 63
  %head = call i64 @llvm.umin.i64(i64 %to_line, i64 %size)
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %head, i1 false)
  %after_head = sub i64 %size, %head
  %in_lines = and i64 %after_head, -64
  %tail_at = add i64 %head, %in_lines
  %any_line = icmp ne i64 %in_lines, 0
  br i1 %any_line, label %line, label %row_done

line:
  %j = phi i64 [%head, %row], [%next_j, %line]
  %line_source = getelementptr i8, ptr %source, i64 %j
  %line_target = getelementptr i8, ptr %target, i64 %j
  %value = load <8 x i64>, ptr %line_source, align 1
  store <8 x i64> %value, ptr %line_target, align 64, !nontemporal !0
  %next_j = add i64 %j, 64
  %more_lines = icmp ult i64 %next_j, %tail_at
  br i1 %more_lines, label %line, label %row_done

row_done:
  %tail_source = getelementptr i8, ptr %source, i64 %tail_at
  %tail_target = getelementptr i8, ptr %target, i64 %tail_at
  %tail = sub i64 %size, %tail_at
  call void @llvm.memcpy.p0.p0.i64(ptr %tail_target, ptr %tail_source, i64 %tail, i1 false)
  %next_i = add i64 %i, 1
  %more_rows = icmp slt i64 %next_i, %count
  br i1 %more_rows, label %row, label %end

end:
  {fence}
  ret void
}}

!0 = !{{i32 1}}
"""
_FENCES = {
    "x86_64": ("declare void @llvm.x86.sse.sfence()", "call void @llvm.x86.sse.sfence()"),
    "aarch64": ("", "fence release"),
}
_NAMES = {"AMD64": "x86_64", "arm64": "aarch64"}


class NoMachineCode(Exception):
    """This machine gets none; the message says why."""


def code_for(machine: str) -> str:
    """The function `copy_rows` for a kind of processor, in LLVM's language.

    Args:
        machine: as `platform.machine()` has it.

    Raises:
        NoMachineCode: another one than x86-64 and aarch64.
    """
    fences = _FENCES.get(_NAMES.get(machine, machine))
    if fences is None:
        raise NoMachineCode(f"not for {machine}")
    return _CODE.format(declarations=fences[0], fence=fences[1])


def make_copy_rows() -> CopyRows:
    """Make the function for this machine, and compare what it copies with NumPy. Takes some 40 ms.

    Raises:
        NoMachineCode: llvmlite is not installed, or this is another kind of processor.
        Exception: what LLVM raises.
    """
    code = code_for(platform.machine())
    try:
        llvm: Any = importlib.import_module("llvmlite.binding")
    except ImportError as error:
        raise NoMachineCode("llvmlite is not installed: python -m pip install 'prefetchshard[native]'") from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(code)
    module.verify()
    features = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=3, cpu=llvm.get_host_cpu_name(), features=features)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 3)
    function: Any = prototype(engine.get_function_address("copy_rows"))
    function.engine = engine  # it owns the code
    _check(function)
    return function


def address_of(array: AnyArray) -> int:
    return array.__array_interface__["data"][0]


def _check(copy_rows: CopyRows) -> None:
    """Rows of odd sizes and even ones, at odd addresses and even ones, with nothing written beside them."""
    numbers = np.array([3, 0, 4, 4], np.int64)
    for size in (1, 63, 64, 129, 1000, 4096):
        source = np.arange(5 * (size + 8), dtype=np.uint32).astype(np.uint8).reshape(5, size + 8)
        for start in (0, 1, 64):
            memory = np.full(4 * size + 256, 170, np.uint8)
            want = memory.copy()
            want[start : start + 4 * size] = source[numbers, :size].reshape(-1)
            copy_rows(address_of(memory) + start, address_of(source), address_of(numbers), 4, size, size + 8)
            if not np.array_equal(memory, want):
                raise NoMachineCode(f"LLVM's code copies rows of {size} bytes wrongly on this machine")
