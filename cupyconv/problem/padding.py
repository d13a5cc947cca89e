"""Every notation of padding, resolved to one `(before, after)` pair per spatial axis."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

PADDING_MODES = ("constant", "reflect", "symmetric", "edge", "wrap")
#: Their names in other libraries.  SciPy's "reflect" is "symmetric" here; no error can detect this.
FOREIGN_PADDING_MODES = {
    "zeros": "constant", "fill": "constant", "grid-constant": "constant", "mirror": "reflect", "symm": "symmetric",
    "grid-mirror": "symmetric", "nearest": "edge", "replicate": "edge", "circular": "wrap", "grid-wrap": "wrap",
}  # fmt: skip

_NAMED = ("valid", "same", "same_lower", "full", "causal")
#: ONNX's ``auto_pad`` values, each with the equivalent `padding`.
AUTO_PAD = {"SAME_UPPER": "same", "SAME_LOWER": "same_lower", "VALID": "valid"}

Pairs = tuple[tuple[int, int], ...]


def per_axis(name: str, value: Any, rank: int, least: int) -> tuple[int, ...]:
    """Return one int, or one int per spatial axis, as a tuple of `rank` ints, each at least `least`."""
    if isinstance(value, (tuple, list)):
        if len(value) != rank:
            raise ValueError(
                f"{name} has {len(value)} entries, needed one int or {rank} ints (one per spatial axis); given {tuple(value)}"
            )
        values = tuple(_int(name, v) for v in value)
    else:
        values = (_int(name, value),) * rank
    if min(values, default=least) < least:
        raise ValueError(f"{name} must be at least {least}, given {value!r}")
    return values


def positive(name: str, value: Any) -> int:
    """Return an int that is at least 1."""
    number = _int(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, given {value!r}")
    return number


def resolve_padding(
    padding: Any, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Pairs:
    """Return the padding pairs of a convolution over `size`; all arguments are per spatial axis."""
    rank = len(size)
    span = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    if isinstance(padding, str):
        return _named(padding, size, span, stride)
    if not isinstance(padding, (tuple, list)):
        amount = padding_amount(padding)
        return ((amount, amount),) * rank
    if len(padding) != rank:
        raise ValueError(
            f"padding has {len(padding)} entries for {rank} spatial {'axis' if rank == 1 else 'axes'}; {_hint(padding, rank)}"
        )
    return tuple(_pair(entry) for entry in padding)


def resolve_transposed_padding(
    padding: Any,
    output_padding: Any,
    output_shape: Any,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return, per axis, how much is cut off before the result of a transposed convolution, and the result's size.

    `size` is the size of its input.

    ::

        stamps of the kernel, `stride` apart     |<------------- covered ------------->|
        padding in numbers                       |before|<---- result ---->|after|
        output_padding                           |before|<---- result ---->.....|  zeros, past `covered` too
        a size that was given                    |  the surplus, shared  |     of covered and output_padding
    """
    rank = len(size)
    covered = [(n - 1) * s + d * (k - 1) + 1 for n, k, s, d in zip(size, kernel, stride, dilation)]
    extra = per_axis("output_padding", output_padding, rank, 0)
    for more, s, d in zip(extra, stride, dilation):
        if more >= max(s, d):
            raise ValueError(
                f"output_padding must be less than the larger of stride {s} and dilation {d}, given {more}"
            )
    same = isinstance(padding, str) and padding in ("same", "same_lower")
    if isinstance(padding, str) and not same and padding != "valid":
        raise ValueError(
            f"padding of conv_transpose must be 'valid', 'same', 'same_lower' or numbers, given {padding!r}"
        )
    if output_shape is None and not same:
        pairs = resolve_padding(padding, size, kernel, stride, dilation)
        sizes = tuple(full - sum(pair) + more for full, pair, more in zip(covered, pairs, extra))
        if min(sizes) < 1:
            raise ValueError(
                f"padding {padding!r} removes the whole result: the kernel covers {tuple(covered)} elements, so the result"
                f" would have size {sizes}"
            )
        return tuple(before for before, _ in pairs), sizes
    if output_shape is None:
        sizes = tuple(n * s for n, s in zip(size, stride))
    else:
        sizes = per_axis("output_shape", output_shape, rank, 1)
        if not isinstance(padding, str) and any(map(any, resolve_padding(padding, size, kernel, stride, dilation))):
            raise ValueError(
                f"output_shape and padding {padding!r} both determine how much is cut off: pass only one of them; with"
                " output_shape, padding 'same' or 'same_lower' selects the side that loses an odd element"
            )
    # If the total is odd, ONNX cuts the odd element at the end only for SAME_UPPER.
    surplus = [max(0, full + more - n) for full, more, n in zip(covered, extra, sizes)]
    return tuple(total // 2 if padding == "same" else total - total // 2 for total in surplus), sizes


def _named(name: str, size: Sequence[int], span: Sequence[int], stride: Sequence[int]) -> Pairs:
    if name == "valid":
        return ((0, 0),) * len(size)
    if name == "full":
        return tuple((s - 1, s - 1) for s in span)
    if name == "causal":
        if len(size) != 1:
            raise ValueError(f"padding 'causal' requires one spatial axis, given {len(size)}")
        return ((span[0] - 1, 0),)
    if name in ("same", "same_lower"):
        # ceil(n / s) outputs: the last one starts at (ceil(n / s) - 1) * s and spans `span` elements.
        totals = [max(0, (-(-n // s) - 1) * s + span_ - n) for n, s, span_ in zip(size, stride, span)]
        pairs = [(total // 2, total - total // 2) for total in totals]
        return tuple(pairs) if name == "same" else tuple((after, before) for before, after in pairs)
    hint = "; for ONNX's auto_pad, use onnx_padding" if name in AUTO_PAD else ""
    if name in PADDING_MODES or name in FOREIGN_PADDING_MODES:
        hint = f"; {name!r} is a padding mode: pass it as padding_mode, together with padding='same' or numbers"
    raise ValueError(f"unknown padding {name!r}; known are {', '.join(_NAMED)}{hint}")


def padding_mode_hint(given: Any) -> str:
    """A hint for an invalid `padding_mode` whose meaning is known."""
    if not isinstance(given, str):
        return ""
    if given in _NAMED:
        return f"; {given!r} is a padding: pass padding={given!r}"
    ours = FOREIGN_PADDING_MODES.get(given)
    return f"; what other libraries call {given!r} is {ours!r} here" if ours else ""


def _pair(entry: Any) -> tuple[int, int]:
    if not isinstance(entry, (tuple, list)):
        amount = padding_amount(entry)
        return amount, amount
    if len(entry) != 2:
        raise ValueError(f"padding of one axis must be an int or a (before, after) pair, given {entry!r}")
    return padding_amount(entry[0]), padding_amount(entry[1])


def _hint(padding: Sequence[Any], rank: int) -> str:
    flat = all(not isinstance(entry, (tuple, list)) for entry in padding)
    if flat and len(padding) == 2 * rank:
        if rank == 1:
            return f"for one axis with unequal sides, write (({padding[0]}, {padding[1]}),)"
        return "for a flat ONNX list, use onnx_padding(pads)"
    if flat and len(padding) == 2:
        return f"a single pair is ambiguous: write ({tuple(padding)},) * {rank} for that pair on every axis"
    return "pass an int, or one int or (before, after) pair per spatial axis"


def padding_amount(value: Any, name: str = "padding") -> int:
    """Return a number of added elements: a non-negative int."""
    amount = _int(name, value)
    if amount < 0:
        raise ValueError(f"{name} must not be negative, given {value!r} (slice the array to crop it)")
    return amount


def _int(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):  # it would count as 0 or 1, but was meant for another argument
            raise TypeError
        return index(value)
    except TypeError:
        shape = getattr(value, "shape", ())
        given = f"an array of shape {shape}: pass a tuple" if shape else repr(value)
        raise TypeError(f"{name} accepts only integers, given {given}") from None
