"""`cupyconv.interop.torch`: values and gradients compared with PyTorch's own, `gradcheck`, and kinds of tensors."""

from __future__ import annotations

import contextlib
import doctest
import functools
import inspect
import itertools
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cupyconv  # noqa: E402
from cupyconv.interop import torch as interop  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return request.param


def tensor(*shape, device="cpu", dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).to(device).requires_grad_(grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradcheck(device, dtype):
    def function(a, b, weight, bias, residual):
        return interop.conv([a, b], weight, bias, stride=(1, 2), padding=((1, 0), (2, 1)), residual=residual)

    inputs = [tensor(*shape, device=device, dtype=dtype)
              for shape in ((2, 2, 4, 5), (2, 3, 4, 5), (3, 5, 2, 3), (3,), (2, 3, 4, 3))]  # fmt: skip
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("activation", ["relu", "gelu", ("leaky_relu", 0.1)], ids=str)
def test_gradcheck_of_activations(device, activation):
    inputs = [tensor(2, 3, 7, device=device), tensor(4, 3, 3, device=device), tensor(4, device=device)]
    assert torch.autograd.gradcheck(lambda x, w, b: interop.conv(x, w, b, padding=1, activation=activation), inputs)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap", "symmetric"])
def test_gradcheck_of_padding_modes_groups_strides_and_dilations(device, mode):
    def function(a, b, weight, bias, residual):
        return interop.conv([a, b], weight, bias, stride=2, padding=((2, 1),), padding_mode=mode, dilation=2, groups=2,
                            residual=residual, activation="sigmoid")  # fmt: skip

    inputs = [tensor(*shape, device=device) for shape in ((2, 1, 9), (2, 3, 9), (4, 2, 3), (4,), (2, 4, 4))]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradcheck_of_linmerge(device, dtype):
    def function(a, b, weight, bias, residual):
        activation = None if dtype.is_complex else "tanh"
        return interop.linmerge((a, b), weight, bias, residual=residual, activation=activation)

    inputs = [tensor(*shape, device=device, dtype=dtype)
              for shape in ((2, 2, 3, 4), (2, 1, 3, 4), (4, 3), (4,), (2, 4, 3, 4))]  # fmt: skip
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_values_and_gradients_are_pytorchs(device, dtype):
    x, weight, bias = (tensor(*s, device=device, dtype=dtype) for s in ((2, 4, 6, 6), (6, 2, 3, 3), (6,)))
    settings = dict(stride=2, padding=1, dilation=1, groups=2)
    ours = interop.conv(x, weight, bias, **settings)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    copies = [t.detach().to(wide).requires_grad_() for t in (x, weight, bias)]
    theirs = torch.nn.functional.conv2d(*copies, **settings)
    assert ours.dtype == dtype and ours.device.type == device
    grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(0), dtype=wide).to(device).to(dtype)
    ours.backward(grad)
    theirs.backward(grad.to(wide))
    tolerance = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.complex64: 1e-5}.get(
        dtype, 1e-12
    )
    torch.testing.assert_close(ours.detach().to(wide), theirs.detach(), rtol=tolerance, atol=tolerance)
    for t, copy in zip((x, weight, bias), copies):
        assert t.grad.dtype == dtype
        torch.testing.assert_close(t.grad.to(wide), copy.grad, rtol=tolerance, atol=4 * tolerance)


def test_nothing_is_copied(monkeypatch):
    seen = {}

    original = cupyconv.conv

    def spy(**arguments):
        seen.update(arguments)
        return original(**arguments)

    x, weight = tensor(1, 2, 9, grad=False), tensor(3, 2, 3, grad=False)
    monkeypatch.setattr(cupyconv, "conv", spy)
    y = interop.conv(x, weight, padding=1)
    assert np.shares_memory(seen["x"], x.numpy()) and np.shares_memory(seen["weight"], weight.numpy())
    assert y.numpy().flags.c_contiguous and not y.requires_grad


def test_a_cuda_tensor_is_worked_on_where_it_is_on_pytorchs_stream(monkeypatch):
    entered = []

    def entering(what):
        return contextlib.nullcontext(entered.append(what))

    stream = SimpleNamespace(from_external=lambda other: entering(other.__cuda_stream__()))
    cuda = SimpleNamespace(Device=lambda index: entering(index), Stream=stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=device.index + 40))
    with interop._stream_of(SimpleNamespace(device=torch.device("cuda", 3))):
        assert entered == [3, (0, 43)]


def test_only_what_needs_a_gradient_gets_one(device):
    x, weight = tensor(1, 2, 9, device=device, grad=False), tensor(3, 2, 3, device=device)
    interop.conv([x, x], torch.cat([weight, weight], 1)).sum().backward()
    assert x.grad is None and weight.grad is not None


def test_a_list_gets_a_gradient_each_where_it_is_needed(device):
    a, b = tensor(1, 2, 9, device=device), tensor(1, 1, 9, device=device, grad=False)
    interop.conv([a, b], torch.ones(1, 3, 1, dtype=torch.float64, device=device)).sum().backward()
    assert (a.grad == 1).all() and b.grad is None


# --- what autograd asks of an operation -----------------------------------------------------------------------------

IN_PLACE = "modified by an inplace operation"
FUNCTIONS = {"conv": (interop.conv, (4, 3, 1)), "linmerge": (interop.linmerge, (4, 3))}


def merge(function, device="cpu", *, with_gradients=True):
    """Return a function, its input with one spatial axis, and all its other tensors by name."""
    called, weight_shape = FUNCTIONS[function]
    shapes = {"weight": weight_shape, "bias": (4,), "residual": (2, 4, 6)}
    others = {name: tensor(*shape, device=device, grad=with_gradients) for name, shape in shapes.items()}
    return called, tensor(2, 3, 6, device=device, grad=with_gradients), others


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "tanh", ("leaky_relu", 0.1)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_result_changed_in_place_is_found_where_the_backward_pass_needs_it(device, function, activation):
    called, x, others = merge(function, device)
    y = called(x, others["weight"], activation=activation)
    y.add_(10)
    with pytest.raises(RuntimeError, match=IN_PLACE):
        y.sum().backward()


@pytest.mark.parametrize("activation", [None, "gelu", ("leaky_relu", -0.1)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_result_may_be_changed_in_place_where_the_backward_pass_does_not_need_it(device, function, activation):
    called, x, others = merge(function, device)
    tensors = [x, *others.values()]
    expected = torch.autograd.grad((called(x, **others, activation=activation) + 10).square().sum(), tensors)
    y = called(x, **others, activation=activation)
    y.add_(10)
    for one, two in zip(torch.autograd.grad(y.square().sum(), tensors), expected):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("changed", ["x", "weight", "bias", "residual"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_argument_changed_in_place_is_found_where_the_backward_pass_needs_it(device, function, changed):
    called, x, others = merge(function, device)
    y = called(x, **others, activation="relu")
    expected = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    with torch.no_grad():
        {"x": x, **others}[changed].mul_(2)
    if changed in ("x", "weight"):
        with pytest.raises(RuntimeError, match=IN_PLACE):
            y.sum().backward()
    else:
        y.sum().backward()
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("changed", ["nothing", "y", "x", "weight", "bias", "residual"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_hooks_on_saved_tensors_hide_no_change_in_place(device, function, changed):
    """PyTorch does not check the version of a tensor that a hook packed; the pullback reads the original memory."""
    called, x, others = merge(function, device)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        y = called(x, **others, activation="sigmoid")
    expected = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    with torch.no_grad():
        {"nothing": torch.ones(1), "y": y, "x": x, **others}[changed].mul_(2)
    if changed in ("y", "x", "weight"):
        with pytest.raises(RuntimeError, match=IN_PLACE):
            y.sum().backward()
    else:
        y.sum().backward()
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(device, reentrant):
    weight, x = tensor(3, 3, 3, device=device), tensor(2, 3, 6, device=device)

    def layers(x):
        return interop.conv(interop.conv(x, weight, padding=1, activation="gelu"), weight, activation="relu")

    layers(x).square().sum().backward()
    expected = x.grad, weight.grad
    x.grad = weight.grad = None
    torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, expected[0]) and torch.equal(weight.grad, expected[1])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_shared_residuals_have_gradients_of_their_own(device, function):
    called, x, others = merge(function, device)
    weight, first = others["weight"], others["residual"]
    second = first.detach().clone().requires_grad_()
    c = tensor(2, 4, 6, device=device, grad=False)

    def loss():
        return ((called(x, weight, residual=first) + called(x, weight, residual=second)) * c).sum()

    for backwards in (1, 2):
        loss().backward()
        assert torch.equal(first.grad, backwards * c) and torch.equal(second.grad, backwards * c)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_autograd_adds_to_the_gradient_of_a_residual_goes_nowhere_else(device, function):
    """Autograd accumulates in place if it can."""
    called, x, others = merge(function, device)
    p, q, c, d = (tensor(2, 4, 6, device=device, grad=grad) for grad in (True, True, False, False))

    def gradients(added):
        s, b = p * 1, q * 3
        e = s * d
        return torch.autograd.grad(((added(s) + b) * c).sum() + e.sum(), (p, q))

    actual = gradients(lambda s: called(x, others["weight"], residual=s))
    for one, two in zip(actual, gradients(lambda s: called(x, others["weight"]) + s)):
        torch.testing.assert_close(one, two)


def test_hooks_and_retained_gradients(device):
    """A hook may replace a gradient, or modify it in place."""
    called, x, others = merge("conv", device)
    weight, residual = others["weight"], others["residual"]
    y = called(x, weight, residual=residual)
    y.retain_grad()
    seen = []
    y.register_hook(lambda grad: 2 * grad)
    residual.register_hook(lambda grad: grad.mul_(3))
    x.register_hook(lambda grad: seen.append(grad.clone()))
    y.sum().backward()
    assert (y.grad == 2).all() and (residual.grad == 6).all()
    torch.testing.assert_close(x.grad, 2 * weight.sum(0)[None].expand_as(x))
    assert len(seen) == 1 and torch.equal(seen[0], x.grad)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_of_several_backward_passes_add_up(device, activation):
    called, x, others = merge("conv", device)
    y = called(x, **others, activation=activation)
    y.square().sum().backward(retain_graph=True)
    once = [one.grad.clone() for one in (x, *others.values())]
    y.square().sum().backward()
    for one, grad in zip((x, *others.values()), once):
        assert torch.equal(one.grad, 2 * grad)
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_penalty_of_gradients_is_refused(device, function):
    """The penalty would be left out: the gradient of a sum seems to depend on nothing."""
    called, x, others = merge(function, device)
    y = called(x, others["weight"], activation="tanh")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.grad(y.sum(), x)


@pytest.fixture
def no_vjp(monkeypatch):
    """Make `vjp` fail, which stores what a backward pass needs."""

    def refused(*args, **arguments):
        raise AssertionError("nobody will ask for a gradient")

    monkeypatch.setattr(cupyconv, "vjp", refused)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_autograd_nothing_is_kept(device, function, off, no_vjp):
    called, x, others = merge(function, device)
    with off():
        y = called(x, **others, activation="gelu")
    assert not y.requires_grad and y.is_inference() == (off is torch.inference_mode)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch uses it
def test_forward_mode_is_refused_with_autograd_off_too(device):
    called, x, others = merge("conv", device, with_gradients=False)
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="jvp"):
            called(dual, others["weight"])


def test_inference_tensors(device):
    """Autograd does not save an inference tensor given as bias; an input it would save, and PyTorch refuses that."""
    called, x, others = merge("conv", device)
    with torch.inference_mode():
        x_of_inference, bias = x * 1, others["bias"] * 1
    y = called(x, others["weight"], bias)
    y.sum().backward()
    assert x.grad is not None
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        called(x_of_inference, others["weight"])
    with torch.no_grad():
        assert torch.equal(called(x_of_inference, others["weight"], bias), y)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch reads it
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_compiled_function_calls_it_between_two_graphs(device, function):
    called, x, others = merge(function, device)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def layer(x, others):
        return called(2 * x, **others, activation="tanh") + 1

    tensors = [x, *others.values()]
    expected = layer(x, others)
    compiled = torch.compile(layer, backend=backend)
    for _ in range(2):
        actual = compiled(x, others)
        assert torch.equal(actual, expected)
    assert len(graphs) == 2
    wanted = torch.autograd.grad(expected.square().sum(), tensors)
    for one, two in zip(torch.autograd.grad(actual.square().sum(), tensors), wanted):
        assert torch.equal(one, two)


def test_options_hold_for_the_backward_pass(device, monkeypatch):
    """It may run in another thread, which inherits no context."""
    limits = []
    original = cupyconv.vjp

    def spy(*args, **kwargs):
        y, pullback = original(*args, **kwargs)

        @functools.wraps(pullback)
        def noted(*a, **k):
            limits.append(cupyconv.call.options.current_settings().workspace_limit)
            return pullback(*a, **k)

        return y, noted

    monkeypatch.setattr(cupyconv, "vjp", spy)
    x, weight = tensor(1, 2, 9, device=device), tensor(3, 2, 3, device=device)
    with cupyconv.options(workspace_limit=1 << 20):
        y = interop.conv(x, weight)
    y.sum().backward()
    assert limits == [1 << 20]


def test_lazy_conjugates_and_channels_last(device):
    x, weight = (
        tensor(2, 3, 5, 5, device=device, dtype=torch.complex64),
        tensor(4, 3, 1, 1, device=device, dtype=torch.complex64),
    )
    expected = torch.nn.functional.conv2d(x.conj(), weight)
    torch.testing.assert_close(interop.conv(x.conj(), weight), expected)
    image = x.detach().real.clone().to(memory_format=torch.channels_last)
    y = interop.conv(image, weight.detach().real.clone())
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("x", "weight", "error", "words"),
    [
        (np.ones((1, 1, 3)), torch.ones(1, 1, 3), TypeError, "x must be a torch.Tensor, given ndarray"),
        (torch.ones(1, 1, 3), torch.ones(1, 2, 3), ValueError, "takes 2 input channels"),
        ([], torch.ones(1, 2, 3), ValueError, "empty"),
        (torch.ones(1, 1, 3, dtype=torch.int32), torch.ones(1, 1, 3), TypeError, "astype"),
        (torch.ones(1, 1, 3, device="meta"), torch.ones(1, 1, 3), TypeError, "all tensors must be on one device"),
        (torch.ones(1, 1, 3, device="meta"), torch.ones(1, 1, 3, device="meta"), TypeError, "needed the CPU"),
    ],
    ids=["array", "channels", "empty", "integers", "two devices", "meta"],
)
def test_refusals(x, weight, error, words):
    with pytest.raises(error, match=words):
        interop.conv(x, weight)


@pytest.mark.parametrize(
    ("documented", "printed"),
    [(interop, "torch.Size([16, 48, 3, 3]) torch.Size([16])"), (interop.lstm, "torch.Size([48])")],
    ids=["module", "lstm"],
)
def test_the_script_in_a_docstring_runs(documented, printed, capsys):
    script = re.search(r"complete::\n\n((?:    .*\n|\n)+)", inspect.getdoc(documented) + "\n").group(1)
    exec(compile("\n".join(line[4:] for line in script.splitlines()), "docstring", "exec"), {})
    assert printed in capsys.readouterr().out


def test_docstrings():
    assert doctest.testmod(interop).failed == 0


# --- recurrent layers ---------------------------------------------------------------------------------------------------

#: Shapes for T 4, N 3, I 2, H 3 and both directions.
SHAPES = {
    "x": (4, 3, 2), "weight_ih": (2, 3, 2), "weight_hh": (2, 3, 3), "bias_ih": (2, 3), "bias_hh": (2, 3),
    "h0": (2, 3, 3), "c0": (2, 3, 3), "peephole": (2, 9),
}  # fmt: skip
RECURRENT = {"rnn": (interop.rnn, 1), "lstm": (interop.lstm, 4), "gru": (interop.gru, 3)}


def layer(cell, device="cpu", dtype=torch.float64):
    """Return tensors for all arguments of a bidirectional layer, by name."""
    names = [name for name in SHAPES if cell == "lstm" or name not in ("c0", "peephole")]
    gates = {name: RECURRENT[cell][1] if name.startswith(("weight", "bias")) else 1 for name in names}
    shapes = {name: (SHAPES[name][0], gates[name] * SHAPES[name][1], *SHAPES[name][2:]) for name in names}
    return {name: tensor(*shape, device=device, dtype=dtype) for name, shape in shapes.items()}


def flat(results):
    y, states = results
    return (y, *states) if isinstance(states, tuple) else (y, states)


@pytest.mark.parametrize("cell", RECURRENT)
def test_gradcheck_of_recurrent_layers(device, cell):
    function, _ = RECURRENT[cell]
    tensors = layer(cell, device)

    def of_all(*given):
        return flat(function(**dict(zip(tensors, given)), lengths=[4, 0, 2], direction="bidirectional"))

    assert torch.autograd.gradcheck(of_all, list(tensors.values()))


@pytest.mark.parametrize("cell", RECURRENT)
def test_recurrent_layers_are_torchs(device, cell):
    """The parameters are those of a module; the loss uses only the last state, in float32."""
    module = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](3, 5).to(device)
    x = tensor(6, 2, 3, device=device, dtype=torch.float32)
    grads = []
    for results in (RECURRENT[cell][0](x, *module.parameters()), module(x)):
        last = flat(results)[-1]
        grads.append(torch.autograd.grad(last.square().sum(), [x, *module.parameters()]))
    for one, two in zip(*grads):
        assert one.shape == two.shape and one.device == two.device
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_lengths_may_be_a_tensor(device):
    tensors = layer("gru", device)
    listed, _ = interop.gru(**tensors, lengths=[4, 0, 2], direction="bidirectional")
    lengths = torch.tensor([4, 0, 2])
    for given in (lengths, lengths.int().to(device)):
        y, _ = interop.gru(**tensors, lengths=given, direction="bidirectional")
        assert torch.equal(y, listed)
        y.sum().backward()
    assert not tensors["x"].grad[:, 1].any() and tensors["x"].grad[:2, 2].all()


def test_lengths_become_an_array_on_the_stream(monkeypatch):
    """Otherwise a tensor on a GPU would wait for another stream, which a graph that is captured does not allow."""
    inside, given = [], []
    array = interop._array

    @contextlib.contextmanager
    def stream_of(tensor):
        inside.append(tensor)
        yield
        inside.pop()

    def spy(one):
        given.append((one, bool(inside)))
        return array(one)

    monkeypatch.setattr(interop, "_stream_of", stream_of)
    monkeypatch.setattr(interop, "_array", spy)
    lengths = torch.tensor([4, 0, 2])
    interop.gru(**layer("gru"), lengths=lengths, direction="bidirectional")
    assert any(one is lengths for one, _ in given) and all(on_stream for _, on_stream in given)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("cell", RECURRENT)
def test_recurrent_layers_without_autograd_keep_nothing(cell, off, no_vjp):
    with off():
        results = flat(RECURRENT[cell][0](**layer(cell), direction="bidirectional"))
    assert not any(one.requires_grad for one in results)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("cell", RECURRENT)
def test_recurrent_tensors_changed_in_place_are_found_where_the_backward_pass_needs_them(cell, direction):
    bare = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "peephole")
    given = layer(cell)
    if direction == "forward":
        given = {
            name: one[0] if name in bare else one[:1] if name in ("h0", "c0") else one for name, one in given.items()
        }
    given["lengths"] = torch.tensor([4, 1, 2])
    needed = {*given, "y"} - {"bias_ih", "bias_hh"}
    for changed in (*given, "y", "h", *(["c"] if cell == "lstm" else [])):
        tensors = {name: one.detach().clone() for name, one in given.items()}
        tensors["x"].requires_grad_()
        results = flat(RECURRENT[cell][0](**tensors, direction=direction))
        loss = sum(3 * one.sum() for one in results)
        expected = torch.autograd.grad(loss, tensors["x"], retain_graph=True)[0]
        with torch.no_grad():
            {**tensors, **dict(zip("yhc", results))}[changed].mul_(0)
        if changed in needed:
            with pytest.raises(RuntimeError, match=IN_PLACE):
                loss.backward()
        else:
            loss.backward()
            assert torch.equal(tensors["x"].grad, expected), changed


@pytest.mark.parametrize("cell", RECURRENT)
def test_gradients_of_recurrent_layers_have_memory_of_their_own(cell):
    tensors = layer(cell)
    results = flat(RECURRENT[cell][0](**tensors, direction="bidirectional"))
    grads = [torch.ones_like(one) for one in results]
    found = torch.autograd.grad(results, list(tensors.values()), grads)
    arrays = [one.detach().numpy() for one in (*found, *grads, *results, *tensors.values())]
    assert not any(np.shares_memory(one, two) for one, two in itertools.combinations(arrays, 2))


@pytest.mark.parametrize("cell", RECURRENT)
def test_backward_passes_through_recurrent_layers_add_up_and_are_not_differentiated(cell):
    tensors = layer(cell)
    loss = flat(RECURRENT[cell][0](**tensors, direction="bidirectional"))[-1].square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        loss.backward(create_graph=True)
    loss.backward(retain_graph=True)
    once = {name: one.grad.clone() for name, one in tensors.items()}
    loss.backward()
    assert all(torch.equal(one.grad, 2 * once[name]) for name, one in tensors.items())


def test_recurrent_layers_refuse_what_is_no_tensor():
    tensors = layer("lstm")
    with pytest.raises(TypeError, match=r"weight_hh must be a torch\.Tensor, given ndarray"):
        interop.lstm(**{**tensors, "weight_hh": tensors["weight_hh"].detach().numpy()}, direction="bidirectional")
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, given NoneType"):
        interop.rnn(None, tensors["weight_ih"], tensors["weight_hh"])
    with pytest.raises(ValueError, match="weight_hh has shape"):
        interop.gru(tensors["x"], tensors["weight_ih"], tensors["weight_hh"])
