"""`vjp`: the result of a function, and its pullback."""

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

#: A function of all arguments by name, except `out`.
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
    """Return the result of a function and its pullback, which maps the result's gradient to gradients of the arguments.

    ``y, pullback = vjp(conv, x, weight, padding="same")`` runs ``y = conv(x, weight, padding="same")``.  Let `grad` be
    the gradient of a scalar, such as a loss, with respect to `y`.  Then ``pullback(grad)`` returns the gradients of
    this scalar with respect to `x` and `weight` (the vector-Jacobian product).

    Parameters
    ----------
    function : callable
        `conv`, `linmerge`, `conv_transpose`, `max_pool`, `avg_pool`, `rnn`, `lstm` or `gru`.
    *args, **kwargs
        Arguments of the call, without `out`.  `method` applies to the forward pass; each gradient chooses its own
        method.

    Returns
    -------
    result
        The return value of the function.
    pullback : callable
        ``pullback(grad, *, needs=None) -> ConvGradients``; for `rnn` and `gru`
        ``pullback(grad_y=None, grad_h=None) -> RecurrentGradients``, and for `lstm`
        ``pullback(grad_y=None, grad_h=None, grad_c=None) -> RecurrentGradients``.

        Every `grad` has the shape of its result, and is a sequence if the result is one (pooling of a sequence).  A
        gradient of another precision is converted.  For `rnn`, `lstm` and `gru`, None stands for zeros.  Indices of
        `max_pool` have no gradient.

        Each returned gradient has its argument's shape and dtype; the gradient of a real argument among complex ones is
        the real part.  It has its own memory, shared neither with `grad` nor with another gradient, so you may write to
        it.  The gradient of an absent argument is None.  `needs`, such as ``("weight", "bias")``, names the gradients
        to compute: the others are None and cost no time.  The gradients of `xs` of `linmerge` are in the field `x`.

        A pullback may be called repeatedly; every call gives the same bits.

    Raises
    ------
    TypeError
        For another function, arguments that the function does not accept, or an `out`; and as the function itself.
    ValueError
        As the function itself.

        A pullback raises ValueError if the shape of `grad` is not that of its result, and for an unknown name in
        `needs`.  It raises TypeError for a `grad` of another library, or of a dtype that does not fit.

    See Also
    --------
    conv_grad_input, conv_grad_weight : the linear parts of the pullback of `conv`.

    Notes
    -----
    **Memory.**  A pullback holds references to the following arrays.  Do not write to them before you call it.

    =====================================  ============================================================================
    `conv`, `linmerge`, `conv_transpose`   the inputs, `weight`, and with an activation one array of the size of `y`:
                                           `y` itself for relu, sigmoid, tanh and leaky_relu with a positive slope,
                                           otherwise the pre-activation, which the forward pass then writes too; with a
                                           prologue also `scale` and `shift`
    `max_pool`                             `x` and `y`
    `avg_pool`                             nothing
    `rnn`, `lstm`, `gru`                   `y`, all arguments except the biases, and the pre-activations of the gates at
                                           every step: ``(D, T, N, G * H)`` in the dtype of the computation, with G of
                                           1, 4 or 3 gates; for `lstm` also the cell states, ``(D, T, N, H)``; for
                                           `gru` an array of this shape for the values that its reset gate changed
    =====================================  ============================================================================

    A call of a pullback in the first row allocates one more array of the size of `y`: for the gradient before the
    activation or, without an activation, for the gradient of `residual`.  With a prologue, the pullback holds no
    transformed input; it transforms the input again as it reads it.  A call then allocates one more array of the size
    of `x` for the gradient of the transformed input; in 16-bit types this gradient is rounded.  On CUDA it also copies
    `x` if its dtype is not that of `y`.  For the weight's gradient, `linmerge` copies an array whose spatial axes do
    not collapse to a single stride.  A pullback in the last row allocates about as much memory again for the gates'
    gradients.  The workspace limit determines for how many steps at a time it does so.

    **Values.**  At a kink of an activation, and where a value was clipped, the derivative is that of the flat or the
    left side: relu'(0) = 0.  For complex arrays the weight and `x` are conjugated, as in PyTorch (the Hermitian
    adjoint).  The whole gradient of a pooling window goes to its maximum: to the first in C order if there are several;
    NaN counts as the largest value.  Past a sample's length, the gradient of a recurrent layer's `y` is ignored, and
    the gradient of `x` is zero.

    Gradients of `x` and `residual` are channels-last if `y` is, or, without an activation, if `grad` is.  The gradient
    of `weight` is in C order.

    **Rounding.**  If the result of `conv` on CUDA has a 16-bit type, the activation is computed before the
    pre-activation is rounded for storage.  The kernels of the fused merge and of depthwise convolutions compute it
    after that rounding.  If `conv_transpose` stores the pre-activation, it computes the activation from the rounded
    values, in a separate pass.  Recurrent layers compute 16-bit types in float32, but read the state before a step from
    `y`, which was rounded.

    **On CUDA**, the backward pass of a recurrent layer is one launch per step (two for a gru that is not linear before
    its reset), or one cooperative launch for all steps.  Both directions share a launch unless the gates' gradients
    exceed the workspace limit.  The matrix products that follow run on cuBLAS, so a CUDA graph cannot capture them.

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
        raise TypeError("vjp does not support out: the pullback may keep the result, which needs memory of its own")
    return with_pullback(arguments)
