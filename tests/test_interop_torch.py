"""`cupyconv.interop.torch`: values and gradients against PyTorch's own, `gradcheck`, and what a tensor may be."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cupyconv
from cupyconv.interop import torch as interop

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


def test_gradcheck_of_linmerge(device):
    inputs = [tensor(2, 2, 3, 4, device=device), tensor(2, 1, 3, 4, device=device), tensor(4, 3, device=device)]
    assert torch.autograd.gradcheck(lambda a, b, w: interop.linmerge((a, b), w, activation="tanh"), inputs)


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


def test_nothing_is_copied():
    seen = {}

    def spy(**arguments):
        seen.update(arguments)
        return cupyconv.conv(**arguments)

    x, weight = tensor(1, 2, 9, grad=False), tensor(3, 2, 3, grad=False)
    operation = interop._CONV._replace(function=spy)
    y = interop._differentiable(operation, x, weight, None, None, {"padding": 1})
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


def test_an_argument_changed_in_place_is_found(device):
    x, weight = tensor(1, 2, 9, device=device), tensor(3, 2, 3, device=device)
    y = interop.conv(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_options_hold_for_the_backward_pass(device, monkeypatch):
    """It may run in another thread, which inherits no context."""
    limits = []
    original = cupyconv.conv_vjp

    def spy(*args, **kwargs):
        y, pullback = original(*args, **kwargs)

        def noted(*a, **k):
            limits.append(cupyconv.call.options.current_settings().workspace_limit)
            return pullback(*a, **k)

        return y, noted

    monkeypatch.setattr(interop, "_CONV", interop._CONV._replace(vjp=spy))
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
        (np.ones((1, 1, 3)), torch.ones(1, 1, 3), TypeError, "x is a ndarray, needed a torch.Tensor"),
        (torch.ones(1, 1, 3), torch.ones(1, 2, 3), ValueError, "takes 2 input channels"),
        ([], torch.ones(1, 2, 3), ValueError, "empty"),
        (torch.ones(1, 1, 3, dtype=torch.int32), torch.ones(1, 1, 3), TypeError, "astype"),
        (torch.ones(1, 1, 3, device="meta"), torch.ones(1, 1, 3), TypeError, "several devices"),
        (torch.ones(1, 1, 3, device="meta"), torch.ones(1, 1, 3, device="meta"), TypeError, "needed one on the CPU"),
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

#: Of sizes T 4, N 3, I 2, H 3, both directions.
SHAPES = {
    "x": (4, 3, 2), "weight_ih": (2, 3, 2), "weight_hh": (2, 3, 3), "bias_ih": (2, 3), "bias_hh": (2, 3),
    "h0": (2, 3, 3), "c0": (2, 3, 3), "peephole": (2, 9),
}  # fmt: skip
RECURRENT = {"rnn": (interop.rnn, 1), "lstm": (interop.lstm, 4), "gru": (interop.gru, 3)}


def layer(cell, device="cpu", dtype=torch.float64):
    """Tensors for all arguments of a bidirectional layer, by name."""
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
    """Of a module's own parameters; only the last state is used, in float32."""
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


def test_recurrent_layers_without_gradients_keep_nothing():
    with torch.no_grad():
        y, (h, c) = interop.lstm(**layer("lstm"), direction="bidirectional")
    assert not any(one.requires_grad for one in (y, h, c))


def test_recurrent_tensors_changed_in_place_are_found():
    for name in ("weight_hh", "y"):
        tensors = {key: one.detach().requires_grad_(key == "x") for key, one in layer("lstm").items()}
        y, _ = interop.lstm(**tensors, direction="bidirectional")
        changed = y.detach() if name == "y" else tensors[name]
        changed.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_recurrent_layers_refuse_what_is_no_tensor():
    tensors = layer("lstm")
    with pytest.raises(TypeError, match="weight_hh is a ndarray"):
        interop.lstm(**{**tensors, "weight_hh": tensors["weight_hh"].detach().numpy()}, direction="bidirectional")
    with pytest.raises(TypeError, match="x is a NoneType"):
        interop.rnn(None, tensors["weight_ih"], tensors["weight_hh"])
    with pytest.raises(ValueError, match="weight_hh has shape"):
        interop.gru(tensors["x"], tensors["weight_ih"], tensors["weight_hh"])
