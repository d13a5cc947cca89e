"""`vjp`: a function's result, and its pullback."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cupyconv.call.operation import bound, refusal
from cupyconv.ops.conv import conv, linmerge
from cupyconv.ops.conv_pullback import conv_with_pullback, linmerge_with_pullback
from cupyconv.ops.conv_transpose import conv_transpose
from cupyconv.ops.conv_transpose_pullback import conv_transpose_with_pullback
from cupyconv.ops.pooling import avg_pool, avg_pool_with_pullback, max_pool, max_pool_with_pullback
from cupyconv.ops.recurrent import gru, lstm, rnn
from cupyconv.ops.recurrent_pullback import recurrent_with_pullback

#: Takes the arguments by name, all of them but `out`.
WithPullback = Callable[[dict[str, Any]], tuple[Any, Callable[..., Any]]]

_WITH_PULLBACK: dict[Callable[..., Any], WithPullback] = {
    conv: conv_with_pullback,
    linmerge: linmerge_with_pullback,
    conv_transpose: conv_transpose_with_pullback,
    max_pool: max_pool_with_pullback,
    avg_pool: avg_pool_with_pullback,
    rnn: partial(recurrent_with_pullback, "rnn"),
    lstm: partial(recurrent_with_pullback, "lstm"),
    gru: partial(recurrent_with_pullback, "gru"),
}


def vjp(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any]]:
    """A function's result, and its pullback: what computes the gradients of its arguments from that of its result.

    ``y, pullback = vjp(conv, x, weight, padding="same")`` runs ``y = conv(x, weight, padding="same")``.  Where `grad` is
    the gradient of a number, such as a loss, with respect to `y`, ``pullback(grad)`` gives the gradients of that number
    with respect to `x` and `weight` (the vector-Jacobian product).

    Parameters
    ----------
    function : callable
        `conv`, `linmerge`, `conv_transpose`, `max_pool`, `avg_pool`, `rnn`, `lstm` or `gru`.
    *args, **kwargs
        The call's arguments, without `out`.  `method` is that of the forward pass; gradients choose their own.

    Returns
    -------
    result
        What the function returns.
    pullback : callable
        ``pullback(grad, *, needs=None) -> ConvGradients``; of `rnn` and `gru`
        ``pullback(grad_y=None, grad_h=None) -> RecurrentGradients``, and of `lstm`
        ``pullback(grad_y=None, grad_h=None, grad_c=None) -> RecurrentGradients``.

        Every `grad` has the shape of its result, and is a sequence where that is one (pooling of a sequence).  Another
        precision is converted.  For `rnn`, `lstm` and `gru` None stands for zeros.  Indices of `max_pool` have none.

        Each gradient has its argument's shape and dtype: that of a real argument beside complex ones is the real part.
        It has memory of its own, which it shares neither with `grad` nor with another gradient: it may be written to.
        None stands for an absent argument.  `needs`, such as ``("weight", "bias")``, names the gradients that are
        wanted: the others are None and take no time.  The gradients of `xs` of `linmerge` are its `x`.

        A pullback may be called again; every call gives the same bits.

    Raises
    ------
    TypeError
        For another function, arguments that it does not take, or an `out`; and as the function itself.
    ValueError
        As the function itself.

        A pullback raises ValueError for a `grad` of another shape than its result and for an unknown name in `needs`;
        TypeError for a `grad` of another library, or of a dtype that does not fit.

    See Also
    --------
    conv_grad_input, conv_grad_weight : the linear parts of `conv`'s pullback by themselves.

    Notes
    -----
    **Memory.**  A pullback holds references.  Do not write to these arrays before it is called.

    =====================================  ============================================================================
    `conv`, `linmerge`, `conv_transpose`   the inputs, `weight`, and with an activation one array of the size of `y`:
                                           `y` itself for relu, sigmoid, tanh and leaky_relu of a positive slope, and
                                           otherwise the values before the activation, which the forward pass then
                                           writes too; with a prologue also `scale` and `shift`
    `max_pool`                             `x` and `y`
    `avg_pool`                             nothing
    `rnn`, `lstm`, `gru`                   the arguments but the biases, `y`, and for every step what the gates'
                                           activations were applied to, ``(D, T, N, G * H)`` with G of 1, 4 or 3 gates
                                           in the dtype computed with; of `lstm` also the cell state,
                                           ``(D, T, N, H)``, of `gru` as much for what its reset gate changed
    =====================================  ============================================================================

    A call of a pullback of the first row allocates one more array of the size of `y`: for the gradient before the
    activation, or without one for that of `residual`.  With a prologue no transformed input is held: it is computed
    again as the input is read.  A call then allocates one more array of the size of `x`, for the gradient of the
    transformed input, and on CUDA a copy of `x` where its dtype is not that of `y`.  In 16-bit types that gradient is
    rounded.  `linmerge` copies an array whose spatial axes have no one stride for the weight's gradient.  A pullback of
    the last row takes about as much again for the gates' gradients, of as many steps at a time as the workspace limit
    has room for.

    **Values.**  At a kink of an activation, or where a value was clipped, the derivative of the flat or the left side
    counts: relu'(0) = 0.  For complex arrays the weight and `x` are conjugated, as in PyTorch (the Hermitian adjoint).
    All of a pooling window's gradient goes to its largest element, to the first in C order where there are several;
    a NaN counts as larger.  The gradient of a recurrent layer's `y` past a sample's length is not looked at, and `x` has
    zeros for a gradient there.

    Gradients of `x` and `residual` are channels-last where `y` is, or without an activation where `grad` is; that of
    `weight` is in C order.

    **Rounding.**  For a 16-bit result of `conv` on CUDA the activation is computed before the values under it are
    rounded to be kept, but after that in the kernels of the fused merge and of depthwise convolutions.
    For `conv_transpose` an activation whose pre-activation is kept is computed from the rounded one, in a pass of its
    own.  Recurrent layers compute 16-bit types in float32, but a state before a step is read from `y`, which was rounded.

    **On CUDA** the way back through a recurrent layer is one launch per step, two of a gru that is not linear before its
    reset, both directions together.  The products that follow are cuBLAS's, so no graph captures it.

    Examples
    --------
    Two steps of gradient descent on the squares of a layer's results:

    >>> import numpy as np, cupyconv
    >>> from cupyconv import vjp
    >>> image, skip = np.ones((1, 2, 6, 6)), np.full((1, 1, 6, 6), 2.0)
    >>> weight, bias = np.full((4, 3, 3, 3), 0.1), np.zeros(4)
    >>> for _ in range(2):
    ...     y, pullback = vjp(cupyconv.conv, [image, skip], weight, bias, padding="same", activation="relu")
    ...     gradients = pullback(2 * y / y.size, needs=("weight", "bias"))
    ...     weight -= 0.01 * gradients.weight
    ...     bias -= 0.01 * gradients.bias
    ...     print(round(float(np.mean(y * y)), 3))
    8.604
    5.709

    The gradients of merged inputs are a list:

    >>> velocity, pressure = np.ones((2, 3, 100)), np.full((2, 1, 100), 5.0)
    >>> y, pullback = vjp(cupyconv.linmerge, [velocity, pressure], np.array([[1.0, 1.0, 1.0, 2.0]]))
    >>> gradients = pullback(np.ones_like(y))
    >>> [gradient.shape for gradient in gradients.x], gradients.weight.tolist(), gradients.bias
    ([(2, 3, 100), (2, 1, 100)], [[200.0, 200.0, 200.0, 1000.0]], None)

    A stamp of three ones, two elements apart, and the elements that pooling chose:

    >>> x, weight = np.array([[[1.0, 2.0]]]), np.ones((1, 1, 3))
    >>> y, pullback = vjp(cupyconv.conv_transpose, x, weight, stride=2)
    >>> y, pullback(y).x
    (array([[[1., 1., 3., 2., 2.]]]), array([[[5., 7.]]]))
    >>> y, pullback = vjp(cupyconv.max_pool, np.array([[[3.0, 1.0, 4.0, 1.0, 5.0]]]), 3, stride=2)
    >>> pullback(np.array([[[1.0, 2.0]]])).x
    array([[[0., 0., 1., 0., 2.]]])

    The derivative of a product of three equal factors:

    >>> x, weight_ih, weight_hh = np.zeros((3, 1, 1)), np.ones((1, 1)), np.full((1, 1), 2.0)
    >>> (y, h), pullback = vjp(cupyconv.rnn, x, weight_ih, weight_hh, h0=np.ones((1, 1, 1)), activation=None)
    >>> h, pullback(grad_h=np.ones_like(h)).weight_hh
    (array([[[8.]]]), array([[12.]]))

    A step of gradient descent on the distance of the last state from a target:

    >>> rng = np.random.default_rng(0)
    >>> x, target = rng.normal(size=(10, 8, 3)), rng.uniform(-0.5, 0.5, size=(1, 8, 4))
    >>> weights = [rng.normal(size=(16, 3)), rng.normal(size=(16, 4)), np.zeros(16)]
    >>> losses = []
    >>> for _ in range(2):
    ...     (y, (h, c)), pullback = vjp(cupyconv.lstm, x, *weights)
    ...     losses.append(np.mean((h - target) ** 2))
    ...     gradients = pullback(grad_h=2 * (h - target) / h.size)
    ...     for weight, gradient in zip(weights, gradients[1:]):
    ...         weight -= gradient
    >>> bool(losses[1] < losses[0]), gradients.c0
    (True, None)
    """
    with_pullback = next((rule for known, rule in _WITH_PULLBACK.items() if known is function), None)
    if with_pullback is None:
        namesake = " of another module: vjp(cupyconv.{}, ...) takes NumPy and CuPy arrays"
        raise TypeError(refusal("vjp", [known.__name__ for known in _WITH_PULLBACK], function, namesake))
    arguments = bound(function, args, kwargs)
    if arguments.get("out") is not None:
        raise TypeError("vjp takes no out: a pullback may hold the result, so this has memory of its own")
    return with_pullback(arguments)
