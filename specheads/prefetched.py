"""Products of a few rows with a weight as it lies in memory, compiled by numba for the processor at hand.

Such a product need not take longer than its weight takes to come from memory, if that goes on beside the arithmetic. Libraries'
products stop for it: they first copy a weight into a layout of their own, or wait for its lines. Here each pair of a weight's
rows meets all rows of the input while a later pair is asked for. Of wide inputs a part is taken at a time, which meets a panel
of pairs, so that it stays in the first-level cache. A row's results are the same bits whatever is computed beside it: each is
summed in one order.

Shapes: n rows of a product, i inputs, o outputs. The compiled code is given addresses, in bytes, and numbers of floats.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding
import numba
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import Parameter

PAIR = 2  # rows of the weight that are taken together
PANEL = 16  # pairs that one part of the inputs meets before the next part; with 8 it is the same
WIDEST = 768  # inputs of a part
AHEAD = 4  # how many pairs further on is the one asked for from memory; 2 or 8 make little difference
SOON = 8  # how many registers further on in its pair is the one asked for from the second-level cache; nor do 4 or 16
FLOAT = 4  # bytes

_FEATURES = llvmlite.binding.get_host_cpu_features()
# Floats of a register, and the most rows of the input that are taken together: there is a sum for each of them and each row of
# the pair, which all have to fit into registers (32 with AVX-512 and on ARM, 16 with AVX2).
LANES, TILE = (16, 8) if _FEATURES.get("avx512f") else (8, 4) if _FEATURES.get("avx2") else (4, 4)


def fits(input: Tensor, weight: Tensor) -> bool:
    """Whether `prefetched` can take an input `[..., i]` and a weight `[o, i]`: its code trusts addresses and sizes."""
    if type(weight) not in (Tensor, Parameter) or not weight.is_contiguous() or input.shape[-1] != weight.shape[1]:
        return False
    is_single = input.dtype == weight.dtype == torch.float32 and input.is_cpu and weight.is_cpu
    return is_single and weight.shape[0] >= PAIR and weight.shape[1] % LANES == 0


def prefetched(input: Tensor, weight: Tensor) -> Tensor:
    """The product `[..., o]` of an input `[..., i]` and a weight `[o, i]` transposed that fit."""
    input = input.contiguous()
    outputs, inputs = weight.shape
    output = input.new_empty(*input.shape[:-1], outputs)
    _product()(input.data_ptr(), weight.data_ptr(), output.data_ptr(), input.numel() // inputs, inputs, outputs)
    return output


def _product() -> Any:
    threads = torch.get_num_threads()
    if threads == 1 or not _has_threads():
        return _compiled(parallel=False)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    return _compiled(parallel=True)


@cache
def _has_threads() -> bool:
    """Whether products may run in several threads: numba's own, without OpenMP or TBB, cannot serve two callers at once."""
    nothing = torch.zeros(PAIR, LANES)
    _compiled(parallel=True)(*[nothing.data_ptr()] * 3, 0, LANES, PAIR)
    return numba.threading_layer() != "workqueue"


@cache
def _compiled(parallel: bool) -> Any:
    def product(input: int, weight: int, output: int, rows: int, inputs: int, outputs: int) -> None:
        parts = (inputs + WIDEST - 1) // WIDEST
        widest = (inputs + parts * LANES - 1) // (parts * LANES) * LANES
        pairs = outputs // PAIR
        for panel in numba.prange((pairs + PANEL - 1) // PANEL):
            for turn in range(parts * PANEL):
                part, pair = turn // PANEL, panel * PANEL + turn % PANEL
                if pair < pairs:
                    later_part, later = (turn + AHEAD) // PANEL, panel * PANEL + (turn + AHEAD) % PANEL
                    if later_part == parts:
                        later_part, later = 0, later + PANEL
                    column, first = part * widest, pair * PAIR
                    at = weight + FLOAT * (first * inputs + column)
                    ahead = weight + FLOAT * (later * PAIR * inputs + later_part * widest)
                    width = min(widest, inputs - column)
                    for row in range(0, rows, TILE):
                        x, y = input + FLOAT * (row * inputs + column), output + FLOAT * (row * outputs + first)
                        _tile(min(TILE, rows - row), x, at, ahead, y, inputs, outputs, width, part)
        if outputs % PAIR:  # the last pair has one output that was there already
            first = outputs - PAIR
            at = weight + FLOAT * first * inputs
            for row in range(0, rows, TILE):
                x, y = input + FLOAT * row * inputs, output + FLOAT * (row * outputs + first)
                _tile(min(TILE, rows - row), x, at, at, y, inputs, outputs, inputs, 0)

    return numba.njit(types.void(*[types.intp] * 6), nogil=True, parallel=parallel)(product)


@intrinsic  # type: ignore[untyped-decorator]
def _tile(typing: Any, rows: Any, x: Any, at: Any, ahead: Any, y: Any, inputs: Any, outputs: Any, width: Any, part: Any) -> Any:
    """Adds to `y` what a part of 1 to `TILE` rows, at `x`, gives with the pair at `at`, and asks for the pair at `ahead`."""

    def generate(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        rows, *rest = arguments
        done = build.append_basic_block("done")
        choice = build.switch(rows, done)
        for count in range(1, TILE + 1):
            block = build.append_basic_block(f"rows{count}")
            choice.add_case(ir.Constant(rows.type, count), block)
            build.position_at_end(block)
            _dot_products(build, count, *rest)
            build.branch(done)
        build.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 9), generate


def _dot_products(
    build: ir.IRBuilder, count: int, x: Any, at: Any, ahead: Any, y: Any, inputs: Any, outputs: Any, width: Any, part: Any
) -> None:
    """Emits the code for one number of rows: a loop over the inputs, a register of them a step, with all sums in registers."""
    single, size, byte = ir.FloatType(), inputs.type, ir.IntType(8)
    lanes = ir.VectorType(single, LANES)

    def declared(name: str, result: Any, *arguments: Any) -> Any:
        return cgutils.get_or_insert_function(build.module, ir.FunctionType(result, arguments), name)

    def place(address: Any, row: int, stride: Any, column: Any, kind: Any) -> Any:
        offset = build.add(build.mul(ir.Constant(size, row), stride), column)
        return build.inttoptr(build.add(address, build.mul(offset, ir.Constant(size, FLOAT))), kind.as_pointer())

    multiply_add = declared(f"llvm.fma.v{LANES}f32", lanes, lanes, lanes, lanes)
    flag = ir.IntType(32)
    prefetch = declared("llvm.prefetch.p0", ir.VoidType(), byte.as_pointer(), flag, flag, flag)
    to_second_level, to_first_level = ([ir.Constant(flag, value) for value in (0, level, 1)] for level in (2, 3))
    zero = ir.Constant(lanes, [0.0] * LANES)

    before, loop, after = build.block, build.append_basic_block("loop"), build.append_basic_block("after")
    build.branch(loop)
    build.position_at_end(loop)
    column = build.phi(size)
    column.add_incoming(ir.Constant(size, 0), before)
    old = [build.phi(lanes) for _ in range(count * PAIR)]
    weights = []
    for row in range(PAIR):
        weights.append(build.load(place(at, row, inputs, column, lanes), align=FLOAT))
        build.call(prefetch, [place(ahead, row, inputs, column, byte), *to_second_level])
        soon = build.add(column, ir.Constant(size, SOON * LANES))
        build.call(prefetch, [place(at, row, inputs, soon, byte), *to_first_level])
    new: list[Any] = []
    for row in range(count):
        values = build.load(place(x, row, inputs, column, lanes), align=FLOAT)
        new += [build.call(multiply_add, [values, weight, old[len(new) + of]]) for of, weight in enumerate(weights)]
    for earlier, later in zip(old, new, strict=True):
        earlier.add_incoming(zero, before)
        earlier.add_incoming(later, loop)
    following = build.add(column, ir.Constant(size, LANES))
    column.add_incoming(following, loop)
    build.cbranch(build.icmp_signed("<", following, width), loop, after)

    build.position_at_end(after)
    pairs = ir.VectorType(ir.DoubleType(), LANES // PAIR)  # two floats are loaded and stored at once
    for start in range(0, count, pairs.count):
        vectors = new[start * PAIR :][:LANES]
        totals = _totals(build, vectors + [zero] * (LANES - len(vectors)))
        places = [place(y, start + row, outputs, ir.Constant(size, 0), pairs.element) for row in range(len(vectors) // PAIR)]
        earlier = ir.Constant(pairs, ir.Undefined)
        for row, where in enumerate(places):
            earlier = build.insert_element(earlier, build.load(where, align=FLOAT), ir.Constant(flag, row))
        both = build.fadd(totals, build.bitcast(earlier, lanes))
        is_first = build.icmp_signed("==", part, ir.Constant(size, 0))
        result = build.bitcast(build.select(is_first, totals, both), pairs)
        for row, where in enumerate(places):
            build.store(build.extract_element(result, ir.Constant(flag, row)), where, align=FLOAT)


def _totals(build: ir.IRBuilder, vectors: list[Any]) -> Any:
    """A vector of the totals of as many vectors as it has lanes.

    Half of a shared vector's lanes come from either of two, where their two halves are added, and so on: half as many
    instructions as totals one by one, which for short rows take as long as the products.
    """
    width = LANES  # of the lanes that are still to be added up
    while width > 1:
        half = width // 2
        starts = [(of * LANES + piece * width) for piece in range(LANES // width) for of in (0, 1)]
        low = [start + lane for start in starts for lane in range(half)]
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), LANES), [lane + more for lane in low]) for more in (0, half)]
        ones, others = vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :]
        vectors = [
            build.fadd(*(build.shuffle_vector(one, other, mask) for mask in masks))
            for one, other in zip(ones, others, strict=True)
        ]
        width = half
    return vectors[0]
