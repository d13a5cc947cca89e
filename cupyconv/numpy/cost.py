"""The cost model: estimated seconds of each implementation, from which "auto" chooses and which `explain` prints.

A loop over blocks states how much of each building block it has, for one thread.  This module estimates their time.

::

    seconds  =  work / threads  +  calls  +  waking threads             on one thread:  work  +  calls

`work` runs in NumPy's and BLAS's own loops.  `calls` is the Python code between them, which one thread at a time runs.

The constants are for float32, OpenBLAS and one core of two, with AVX-512 and 2 MiB of L2 cache per core.  Each was
first timed by itself.  All were then fitted, by least squares of logarithms, to the times of 900 loops of 290
convolutions: their sums must be right, and the time of one depends on what is in cache.  A loop near the best of its
problem takes 1.2 times more or less than estimated.  On another processor all constants differ; their ratios differ
less.
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

#: A call of NumPy, with the Python code that prepares its arguments.
CALL = 2.3e-6
#: Additional time of a call while threads wait for each other to release the interpreter.
HANDOVER = 1.7e-6
#: Number of calls that take as long as computing a tap's regions for a block, if too many blocks exist to cache them.
REGION_CALLS = 10
#: Time to wake other threads and to wait for them at the end, if calls follow one another.  After some milliseconds
#: without a call it is up to three times as long.  Most calls of this size belong to a sequence, like a network's
#: layers.
WAKE = 110e-6
#: Seconds of work for which another thread is worth waking: for most loops, and for products with Toeplitz matrices.
#: `backend` requires less: it only limits the threads of a plan, from a cautious estimate of the work.
SHARE, TOEPLITZ_SHARE = 600e-6, 400e-6
#: Slowdown of work while other cores use the same memory; of most work, and of work that is mostly products of columns.
CONTENTION, PRODUCTS_BESIDE = 1.25, 1.12

# --- products by BLAS -----------------------------------------------------------------------------------------

#: Seconds of a multiply-add, and to start one product of a batch.
MULTIPLY_ADD, PRODUCT = 14e-12, 27e-9
#: Multiply-adds up to which a product reads its operands without packing (OpenBLAS on x86-64 with AVX-512).
SMALL_PRODUCT = 1_000_000
#: Largest number of multiply-adds of a product that is cut to be small, with a safety margin.
SAFELY_SMALL = 900_000
#: Limits of the rows and of the elements of a weight with which small products are faster than one long one; the limit
#: of their columns, and a divisor of them.  One or two rows are as fast with as many columns as BLAS does not pack.
FEW_ROWS, SMALL_WEIGHT, RUN_OF_COLUMNS, RUN_STEP = 32, 5000, 768, 48
ROWS_OF_LONG_RUNS = 2
#: Seconds to pack an element of an operand.
PACK = 130e-12
#: Rows and columns per iteration of BLAS's innermost loop; missing ones take as long.
ROWS, COLUMNS = 4, 16
#: Rows per iteration of a small product, which reads its columns again each time: this takes as long as a row.  The
#: second number is the overhead of such a product, in columns.
SMALL_ROWS, SHORT_COLUMNS = 6, 8

#: Seconds of one step of the reduction in a small product whose columns start at cache lines, by numbers of vectors and
#: rows.  Vectors of columns are processed 4 at a time, then 2, then 1; rows, as many at a time as the first number of a
#: pair.  For a weight with contiguous rows; and for a turned weight, with contiguous columns.
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
#: Bytes from which no weight is turned.  It would leave the cache, each step of the reduction would wait for its own
#: cache line, and products would take twice as long.  Contiguous rows are prefetched, however large they are.
TURNED_LEAVES = 1 << 20
#: float32 elements of a vector; seconds to start such a product, and to read an element of columns per part of rows.
VECTOR_ELEMENTS, BEGIN, READ = 16, 60e-9, 25e-12
#: Cost of columns that do not fill a vector, in vectors.
PART_OF_VECTOR = 1.4
#: Rows from which a weight has such products; least rows of such a product, if there are as many; most elements of its
#: columns, which are read again for every few rows.
SEVERAL_ROWS, MIN_ROWS, READ_AGAIN = 2, 8, 1 << 17
#: Slowdown of a small product whose columns start anywhere: many loads read two cache lines.
ANYWHERE = 1.5
#: Slowdown of a small product that reads both operands along the reduction; elements of the longer one that stay in the
#: innermost cache, and seconds per element if they do not.
BY_ROWS, INNERMOST, LEAVES = 1.2, 12_000, 220e-12

#: Seconds of a multiply-add of two vectors in the innermost cache, and to start one; seconds of a multiply-add of a
#: vector and a matrix, and the number of elements of a matrix that stays in cache.
DOT, DOT_BEGUN, BY_VECTOR, VECTOR = 60e-12, 20e-9, 70e-12, 1 << 20

# --- passes over memory ---------------------------------------------------------------------------------------

#: Seconds to copy an element in cache, to start a run of elements, and to copy an element without neighbours.
COPY, RUN, APART = 225e-12, 4.2e-9, 360e-12
#: Slowdown of columns that do not stay in cache.
FARTHER = 2.0
#: Seconds to copy an element in a run of hundreds, and to write a zero over an element that does not belong there.
SHIFTED, LEFT_OUT = 150e-12, 1e-9
#: Seconds to read an element and add it to another one in cache; to add it to an image with a border; and of one that
#: pooling reads or writes.
ADD, ADD_WITH_BORDER, POOLED = 350e-12, 4e-9, 650e-12
#: Seconds to add an element of a block's product to a weight gradient, which leaves the cache between blocks; and to
#: start a run of such elements.
SUMMED, SUMMED_RUN = 1.2e-9, 16e-9
#: Seconds per element to convert between channels first and channels last, which is also the last Winograd transform.
TRANSPOSE = 600e-12
#: Bytes of memory that a process keeps between calls, and seconds per byte of the first touch of more memory.
OWN, TOUCH = 256 << 10, 14e-12


#: Seconds per byte that one layer of a chain writes to memory and the next reads; bytes that stay in a core's cache.
BETWEEN, STAYS = 25e-12, 1 << 20
#: Seconds per byte of memory that the system allocates in each call, and bytes from which C's allocator returns memory
#: to the system; smaller memory is reused.
MAPPED, REUSED = 200e-12, 32 << 20


#: Units in which an estimated time is printed.
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def by_model(seconds: float) -> str:
    """Format an estimated time with the two digits that the model justifies."""
    rounded = float(f"{seconds:.1e}")
    unit, name = next((unit for unit in _UNITS if rounded >= unit[0]), _UNITS[-1])
    value = rounded / unit
    return f"estimated {value:,.{0 if value >= 9.95 else 1}f} {name}"


def multiply_adds(problem: ProductsProblem) -> float:
    """Return the number of float32 multiply-adds that take as long as one of the problem's."""
    wide = 2 if real_part(accumulator(problem.dtype)) == "float64" else 1
    return wide * product_flops(problem.x_dtype, problem.factor_dtype) / 2


def is_complex_product(problem: ProductsProblem) -> bool:
    """Whether both factors are complex: BLAS always packs them, and divides smaller products of them among threads."""
    return product_flops(problem.x_dtype, problem.factor_dtype) == 8


def width(dtype: str) -> float:
    """Return the size of an element in the compute dtype, in float32 elements."""
    return ITEMSIZE[accumulator(dtype)] / 4


def shared(work: float, calls: float, parts: int, threads: int, beside: float = CONTENTION) -> float:
    """Estimated time of work in equal parts on threads, and of calls, which one thread at a time begins or ends."""
    if threads <= 1 or not parts:
        return work + calls * CALL
    return beside * work * ceil(parts / threads) / parts + calls * (CALL + HANDOVER) + WAKE


def worth_waking(threads: int, work: float, share: float | None = None) -> int:
    """Return how many of `threads` threads have a share of the work that makes them worth waking; at least one."""
    return max(1, min(threads, int(work / (share or SHARE))))


@lru_cache(maxsize=512)
def run_of(rows: float, reduction: float, columns: float, is_float32: bool) -> int:
    """Return the columns that such a weight is multiplied with at a time, so that BLAS packs no operand; 0 for all."""
    if not is_float32 or rows > FEW_ROWS or not 0 < rows * reduction <= SMALL_WEIGHT:
        return 0
    unpacked = int(SMALL_PRODUCT / (rows * reduction))
    run = (unpacked if rows <= ROWS_OF_LONG_RUNS else min(RUN_OF_COLUMNS, unpacked)) // RUN_STEP * RUN_STEP
    return run if columns > min(unpacked, 2 * run) else 0


def divided_from(problem: ProductsProblem) -> int:
    """Return the multiply-adds from which BLAS divides a product among its threads."""
    return SMALL_PRODUCT // 10 if is_complex_product(problem) else SMALL_PRODUCT


def holds_blas(threads: int, host: HostModel, largest: int, divided: int = SMALL_PRODUCT) -> bool:
    """Whether BLAS is held at one thread during products of up to `largest` multiply-adds, since their loop has one.

    It is not if the caller set the number of threads.  After a product, BLAS's threads keep looking for work, on
    processors that our threads need, in this call or the next.
    """
    return threads == 1 <= host.most and largest > divided


def product(rows: float, reduction: float, columns: float, problem: ProductsProblem) -> float:
    """Estimated time of (rows, reduction) times (reduction, columns); the longer side counts as the columns."""
    scale, wide = multiply_adds(problem), width(problem.dtype)
    if scale == 1 and (run := run_of(rows, reduction, columns, accumulator(problem.dtype) == "float32")):
        return columns / run * product(rows, reduction, run, problem)
    if rows > columns:
        rows, columns = columns, rows
    if rows == 1 and columns * reduction < VECTOR:
        return PRODUCT + reduction * columns * scale * BY_VECTOR
    per_column = reduction * scale * MULTIPLY_ADD
    is_packed = rows >= MIN_ROWS and is_complex_product(problem)
    if not is_packed and rows * reduction * columns * wide <= SMALL_PRODUCT:
        return PRODUCT + (rows + ceil(rows / SMALL_ROWS)) * (columns + SHORT_COLUMNS) * per_column
    whole = ceil(rows / ROWS) * ROWS * ceil(columns / COLUMNS) * COLUMNS
    return PRODUCT + whole * per_column + reduction * (rows + columns) * PACK * wide


class Parts(NamedTuple):
    """A product in parts: rows and columns of a part, all columns (some may never be read), and the estimated time."""

    rows: int
    columns: int
    length: int
    seconds: float


@lru_cache(maxsize=512)
def parts_of_product(
    rows: int, reduction: int, columns: int, dtype: str, may_be_longer: bool = False, turned: bool = False
) -> Parts | None:
    """Return a product in parts so small that BLAS packs no operand, with columns that start at cache lines.

    Elements that do not fill a vector take as long as those that do.  So it may be faster to compute additional columns
    that are never read, and to copy the other ones.  The weight is `turned` if its columns, not its rows, are
    contiguous.  The result is None if there are no such parts, or if numbers are not real.
    """
    if dtype not in ("float32", "float64") or rows < SEVERAL_ROWS or not reduction * columns:
        return None
    vector = round(VECTOR_ELEMENTS / width(dtype))
    steps = TURNED_STEPS if turned else STEPS
    most_columns = int(min(READ_AGAIN / width(dtype), SMALL_PRODUCT / min(rows, MIN_ROWS))) // reduction
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
    """Lower bound for a product of fewer rows than parts have: each step of the reduction has whole vectors."""
    if dtype not in ("float32", "float64") or rows >= MIN_ROWS:
        return 0.0
    return reduction * _step(rows, _in_vectors(columns, round(VECTOR_ELEMENTS / width(dtype))), STEPS)


def small_product(rows: int, reduction: int, columns: int, dtype: str) -> float:
    """Estimated time of a real product without packing; a reduction step reads contiguous elements of both operands."""
    vector = round(VECTOR_ELEMENTS / width(real_part(dtype)))
    return BEGIN + reduction * _step(rows, _in_vectors(columns, vector), TURNED_STEPS)


#: Numbers of groups of 4 vectors, 2 vectors and 1 vector; and the time of a step of rows for each of these.
_Groups = tuple[int, int, float]
_Steps = Mapping[int, Sequence[tuple[int, float]]]


def _in_vectors(columns: int, vector: int) -> _Groups:
    vectors, rest = divmod(columns, vector)
    return vectors // 4, vectors % 4 // 2, vectors % 2 + (PART_OF_VECTOR if rest else 0)


def _step(rows: int, groups: _Groups, steps: _Steps) -> float:
    """Seconds of one step of the reduction, for `rows` rows and all vectors of a run."""
    return sum(count * _step_of(rows, steps[vectors]) for vectors, count in zip((4, 2, 1), groups) if count)


def _step_of(rows: int, taken: Sequence[tuple[int, float]]) -> float:
    seconds = 0.0
    for at_a_time, own in taken:
        times, rows = divmod(rows, at_a_time)
        seconds += times * own
    return seconds


def _runs(length: int, most: int, vector: int) -> set[int]:
    """Return the numbers of columns that a part may have: all, or some that are whole vectors."""
    runs = {length} if length <= most else set()
    run = min(most, length) // (4 * vector) * 4 * vector
    while run:
        runs.add(run)
        run = run // 2 // (4 * vector) * 4 * vector
    return runs or ({2 * vector} if most >= 2 * vector else set())


def _parts_of_rows(rows: int, most: int, steps: _Steps) -> set[int]:
    """Return the numbers of rows that a part may have: equal parts, or multiples of the rows per iteration."""
    fewest = ceil(rows / most)
    equal = {ceil(rows / count) for count in range(fewest, min(rows, fewest + 2) + 1)}
    whole = {ceil(part / taken[0][0]) * taken[0][0] for part in equal for taken in steps.values()}
    return equal | {part for part in whole if part <= min(rows, most)}


def product_of_rows(rows: float, others: float, length: float, problem: ProductsProblem) -> float:
    """Estimated time of a small (rows, length) times the transpose of (others, length): BLAS multiplies vectors."""
    longer = max(rows, others) * length * width(problem.dtype)
    return BY_ROWS * product(rows, length, others, problem) + (longer * LEAVES if longer > INNERMOST else 0)


def dot(elements: float, length: float, problem: ProductsProblem) -> float:
    """Estimated time to multiply and add up `elements` elements of vectors that have `length` elements each."""
    return elements * (DOT * multiply_adds(problem) + DOT_BEGUN / max(1.0, length))


def copied(elements: float, run: float, dtype: str, apart: bool = False) -> float:
    """Estimated time to copy elements in cache, in runs of `run`; if `apart`, from strided places."""
    return elements * ((APART if apart else COPY) * width(dtype) + RUN / max(1.0, run))


def shifted(elements: float, run: float, dtype: str) -> float:
    """Estimated time to copy elements in runs of `run`, each of several rows."""
    return elements * (SHIFTED * width(dtype) + RUN / max(1.0, run))


def left_out(elements: float) -> float:
    """Estimated time to write zeros one by one over elements of columns that belong to another row."""
    return elements * LEFT_OUT


def added_with_border(elements: float, dtype: str) -> float:
    """Estimated time to add elements to an image with a border that is not zeros, box by box of each tap."""
    return elements * ADD_WITH_BORDER * width(dtype)


def transposed(elements: float) -> float:
    """Estimated time to convert elements of an image from channels first to channels last, or back."""
    return elements * TRANSPOSE


def channels_moved(problem: ConvProblem, last: bool = False) -> float:
    """Estimated time to move channels before their pixels, or after them if `last`, and the result's channels back.

    The copy of tiles moves channels last, and takes no longer for this if an image stays in cache.
    """
    images = (*(x for x in problem.xs if not last or x.nbytes > STAYS), problem.out)
    return sum(transposed(prod(x.shape)) for x in images if x.shape[1] > 1 and (x.stride_c == 1) != last)


def touched(nbytes: float) -> float:
    """Estimated time of the first write to memory, which the system fills with zeros."""
    return max(0.0, nbytes - OWN) * TOUCH


def added(elements: float, dtype: str, run: float = 1e9, apart: bool = False) -> float:
    """Estimated time to add elements to others in cache, in runs of `run`; if `apart`, to strided places."""
    return elements * ((APART if apart else ADD) * width(dtype) + RUN / max(1.0, run))


def summed(elements: float, run: float, dtype: str) -> float:
    """Estimated time to add elements of a block's product to a weight gradient, in runs of `run`."""
    return elements * (SUMMED * width(dtype) + SUMMED_RUN / max(1.0, run))


def between(nbytes: float, at_a_time: float) -> float:
    """Estimated time of images between two layers of a chain, of which `at_a_time` bytes are in memory at once."""
    per_byte = BETWEEN * max(0.0, 1 - STAYS / at_a_time) if at_a_time else 0.0
    return nbytes * (per_byte + (MAPPED if at_a_time >= REUSED else 0.0))


#: Slowdown of elements that are added to adjacent windows, and of products of one tap at a time, which are written
#: before they are added.
WINDOWS_APART, OF_ONE_TAP = 2.0, 1.6


def added_to_windows(elements: float, dtype: str, run: float, apart: bool) -> float:
    """Estimated time to add elements of columns to the places of their windows in the image."""
    return WINDOWS_APART * added(elements, dtype, run, apart)


#: Seconds per element to reverse a weight's taps and to exchange its inputs and outputs; additional calls for this; and
#: calls to fold a border onto the image.
EXCHANGED, GATHERED_CALLS, BORDER_CALLS = 1.9e-9, 12, 50


def exchanged(elements: float) -> float:
    """Estimated time to convert a weight to the order that the gathered convolution reads."""
    return elements * EXCHANGED


# --- Winograd's transforms ------------------------------------------------------------------------------------

#: Elements of a tile along an axis of more than one tap, and the most taps of windows in it.
TILE, MAX_TAPS = 6, 5
#: Seconds to transform an element of a tile, and overhead of a contiguous row, in elements.
TRANSFORM, SHORT_ROW = 150e-12, 32
#: Seconds to transform a kernel, for each product; and to arrange it before, for each tap.
TRANSFORM_WEIGHT, ARRANGE = 550e-12, 0.9e-9
#: Additional seconds per row of a product with fewer outputs than a vector has elements.
ROW_OF_FEW = 3e-9


def tile_outputs(taps: int) -> int:
    """Return the windows of `taps` taps in a tile along an axis; an axis of one tap is not tiled."""
    return 1 if taps == 1 else TILE + 1 - taps


def winograd_calls(geometry: ConvGeometry) -> int:
    """Return the number of calls for a block and for the weight."""
    return 12 + 6 * sum(taps > 1 for taps in geometry.kernel)


def transformed(elements: float, rows: Sequence[float], kernel: Sequence[int]) -> float:
    """Estimated time of transforms to `elements` elements of tiles, or back, with `rows` contiguous elements per axis.

    The arrays between the transforms of two axes have fewer elements.
    """
    written, left = 0.0, elements
    for taps, row in zip(kernel, rows):
        if taps > 1:
            written += left * (1 + SHORT_ROW / max(1, row))
            left *= tile_outputs(taps) / TILE
    return written * TRANSFORM


def transformed_to_rows(elements: float, products: int) -> float:
    """Estimated time of a last transform of elements, by `products` products, to a result with contiguous pixels."""
    return transposed(elements) + products * PRODUCT


def products_of_tiles(tiles: int, geometry: ConvGeometry, problem: ProductsProblem) -> float:
    """Estimated time of the products of tiles at one point, for all groups; vectors are of a tile's outputs."""
    channels, outputs = geometry.group_channels, geometry.group_outputs
    whole = ceil(outputs / VECTOR_ELEMENTS) * VECTOR_ELEMENTS
    own = max(product(tiles, channels, outputs, problem), tiles * channels * whole * MULTIPLY_ADD)
    if outputs < VECTOR_ELEMENTS:
        own += tiles * ROW_OF_FEW
    return geometry.groups * own


def transformed_weight(kernels: int, products: int, taps: int) -> float:
    """Estimated time to transform a weight."""
    return kernels * (products * TRANSFORM_WEIGHT + taps * ARRANGE)


# --- Fourier's transforms -------------------------------------------------------------------------------------

#: Seconds per element for each doubling of a transform's length, and seconds per element for any length.
FOURIER, FOURIER_COPY = 99e-12, 1.5e-9
#: Additional relative time of a line that is transformed alone: several lines share vectors, one element each.
FOURIER_ALONE = 1.0
#: Seconds to multiply two elements of spectra, and to add the product to the sums.
COMPLEX_PRODUCT = 1.6e-9
#: Seconds of one frequency's matrix product: for its call, per element of the weight, and per multiplication.
MATRIX, MATRIX_READ, MATRIX_MULTIPLY = 37e-9, 140e-12, 140e-12
#: Seconds per element of an image, and of a weight's spectrum, to convert from channels first to channels last.
REORDER, SPREAD = 1.3e-9, 14e-9
#: Length of the shortest transform.
SHORTEST = 16
#: Calls per block, each with a long path through SciPy.
FFT_CALLS = 50


def slowness(problem: ProductsProblem) -> float:
    """Return how much longer an element takes than one of float32."""
    wide = 1.8 if real_part(accumulator(problem.dtype)) == "float64" else 1.0
    return wide * (1 if product_flops(problem.x_dtype, problem.factor_dtype) == 2 else 2)


def fourier(elements: float, levels: float, problem: ProductsProblem, lines: float) -> float:
    """Estimated time to transform elements, `lines` lines at a time; `levels` counts the doublings of all lengths."""
    alone = 1 + FOURIER_ALONE / lines
    return elements * (FOURIER_COPY + FOURIER * levels) * alone * slowness(problem)


def complex_products(elements: float, problem: ProductsProblem) -> float:
    """Estimated time to multiply and add elements of spectra."""
    return elements * COMPLEX_PRODUCT * slowness(problem)


def complex_matrices(
    matrices: float, read: float, multiplied: float, reordered: float, problem: ProductsProblem
) -> float:
    """Estimated time of products of spectra as matrices, one for each frequency."""
    own = matrices * MATRIX + read * MATRIX_READ + multiplied * MATRIX_MULTIPLY + reordered * REORDER
    return own * slowness(problem)


def apart(elements: float, problem: ProductsProblem) -> float:
    """Estimated time to write elements of a weight's spectra one by one."""
    return elements * SPREAD * slowness(problem)


# --- lower bounds ---------------------------------------------------------------------------------------------


def _lower_bound(work: float, calls: float, problem: ProductsProblem) -> float:
    """Time of work and calls on all threads, or on one, whichever is less."""
    threads = problem.host.threads
    alone = work if threads == 1 else min(work, CONTENTION * work / threads + WAKE)
    return alone + calls * CALL


def least_winograd(problem: ProductsProblem) -> float:
    """Lower bound for Winograd's method: the transforms of tiles that no image border cuts, and of the weight."""
    geometry = problem.geometry
    products = TILE ** sum(taps > 1 for taps in geometry.kernel)
    elements = geometry.batch * geometry.pixels * products / prod(map(tile_outputs, geometry.kernel))
    inputs, outputs = geometry.in_channels, geometry.out_channels
    work = transformed(elements * inputs, (inf, inf, inputs), geometry.kernel)
    work += transformed(elements * outputs, (inf, inf, inf), (*geometry.kernel[:2], 1))  # and a product to rows
    if not problem.weight_is_constant:
        work += transformed_weight(geometry.out_channels * geometry.group_channels, products, geometry.taps)
    return _lower_bound(work, winograd_calls(geometry), problem)


def least_fft(problem: ProductsProblem) -> float:
    """Lower bound for Fourier transforms: transforms of images and kernels, and products of half as many numbers."""
    geometry = problem.geometry
    pairs = geometry.out_channels * geometry.group_channels
    images = geometry.in_channels * prod(geometry.reached) + geometry.out_channels * geometry.pixels
    kernels = pairs * prod(max(SHORTEST, span) for span, taps in zip(geometry.span, geometry.kernel) if taps > 1)
    work = fourier(geometry.batch * images + kernels, 4, problem, inf)
    work += geometry.batch * geometry.pixels / 2 * pairs * min(MATRIX_MULTIPLY, COMPLEX_PRODUCT) * slowness(problem)
    return _lower_bound(work, FFT_CALLS, problem)


def least_direct(problem: ProductsProblem) -> float:
    """Lower bound for products tap by tap: columns of all taps too, and a pass over the sums."""
    geometry = problem.geometry
    pixels = geometry.batch * geometry.pixels
    work = pixels * geometry.out_channels * (geometry.reduction * MULTIPLY_ADD * multiply_adds(problem) + 2 * ADD)
    work += copied(pixels * geometry.in_channels * geometry.taps, geometry.out_size[2], problem.x_dtype)
    return _lower_bound(work, 10, problem)


# --- depthwise: elements times scalars ------------------------------------------------------------------------

#: Seconds of an element times a tap: in a run; in a short run, if taps are along several axes; for strided elements.
#: And seconds to start a run of channels.
SCALED, SCALED_SHORT, SCALED_APART, CHANNELS = 160e-12, 430e-12, 1.3e-9, 15e-9
#: Seconds of an element times a tap in NumPy's `correlate`, by the bytes of an element.
CORRELATED = {4: 270e-12, 8: 220e-12}


def scaled(elements: float, problem: ProductsProblem, channels: int = 0, is_short: bool = False) -> float:
    """Estimated time of elements times taps, in contiguous runs, or in runs of `channels` channels."""
    own = SCALED_SHORT if is_short else SCALED
    return elements * (own * multiply_adds(problem) + (CHANNELS / channels if channels else 0))


def correlated(elements: float, problem: ProductsProblem) -> float:
    """Estimated time of NumPy's `correlate` on a line, and of the copy to the sums."""
    own = CORRELATED[ITEMSIZE[accumulator(problem.dtype)]]
    return elements * own * problem.geometry.kernel[2] + copied(elements, elements, problem.dtype)


def scaled_apart(elements: float, problem: ProductsProblem) -> float:
    """Estimated time of strided elements times taps."""
    return elements * SCALED_APART * multiply_adds(problem)


def least_scattered(problem: ProductsProblem) -> float:
    """Lower bound for products that are added: one addition for every tap, in calls for each tap or each pixel."""
    geometry = problem.geometry
    elements = geometry.batch * geometry.in_channels * geometry.pixels * geometry.taps
    return _lower_bound(added(elements, problem.dtype), 2 * min(geometry.taps, geometry.pixels), problem)
