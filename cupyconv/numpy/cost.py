"""What a way to run takes, in seconds: one model for all methods, from which "auto" chooses and which `explain` prints.

A loop over blocks says how much of each building block it has, of one thread; here is what each of them takes.

::

    seconds  =  work / threads  +  calls  +  waking them                on one thread:  work  +  calls

`work` is what runs in NumPy's and BLAS's own loops, `calls` what Python does between them, one thread at a time.

The constants are those of float32 on one core of two, with AVX-512, 2 MiB of L2 cache each and OpenBLAS.  Each was timed by
itself first, and then all were fitted, by least squares of logarithms, to the times of 900 loops of 290 convolutions: their
sums must be right, and what one of them takes alone depends on what is in cache.  A loop near the best of its problem takes
1.2 times more or less than this says.  On another processor all are other; what they are to each other is less so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, inf, prod
from typing import TYPE_CHECKING, NamedTuple

from cupyconv.problem.arrays import ITEMSIZE, accumulator, product_flops, real_part

if TYPE_CHECKING:
    from cupyconv.problem.geometry import ConvGeometry
    from cupyconv.problem.problems import ConvProblem, HostModel, ProductsProblem

# --- calls and threads, seconds -------------------------------------------------------------------------------

#: A call of NumPy, with the Python around it that finds out its arguments.
CALL = 2.3e-6
#: What a call takes longer where threads wait for each other to let go of the interpreter.
HANDOVER = 1.7e-6
#: Calls that it takes as long as to work out what a tap of a block reads, where blocks are more than it is kept of.
REGION_CALLS = 10
#: Other threads that are woken, and waited for at the end, where calls follow one another.  After some milliseconds without one
#: it takes up to three times as long: most calls of this size are of a row of them, as the layers of a network are.
WAKE = 110e-6
#: Seconds of work for which another thread is worth waking: of most loops, and of products with Toeplitz matrices.
#: `backend` asks for less: it only says how many threads a plan may have, from a cautious guess of the work.
SHARE, TOEPLITZ_SHARE = 600e-6, 400e-6
#: How much longer work takes where other cores work too, on the same memory; and such that mostly is products of columns.
BESIDE_OTHERS, PRODUCTS_BESIDE = 1.25, 1.12

# --- products by BLAS -----------------------------------------------------------------------------------------

#: Seconds of a multiply-add; and to begin one product of a batch.
MULTIPLY_ADD, PRODUCT = 14e-12, 27e-9
#: Multiply-adds up to which a product reads its operands where they lie, without packing them (OpenBLAS on x86-64 with AVX-512).
SMALL_PRODUCT = 1_000_000
#: Multiply-adds at most of products that are cut to be small ones: safely below.
SAFELY_SMALL = 900_000
#: Rows, and elements, of a weight with which small products are faster than one long product; the columns that they have
#: at most, and what these are a multiple of.  One or two rows are as fast with all columns that BLAS does not pack.
FEW_ROWS, SMALL_WEIGHT, RUN_OF_COLUMNS, RUN_STEP = 32, 5000, 768, 48
ROWS_OF_LONG_RUNS = 2
#: Seconds to pack an element of an operand.
PACK = 130e-12
#: Rows, and columns, that BLAS's innermost loop has at a time: those that are missing take as long.
ROWS, COLUMNS = 4, 16
#: Rows of a small product at a time; each time its columns are read again, which takes as long as a row.  And columns more
#: that such a product takes as long as.
SMALL_ROWS, SHORT_COLUMNS = 6, 8

#: Seconds of a step along the sum of a small product whose columns begin where cache lines do, by how many rows it has, and
#: by how many vectors of columns: 4 at a time, then 2, then 1.  Rows are taken as many at a time as the first number says.  Of a
#: weight whose rows lie side by side; and of one turned, whose columns do.
STEPS = {
    4: ((4, 3.04e-9), (2, 2.4e-9), (1, 2.4e-9)),
    2: ((6, 2.25e-9), (2, 1.45e-9), (1, 1.5e-9)),
    1: ((6, 1.68e-9), (2, 1.45e-9), (1, 1.2e-9)),
}
TURNED_STEPS = {
    4: ((6, 4.5e-9), (2, 2.4e-9), (1, 2.3e-9)),
    2: ((8, 3.05e-9), (4, 1.75e-9), (2, 1.5e-9), (1, 1.4e-9)),
    1: ((8, 2.1e-9), (4, 1.75e-9), (2, 1.4e-9), (1, 1.15e-9)),
}
#: Bytes of a weight from which none is turned: it would not stay in cache, each step along the sum would wait for a line of its own,
#: and products would take twice as long.  Rows that lie side by side are fetched ahead, as large as they may be.
TURNED_LEAVES = 1 << 20
#: Elements of float32 in a vector; seconds to begin such a product, and to read one of its columns, once for each part of rows.
VECTOR_ELEMENTS, BEGIN, READ = 16, 60e-9, 25e-12
#: As many vectors as columns take that fill none.
PART_OF_VECTOR = 1.4
#: Rows of a weight that has such products; rows that such a product has at the least, where there are as many; elements of its
#: columns at the most, which are read for a few rows at a time.
SEVERAL_ROWS, LEAST_ROWS, READ_AGAIN = 2, 8, 1 << 17
#: How much longer a small product takes whose columns begin anywhere: many loads read two cache lines.
ANYWHERE = 1.5
#: How much longer a small product takes that reads both of its operands along the sum; elements of the longer one that stay in
#: the innermost cache, and seconds of each where they do not.
BY_ROWS, INNERMOST, LEAVES = 1.2, 12_000, 220e-12

#: Seconds of a multiply-add of a vector by a vector, in the innermost cache, and to begin one; and of a multiply-add of a vector by
#: a matrix, of no more elements than stay in cache.
DOT, DOT_BEGUN, BY_VECTOR, VECTOR = 60e-12, 20e-9, 70e-12, 1 << 20

# --- passes over memory ---------------------------------------------------------------------------------------

#: Seconds of an element that is copied in cache, of a run of them that begins, and of one that has no neighbours.
COPY, RUN, APART = 225e-12, 4.2e-9, 360e-12
#: How much longer columns take that do not stay in cache.
FARTHER = 2.0
#: Seconds of an element that is copied in a run of hundreds; and of a zero that is written where others are left out.
SHIFTED, LEFT_OUT = 100e-12, 1e-9
#: Seconds of an element that is read and added to another in cache; to one that an index array names; and of one that pooling
#: reads or writes.
ADD, ADD_BY_INDEX, POOLED = 350e-12, 4e-9, 650e-12
#: Seconds of an element of a weight's gradient that each block's product is added to, which leaves the cache meanwhile; and of a
#: run of them that begins.
SUMMED, SUMMED_RUN = 1.2e-9, 16e-9
#: Seconds to bring an element's channel behind its pixels, or in front of them, which is the last transform too.
TRANSPOSE = 600e-12
#: Bytes of memory that stay a process's own between calls; and seconds of a byte beyond that is touched first.
OWN, TOUCH = 256 << 10, 14e-12


#: Seconds of a byte that one layer of a chain writes to memory and the next reads; and bytes that stay in a core's cache.
BETWEEN, STAYS = 25e-12, 1 << 20
#: Seconds of a byte of memory that the system gives anew in each call; and bytes from which C's allocator gives memory back to
#: it, where it keeps what is smaller for the next who asks.
MAPPED, REUSED = 200e-12, 32 << 20


#: In what a price is printed.
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def by_model(seconds: float) -> str:
    """A time with the two digits that the model deserves."""
    rounded = float(f"{seconds:.1e}")
    unit, name = next((unit for unit in _UNITS if rounded >= unit[0]), _UNITS[-1])
    value = rounded / unit
    return f"{value:,.{0 if value >= 9.95 else 1}f} {name} by the model"


def multiply_adds(problem: ProductsProblem) -> float:
    """Multiply-adds of float32 that take as long as one of the problem's."""
    wide = 2 if real_part(accumulator(problem.dtype)) == "float64" else 1
    return wide * product_flops(problem.x_dtype, problem.factor_dtype) / 2


def is_complex_product(problem: ProductsProblem) -> bool:
    """Whether both factors are complex: BLAS always packs these, and divides them when they are smaller."""
    return product_flops(problem.x_dtype, problem.factor_dtype) == 8


def width(dtype: str) -> float:
    """Elements of float32 that an element is as long as, where it is computed with."""
    return ITEMSIZE[accumulator(dtype)] / 4


def shared(work: float, calls: float, parts: int, threads: int, beside: float = BESIDE_OTHERS) -> float:
    """Work in so many equal parts, on threads, and calls of which one thread at a time is at the beginning or end."""
    if threads <= 1 or not parts:
        return work + calls * CALL
    return beside * work * ceil(parts / threads) / parts + calls * (CALL + HANDOVER) + WAKE


def worth_waking(threads: int, work: float, share: float | None = None) -> int:
    """Of so many threads, as many as have a share of the work each for which it is worth to wake them; one at least."""
    return max(1, min(threads, int(work / (share or SHARE))))


@lru_cache(maxsize=512)
def run_of(rows: float, reduction: float, columns: float, is_float32: bool) -> int:
    """Columns that such a weight is multiplied with at a time: so many that BLAS packs no operand, or 0 for all."""
    if not is_float32 or rows > FEW_ROWS or not 0 < rows * reduction <= SMALL_WEIGHT:
        return 0
    unpacked = int(SMALL_PRODUCT / (rows * reduction))
    run = (unpacked if rows <= ROWS_OF_LONG_RUNS else min(RUN_OF_COLUMNS, unpacked)) // RUN_STEP * RUN_STEP
    return run if columns > min(unpacked, 2 * run) else 0


def divided_from(problem: ProductsProblem) -> int:
    """Multiply-adds of a product from which BLAS divides it among its threads."""
    return SMALL_PRODUCT // 10 if is_complex_product(problem) else SMALL_PRODUCT


def holds_blas(threads: int, host: HostModel, largest: int, divided: int = SMALL_PRODUCT) -> bool:
    """Whether products, the largest of so many multiply-adds, have one thread of BLAS, as their loop has.

    Not where the caller asked for that.  BLAS's threads look for work for a while after a product, on the processors that
    ours need, in this call or the next.
    """
    return threads == 1 <= host.most and largest > divided


def product(rows: float, reduction: float, columns: float, problem: ProductsProblem) -> float:
    """A matrix (rows, reduction) by one (reduction, columns), the longer of its sides taken for the columns."""
    scale, wide = multiply_adds(problem), width(problem.dtype)
    if scale == 1 and (run := run_of(rows, reduction, columns, accumulator(problem.dtype) == "float32")):
        return columns / run * product(rows, reduction, run, problem)
    if rows > columns:
        rows, columns = columns, rows
    if rows == 1 and columns * reduction < VECTOR:
        return PRODUCT + reduction * columns * scale * BY_VECTOR
    per_column = reduction * scale * MULTIPLY_ADD
    is_packed = rows >= LEAST_ROWS and is_complex_product(problem)
    if not is_packed and rows * reduction * columns * wide <= SMALL_PRODUCT:
        return PRODUCT + (rows + ceil(rows / SMALL_ROWS)) * (columns + SHORT_COLUMNS) * per_column
    whole = ceil(rows / ROWS) * ROWS * ceil(columns / COLUMNS) * COLUMNS
    return PRODUCT + whole * per_column + reduction * (rows + columns) * PACK * wide


class Parts(NamedTuple):
    """A product in parts: rows of the weight, and columns, of a part; all columns, some of which nobody may read."""

    rows: int
    columns: int
    length: int
    seconds: float


@lru_cache(maxsize=512)
def parts_of_product(
    rows: int, reduction: int, columns: int, dtype: str, may_be_longer: bool = False, turned: bool = False
) -> Parts | None:
    """A product in parts so small that BLAS packs no operand, of columns that begin where cache lines do.

    Elements that do not fill a vector take as long as those that do: it may be quicker to have columns more that nobody
    reads, and to copy the others.  The weight is `turned` where its columns lie side by side, not its rows.  None where
    there are no such parts, or numbers are not real.
    """
    if dtype not in ("float32", "float64") or rows < SEVERAL_ROWS or not reduction * columns:
        return None
    vector = round(VECTOR_ELEMENTS / width(dtype))
    steps = TURNED_STEPS if turned else STEPS
    most_columns = int(min(READ_AGAIN / width(dtype), SMALL_PRODUCT / min(rows, LEAST_ROWS))) // reduction
    best: Parts | None = None
    for length in {columns, *(ceil(columns / n) * n for n in (vector, 4 * vector) if may_be_longer)}:
        copies = added(rows * columns, dtype, columns) if length > columns else 0.0
        for run in _runs(length, most_columns, vector):
            runs, rest = divmod(length, run)
            groups = _in_vectors(run, vector), _in_vectors(rest, vector)
            begun = ceil(length / run) * BEGIN + length * reduction * READ * width(dtype)
            for part in _parts_of_rows(rows, SMALL_PRODUCT // (reduction * run), steps):
                seconds = copies
                for count, own in ((rows // part, part), (1, rows % part)):
                    if own:
                        along = runs * _step(own, groups[0], steps) + _step(own, groups[1], steps)
                        seconds += count * (begun + reduction * along)
                if best is None or seconds < best.seconds:
                    best = Parts(part, run, length, seconds)
    return best


def product_of_few(rows: int, reduction: int, columns: int, dtype: str) -> float:
    """What a product of fewer rows than parts have takes at the least: each step along the sum has whole vectors."""
    if dtype not in ("float32", "float64") or rows >= LEAST_ROWS:
        return 0.0
    return reduction * _step(rows, _in_vectors(columns, round(VECTOR_ELEMENTS / width(dtype))), STEPS)


def small_product(rows: int, reduction: int, columns: int, dtype: str) -> float:
    """A product of real numbers that BLAS packs no operand of; what a step along the sum reads of either lies side by side."""
    vector = round(VECTOR_ELEMENTS / width(real_part(dtype)))
    return BEGIN + reduction * _step(rows, _in_vectors(columns, vector), TURNED_STEPS)


#: How many times 4 vectors, 2, and 1 there are; and what a step of rows takes by each of these.
_Groups = tuple[int, int, float]
_Steps = Mapping[int, Sequence[tuple[int, float]]]


def _in_vectors(columns: int, vector: int) -> _Groups:
    vectors, rest = divmod(columns, vector)
    return vectors // 4, vectors % 4 // 2, vectors % 2 + (PART_OF_VECTOR if rest else 0)


def _step(rows: int, groups: _Groups, steps: _Steps) -> float:
    """Seconds of a step along the sum: so many rows, and all vectors of a run."""
    return sum(count * _step_of(rows, steps[vectors]) for vectors, count in zip((4, 2, 1), groups) if count)


def _step_of(rows: int, taken: Sequence[tuple[int, float]]) -> float:
    seconds = 0.0
    for at_a_time, own in taken:
        times, rows = divmod(rows, at_a_time)
        seconds += times * own
    return seconds


def _runs(length: int, most: int, vector: int) -> set[int]:
    """Columns that a part may have: all, or some that are whole vectors."""
    runs = {length} if length <= most else set()
    run = min(most, length) // (4 * vector) * 4 * vector
    while run:
        runs.add(run)
        run = run // 2 // (4 * vector) * 4 * vector
    return runs or ({2 * vector} if most >= 2 * vector else set())


def _parts_of_rows(rows: int, most: int, steps: _Steps) -> set[int]:
    """Rows that a part may have: equal ones, or as many as are taken at a time."""
    fewest = ceil(rows / most)
    equal = {ceil(rows / count) for count in range(fewest, min(rows, fewest + 2) + 1)}
    whole = {ceil(part / taken[0][0]) * taken[0][0] for part in equal for taken in steps.values()}
    return equal | {part for part in whole if part <= min(rows, most)}


def product_of_rows(rows: float, others: float, length: float, problem: ProductsProblem) -> float:
    """A small matrix (rows, length) by the transpose of one (others, length): vectors by vectors, for BLAS."""
    longer = max(rows, others) * length * width(problem.dtype)
    return BY_ROWS * product(rows, length, others, problem) + (longer * LEAVES if longer > INNERMOST else 0)


def dot(elements: float, length: float, problem: ProductsProblem) -> float:
    """Elements of vectors, of so many each, that are multiplied and added up."""
    return elements * (DOT * multiply_adds(problem) + DOT_BEGUN / max(1.0, length))


def copied(elements: float, run: float, dtype: str, apart: bool = False) -> float:
    """Elements that are copied in cache in runs of so many, or from places that are apart."""
    return elements * ((APART if apart else COPY) * width(dtype) + RUN / max(1.0, run))


def shifted(elements: float, run: float, dtype: str) -> float:
    """Elements that are copied in runs of so many, of several rows each."""
    return elements * (SHIFTED * width(dtype) + RUN / max(1.0, run))


def left_out(elements: float) -> float:
    """Zeros that are written one by one where columns have elements of another row."""
    return elements * LEFT_OUT


def added_by_index(elements: float, dtype: str) -> float:
    """Elements that are added where a padding mode's index arrays say."""
    return elements * ADD_BY_INDEX * width(dtype)


def transposed(elements: float) -> float:
    """Elements of an image that is brought from channels first to channels last, or back."""
    return elements * TRANSPOSE


def channels_moved(problem: ConvProblem, last: bool = False) -> float:
    """What it takes to bring channels in front of their pixels, or behind them as the last, and those of the result back.

    Behind them they come as tiles are copied, and an image that stays in cache takes no longer for that.
    """
    images = (*(x for x in problem.xs if not last or x.nbytes > STAYS), problem.out)
    return sum(transposed(prod(x.shape)) for x in images if x.shape[1] > 1 and (x.stride_c == 1) != last)


def touched(nbytes: float) -> float:
    """Memory that the system gives, filled with zeros, when it is first written."""
    return max(0.0, nbytes - OWN) * TOUCH


def added(elements: float, dtype: str, run: float = 1e9, apart: bool = False) -> float:
    """Elements that are added to others in cache, in runs of so many, or to places that are apart."""
    return elements * ((APART if apart else ADD) * width(dtype) + RUN / max(1.0, run))


def summed(elements: float, run: float, dtype: str) -> float:
    """Elements of a weight's gradient that a block's product is added to, in runs of so many."""
    return elements * (SUMMED * width(dtype) + SUMMED_RUN / max(1.0, run))


def between(nbytes: float, at_a_time: float) -> float:
    """Images that one layer of a chain writes and the next reads, of which so many bytes are in memory at a time."""
    per_byte = BETWEEN * max(0.0, 1 - STAYS / at_a_time) if at_a_time else 0.0
    return nbytes * (per_byte + (MAPPED if at_a_time >= REUSED else 0.0))


#: How much longer an element takes that is added where windows lie, one beside the other; and products of one tap at a time,
#: which are written to be added.
WINDOWS_APART, OF_ONE_TAP = 2.0, 1.6


def added_to_windows(elements: float, dtype: str, run: float, apart: bool) -> float:
    """Elements of columns that are added to the image that their windows lie in."""
    return WINDOWS_APART * added(elements, dtype, run, apart)


#: Seconds of an element of a weight whose taps are reversed, and inputs and outputs exchanged; and calls beside, also of a
#: border that is folded onto the image.
EXCHANGED, GATHERED_CALLS, BORDER_CALLS = 1.9e-9, 12, 50


def exchanged(elements: float) -> float:
    """A weight as the gathered convolution reads it."""
    return elements * EXCHANGED


# --- Winograd's transforms ------------------------------------------------------------------------------------

#: Elements of a tile along an axis of more than one tap, and the most taps of windows in it.
TILE, MOST_TAPS = 6, 5
#: Seconds of an element of a tile that is transformed, and elements that what lies side by side is as if it were longer by.
TRANSFORM, SHORT_ROW = 150e-12, 32
#: Seconds of an element of a kernel that is transformed, for each product; and before, of each tap.
TRANSFORM_WEIGHT, ARRANGE = 550e-12, 0.9e-9
#: Seconds more of a row of a product whose outputs are fewer than a vector has.
ROW_OF_FEW = 3e-9


def tile_outputs(taps: int) -> int:
    """Windows of so many taps in a tile, along their axis; where that has one tap it is not tiled."""
    return 1 if taps == 1 else TILE + 1 - taps


def winograd_calls(geometry: ConvGeometry) -> int:
    """Calls of a block, and of the weight."""
    return 12 + 6 * sum(taps > 1 for taps in geometry.kernel)


def transformed(elements: float, rows: Sequence[float], kernel: Sequence[int]) -> float:
    """Elements of tiles, or back, of which so many lie side by side behind each axis; before they are transformed they are fewer."""
    written, left = 0.0, elements
    for taps, row in zip(kernel, rows):
        if taps > 1:
            written += left * (1 + SHORT_ROW / max(1, row))
            left *= tile_outputs(taps) / TILE
    return written * TRANSFORM


def transformed_to_rows(elements: float, products: int) -> float:
    """Elements of a result whose pixels lie side by side, of so many products that are their last transform."""
    return transposed(elements) + products * PRODUCT


def products_of_tiles(tiles: int, geometry: ConvGeometry, problem: ProductsProblem) -> float:
    """The products of so many tiles, of all groups, at one point of them: vectors are of a tile's outputs."""
    channels, outputs = geometry.group_channels, geometry.group_outputs
    whole = ceil(outputs / VECTOR_ELEMENTS) * VECTOR_ELEMENTS
    own = max(product(tiles, channels, outputs, problem), tiles * channels * whole * MULTIPLY_ADD)
    if outputs < VECTOR_ELEMENTS:
        own += tiles * ROW_OF_FEW
    return geometry.groups * own


def transformed_weight(kernels: int, products: int, taps: int) -> float:
    """A weight."""
    return kernels * (products * TRANSFORM_WEIGHT + taps * ARRANGE)


# --- Fourier's transforms -------------------------------------------------------------------------------------

#: Seconds of an element for each doubling of a transform's length; and beside.
FOURIER, FOURIER_COPY = 99e-12, 1.5e-9
#: How much longer yet a line takes that is transformed alone: of several, vectors take an element each.
FOURIER_ALONE = 1.0
#: Seconds of two elements of spectra that are multiplied, and added to the sums.
COMPLEX_PRODUCT = 1.6e-9
#: Seconds of a matrix product of one frequency: its call, each element of the weight that is read, each multiplication.
MATRIX, MATRIX_READ, MATRIX_MULTIPLY = 37e-9, 140e-12, 140e-12
#: Seconds of an element of an image, or of a weight's spectrum, that goes from channels first to channels last.
REORDER, SPREAD = 1.3e-9, 14e-9
#: Shortest transform.
SHORTEST = 16
#: Calls of a block, each with a long way through SciPy.
FFT_CALLS = 50


def slowness(problem: ProductsProblem) -> float:
    """How much longer an element takes than one of float32."""
    wide = 1.8 if real_part(accumulator(problem.dtype)) == "float64" else 1.0
    return wide * (1 if product_flops(problem.x_dtype, problem.factor_dtype) == 2 else 2)


def fourier(elements: float, levels: float, problem: ProductsProblem, lines: float) -> float:
    """A transform of so many elements, along axes whose lengths have so many doublings together, of so many lines at a time."""
    alone = 1 + FOURIER_ALONE / lines
    return elements * (FOURIER_COPY + FOURIER * levels) * alone * slowness(problem)


def complex_products(elements: float, problem: ProductsProblem) -> float:
    """Elements of spectra, multiplied and added."""
    return elements * COMPLEX_PRODUCT * slowness(problem)


def complex_matrices(
    matrices: float, read: float, multiplied: float, reordered: float, problem: ProductsProblem
) -> float:
    """Products of spectra as matrices, one for each frequency."""
    own = matrices * MATRIX + read * MATRIX_READ + multiplied * MATRIX_MULTIPLY + reordered * REORDER
    return own * slowness(problem)


def apart(elements: float, problem: ProductsProblem) -> float:
    """Elements of a weight's spectra that are written one by one."""
    return elements * SPREAD * slowness(problem)


# --- at the least ---------------------------------------------------------------------------------------------


def _at_the_least(work: float, calls: float, problem: ProductsProblem) -> float:
    """Work and calls on all threads, or on one: whichever takes less."""
    threads = problem.host.threads
    alone = work if threads == 1 else min(work, BESIDE_OTHERS * work / threads + WAKE)
    return alone + calls * CALL


def least_winograd(problem: ProductsProblem) -> float:
    """What Winograd's method takes at the least: the transforms of tiles that no image cuts, and of the weight."""
    geometry = problem.geometry
    products = TILE ** sum(taps > 1 for taps in geometry.kernel)
    elements = geometry.batch * geometry.pixels * products / prod(map(tile_outputs, geometry.kernel))
    inputs, outputs = geometry.in_channels, geometry.out_channels
    work = transformed(elements * inputs, (inf, inf, inputs), geometry.kernel)
    work += transformed(elements * outputs, (inf, inf, inf), (*geometry.kernel[:2], 1))  # and a product to rows
    if not problem.weight_is_constant:
        work += transformed_weight(geometry.out_channels * geometry.group_channels, products, geometry.taps)
    return _at_the_least(work, winograd_calls(geometry), problem)


def least_fft(problem: ProductsProblem) -> float:
    """What Fourier transforms take at the least: the transforms of images and kernels, and products of half as many numbers."""
    geometry = problem.geometry
    pairs = geometry.out_channels * geometry.group_channels
    images = geometry.in_channels * prod(geometry.reached) + geometry.out_channels * geometry.pixels
    kernels = pairs * prod(max(SHORTEST, span) for span, taps in zip(geometry.span, geometry.kernel) if taps > 1)
    work = fourier(geometry.batch * images + kernels, 4, problem, inf)
    work += geometry.batch * geometry.pixels / 2 * pairs * min(MATRIX_MULTIPLY, COMPLEX_PRODUCT) * slowness(problem)
    return _at_the_least(work, FFT_CALLS, problem)


def least_direct(problem: ProductsProblem) -> float:
    """What products tap by tap take at the least: columns all the same, and a pass over the sums."""
    geometry = problem.geometry
    pixels = geometry.batch * geometry.pixels
    work = pixels * geometry.out_channels * (geometry.reduction * MULTIPLY_ADD * multiply_adds(problem) + 2 * ADD)
    work += copied(pixels * geometry.in_channels * geometry.taps, geometry.out_size[2], problem.x_dtype)
    return _at_the_least(work, 10, problem)


# --- depthwise: elements times numbers ------------------------------------------------------------------------

#: Seconds of an element times a tap: in a run, in one that is short where taps lie along several axes, and of elements that
#: strides keep apart; and of a run of channels that begins.
SCALED, SCALED_SHORT, SCALED_APART, CHANNELS = 160e-12, 430e-12, 1.3e-9, 15e-9
#: Seconds of an element times a tap in NumPy's `correlate`, by the bytes of an element.
CORRELATED = {4: 270e-12, 8: 220e-12}


def scaled(elements: float, problem: ProductsProblem, channels: int = 0, is_short: bool = False) -> float:
    """Elements times taps, in runs of memory, or of so many channels."""
    own = SCALED_SHORT if is_short else SCALED
    return elements * (own * multiply_adds(problem) + (CHANNELS / channels if channels else 0))


def correlated(elements: float, problem: ProductsProblem) -> float:
    """A line by NumPy's `correlate`, and its way into the sums."""
    own = CORRELATED[ITEMSIZE[accumulator(problem.dtype)]]
    return elements * own * problem.geometry.kernel[2] + copied(elements, elements, problem.dtype)


def scaled_apart(elements: float, problem: ProductsProblem) -> float:
    """The same of elements that strides keep apart."""
    return elements * SCALED_APART * multiply_adds(problem)


def least_scattered(problem: ProductsProblem) -> float:
    """What products that are added take at the least: an addition for every tap, in calls for each of these or each pixel."""
    geometry = problem.geometry
    elements = geometry.batch * geometry.in_channels * geometry.pixels * geometry.taps
    return _at_the_least(added(elements, problem.dtype), 2 * min(geometry.taps, geometry.pixels), problem)
