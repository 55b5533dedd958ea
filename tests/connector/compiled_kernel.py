"""Run as a program, with Triton: compiles the fused kernel for a GPU that need not be there, and prints how it accesses
memory, one PTX instruction a line.

    compiled_kernel.py <compute capability> <neox: 0 or 1> <rotary width>      heads of 128 bfloat16, eight a token
"""

from __future__ import annotations

import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from connector.fused import ROWS, _move


def main(capability: int, neox: bool, rotary: int) -> None:
    pointers = dict.fromkeys(("tiles", "distances", "slots", "layers", "key_caches", "value_caches"), "*i64")
    given = {**pointers, "table": "*fp32", **dict.fromkeys(("block_stride", "slot_stride", "head_stride"), "i32")}
    constants = {
        "BLOCK_TOKENS": 16,
        "HEADS": 8,
        "HEAD_DIM": 128,
        "HALF": rotary // 2,
        "NEOX": neox,
        "DTYPE": tl.bfloat16,
        "ROWS": ROWS,
        "DIM_ROOM": 128,
        "HALF_ROOM": triton.next_power_of_2(rotary // 2),
        "REST_ROOM": triton.next_power_of_2(128 - rotary) if rotary < 128 else 0,
    }
    place = {name: (_move.arg_names.index(name),) for name in (*given, *constants)}
    source = ASTSource(
        _move,
        given | dict.fromkeys(constants, "constexpr"),
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in given},  # as a launch finds them to be
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    sys.stdout.write("\n".join(re.findall(r"\b(?:ld|st)\.global\S*", compiled.asm["ptx"])))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1", int(sys.argv[3]))
