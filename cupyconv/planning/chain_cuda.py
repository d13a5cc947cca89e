"""Two convolutions in one kernel, the image between them in shared memory."""

from __future__ import annotations

from cupyconv.planning.draft import Draft
from cupyconv.planning.request import ConvRequest, NotApplicable


def draft_pair(first: ConvRequest, second: ConvRequest) -> Draft:
    """One launch that does both layers, or `NotApplicable` with the reason.

    ``second.xs`` is ``(first.out,)`` but for its dtype, which is that of `second`'s arithmetic; this image has
    no memory.  All dtypes are converted, inputs of no channels left out, and no result is empty.  The draft's
    reason states what the decision rests on: tile, shared memory, registers, occupancy, recomputation.
    """
    raise NotApplicable("no kernel does two convolutions at once in this version")
