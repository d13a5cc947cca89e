"""The functions of CUDA's runtime and driver that CuPy calls, implemented with `machine` and `kernels`.

A decorator declares the C signature.  A function returns nothing, or raises `CudaError`, whose number CuPy receives.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_longlong, c_size_t, c_uint, c_void_p
from typing import Any

from tests.fake_gpu import kernels
from tests.fake_gpu.machine import (
    CAPTURE_INVALIDATED,
    INVALID_IMAGE,
    LAUNCH_FAILURE,
    LEGACY,
    MACHINE,
    NOT_FOUND,
    NOT_READY,
    CudaError,
    Event,
    Graph,
)

#: C functions by name, in place of those of cudart and libcuda.
RUNTIME: dict[str, Any] = {}
DRIVER: dict[str, Any] = {}

#: Version of both the runtime and the driver: CUDA 13.0.
VERSION = 13000
_DEVICE_MEMORY = 2  # cudaMemoryTypeDevice


def exported(
    table: dict[str, Any], *types: Any, names: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to a table with its C signature, `int name(types)`; calls are serialized."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def called(*arguments: Any) -> int:
            try:
                with MACHINE.lock:
                    function(*arguments)
            except CudaError as error:
                return error.code
            except Exception:
                traceback.print_exc()
                return LAUNCH_FAILURE
            return 0

        callback = ctypes.CFUNCTYPE(c_int, *types)(called)
        for name in names or (function.__name__,):
            table[name] = callback
        return function

    return decorate


def runtime(*types: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return exported(RUNTIME, *types)


def driver(*types: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return exported(DRIVER, *types)


# ---- devices --------------------------------------------------------------------------------------------------------


@runtime(POINTER(c_int))
def cudaGetDevice(device: Any) -> None:
    device[0] = MACHINE.gpu


@runtime(c_int)
def cudaSetDevice(device: int) -> None:
    MACHINE.gpu = device


@runtime(POINTER(c_int))
def cudaGetDeviceCount(number: Any) -> None:
    number[0] = len(MACHINE.gpus)


@exported(RUNTIME, POINTER(c_int), names=("cudaDriverGetVersion", "cudaRuntimeGetVersion"))
@exported(DRIVER, POINTER(c_int), names=("cuDriverGetVersion",))
def version(number: Any) -> None:
    number[0] = VERSION


#: cudaDeviceAttr; all other attributes are 0 here.
_ATTRIBUTES: dict[int, Callable[[Any], int]] = {
    1: lambda gpu: gpu.threads_per_block,
    8: lambda gpu: gpu.shared_unasked,
    10: lambda gpu: 32,
    12: lambda gpu: gpu.registers,
    16: lambda gpu: gpu.multiprocessors,
    39: lambda gpu: gpu.threads_per_multiprocessor,
    75: lambda gpu: gpu.capability // 10,
    76: lambda gpu: gpu.capability % 10,
    81: lambda gpu: gpu.shared_per_multiprocessor,
    95: lambda gpu: 1,  # cooperative launches
    97: lambda gpu: gpu.shared_per_block,
    106: lambda gpu: gpu.blocks_per_multiprocessor,
    115: lambda gpu: 1,  # memory pools
}


@runtime(POINTER(c_int), c_int, c_int)
def cudaDeviceGetAttribute(value: Any, attribute: int, device: int) -> None:
    known = _ATTRIBUTES.get(attribute)
    value[0] = known(MACHINE.gpus[device]) if known else 0


@runtime(c_void_p, c_int)
def cudaGetDeviceProperties(properties: int, device: int) -> None:
    kernels.device_properties(properties, MACHINE.gpus[device])


@runtime()
def cudaDeviceSynchronize() -> None:
    MACHINE.refuse_in_capture()
    MACHINE.wait_for_all(MACHINE.gpu)


@runtime()
def cudaGetLastError() -> None:
    pass


@runtime(POINTER(c_int), c_int, c_int)
def cudaDeviceCanAccessPeer(can: Any, device: int, peer: int) -> None:
    can[0] = 0


def _text(words: Callable[[int], str]) -> Any:
    texts: dict[int, bytes] = {}

    def text(code: int) -> int:
        held = texts.setdefault(code, words(code).encode() + b"\0")
        address = ctypes.cast(held, c_void_p).value
        assert address is not None
        return address

    return ctypes.CFUNCTYPE(c_void_p, c_int)(text)


_NAMES = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    101: "cudaErrorInvalidDevice",
    600: "cudaErrorNotReady",
}
RUNTIME["cudaGetErrorName"] = _text(lambda code: _NAMES.get(code, f"cudaError{code}"))
RUNTIME["cudaGetErrorString"] = _text(lambda code: f"error {code} of an emulated GPU")


@exported(DRIVER, c_int, POINTER(c_void_p), names=("cuGetErrorName", "cuGetErrorString"))
def error_text(code: int, text: Any) -> None:
    text[0] = RUNTIME["cudaGetErrorName"](code)


# ---- memory ---------------------------------------------------------------------------------------------------------


@runtime(POINTER(c_void_p), c_size_t)
def cudaMalloc(memory: Any, nbytes: int) -> None:
    MACHINE.refuse_in_capture()
    memory[0] = MACHINE.allocate(nbytes)


@runtime(c_void_p)
def cudaFree(memory: int | None) -> None:
    MACHINE.refuse_in_capture()
    if memory:
        MACHINE.wait_for_all()
        MACHINE.release(memory)


@runtime(POINTER(c_void_p), c_size_t, c_void_p)
def cudaMallocAsync(memory: Any, nbytes: int, stream: int | None) -> None:
    memory[0] = start = MACHINE.allocate(nbytes)
    MACHINE.enqueue(MACHINE.stream(stream), lambda: ctypes.memset(start, 0xFF, nbytes))


@runtime(c_void_p, c_void_p)
def cudaFreeAsync(memory: int, stream: int | None) -> None:
    where = MACHINE.stream(stream)
    if where.capture is None:
        MACHINE.enqueue(where, lambda: MACHINE.release(memory))
        return
    # A graph frees the memory at the end of each launch and uses the same addresses again in the next one.
    whole, _ = MACHINE.allocation(memory, memory)
    MACHINE.enqueue(where, lambda: whole.fill(0xEE))


@runtime(POINTER(c_size_t), POINTER(c_size_t))
def cudaMemGetInfo(free: Any, total: Any) -> None:
    free[0], total[0] = MACHINE.free_bytes, MACHINE.spec.memory


@runtime(POINTER(c_void_p), c_size_t, c_uint)
def cudaHostAlloc(memory: Any, nbytes: int, flags: int) -> None:
    memory[0] = MACHINE.pin(nbytes)


@runtime(c_void_p)
def cudaFreeHost(memory: int) -> None:
    MACHINE.wait_for_all()
    MACHINE.unpin(memory)


@runtime(c_void_p, c_void_p, c_size_t, c_int)
def cudaMemcpy(to: int, source: int, nbytes: int, kind: int) -> None:
    MACHINE.refuse_in_capture()
    MACHINE.copy(to, source, nbytes, MACHINE.stream(LEGACY))
    MACHINE.wait(MACHINE.stream(LEGACY))


@runtime(c_void_p, c_void_p, c_size_t, c_int, c_void_p)
def cudaMemcpyAsync(to: int, source: int, nbytes: int, kind: int, stream: int | None) -> None:
    MACHINE.copy(to, source, nbytes, MACHINE.stream(stream))


@runtime(c_void_p, c_int, c_void_p, c_int, c_size_t, c_void_p)
def cudaMemcpyPeerAsync(to: int, device: int, source: int, peer: int, nbytes: int, stream: int | None) -> None:
    MACHINE.copy(to, source, nbytes, MACHINE.stream(stream))


@runtime(c_void_p, c_int, c_size_t)
def cudaMemset(memory: int, value: int, nbytes: int) -> None:
    MACHINE.enqueue(MACHINE.stream(LEGACY), lambda: ctypes.memset(memory, value, nbytes))


@runtime(c_void_p, c_int, c_size_t, c_void_p)
def cudaMemsetAsync(memory: int, value: int, nbytes: int, stream: int | None) -> None:
    MACHINE.enqueue(MACHINE.stream(stream), lambda: ctypes.memset(memory, value, nbytes))


class PointerAttributes(ctypes.Structure):
    """cudaPointerAttributes"""

    _fields_ = (("type", c_int), ("device", c_int), ("device_pointer", c_void_p), ("host_pointer", c_void_p))


@runtime(POINTER(PointerAttributes), c_void_p)
def cudaPointerGetAttributes(attributes: Any, pointer: int) -> None:
    owner = MACHINE.owner(pointer)
    if owner is None:
        attributes[0] = PointerAttributes(0, -2, None, pointer)
    else:
        attributes[0] = PointerAttributes(_DEVICE_MEMORY, owner, pointer, None)


# ---- streams, events, graphs ----------------------------------------------------------------------------------------


@runtime(POINTER(c_void_p), c_uint, c_int)
def cudaStreamCreateWithPriority(stream: Any, flags: int, priority: int) -> None:
    stream[0] = MACHINE.new_stream(ordered=not flags & 1)


@runtime(c_void_p)
def cudaStreamDestroy(stream: int) -> None:
    MACHINE.end_stream(stream)


@runtime(c_void_p)
def cudaStreamSynchronize(stream: int | None) -> None:
    MACHINE.wait(MACHINE.stream(stream))


@runtime(c_void_p)
def cudaStreamQuery(stream: int | None) -> None:
    if not MACHINE.is_done(MACHINE.stream(stream)):
        raise CudaError(NOT_READY)
    MACHINE.report()


@runtime(c_void_p, c_void_p, c_uint)
def cudaStreamWaitEvent(stream: int | None, event: int, flags: int) -> None:
    MACHINE.wait_in_stream(MACHINE.stream(stream), MACHINE.find(event, Event))


@runtime(c_void_p, POINTER(c_int))
def cudaStreamIsCapturing(stream: int | None, status: Any) -> None:
    capture = MACHINE.stream(stream).capture
    status[0] = 0 if capture is None else 1 if capture.is_valid else 2


@runtime(c_void_p, c_int)
def cudaStreamBeginCapture(stream: int | None, mode: int) -> None:
    MACHINE.begin_capture(MACHINE.stream(stream))


@runtime(c_void_p, POINTER(c_void_p))
def cudaStreamEndCapture(stream: int | None, graph: Any) -> None:
    graph[0] = None
    graph[0] = MACHINE.end_capture(MACHINE.stream(stream))


@runtime(POINTER(c_void_p), c_void_p, c_longlong)
def cudaGraphInstantiate(executable: Any, graph: int, flags: int) -> None:
    executable[0] = MACHINE.handle(MACHINE.find(graph, Graph))


@runtime(c_void_p, c_void_p)
def cudaGraphLaunch(executable: int, stream: int | None) -> None:
    where = MACHINE.stream(stream)
    if where.capture is not None:
        raise CudaError(CAPTURE_INVALIDATED)
    for work in MACHINE.find(executable, Graph).work:
        MACHINE.enqueue(where, work)


@exported(RUNTIME, c_void_p, names=("cudaGraphDestroy", "cudaGraphExecDestroy"))
def destroy_graph(graph: int) -> None:
    MACHINE.forget(graph, Graph)


@exported(RUNTIME, c_void_p, c_void_p, names=("cudaGraphUpload",))
def upload_graph(executable: int, stream: int | None) -> None:
    MACHINE.find(executable, Graph)


@runtime(POINTER(c_void_p), c_uint)
def cudaEventCreateWithFlags(event: Any, flags: int) -> None:
    event[0] = MACHINE.handle(Event())


@runtime(c_void_p)
def cudaEventDestroy(event: int) -> None:
    MACHINE.forget(event, Event)


@runtime(c_void_p, c_void_p)
def cudaEventRecord(event: int, stream: int | None) -> None:
    MACHINE.record(MACHINE.find(event, Event), MACHINE.stream(stream))


@runtime(c_void_p)
def cudaEventQuery(event: int) -> None:
    if not MACHINE.has_come(MACHINE.find(event, Event)):
        raise CudaError(NOT_READY)


@runtime(c_void_p)
def cudaEventSynchronize(event: int) -> None:
    recorded = MACHINE.find(event, Event)
    if recorded.stream is not None:
        MACHINE.wait(recorded.stream, recorded.ticket)


@runtime(POINTER(c_float), c_void_p, c_void_p)
def cudaEventElapsedTime(milliseconds: Any, start: int, end: int) -> None:
    if not (MACHINE.has_come(MACHINE.find(start, Event)) and MACHINE.has_come(MACHINE.find(end, Event))):
        raise CudaError(NOT_READY)
    milliseconds[0] = 1.0  # time is not emulated


# ---- the driver: modules and launches ---------------------------------------------------------------------------------


@driver(c_uint)
def cuInit(flags: int) -> None:
    pass


@driver(POINTER(c_void_p))
def cuCtxGetCurrent(context: Any) -> None:
    context[0] = 1 + MACHINE.gpu


@driver(POINTER(c_void_p), c_void_p)
def cuModuleLoadData(module: Any, image: int) -> None:
    loaded = kernels.Module.of_image(image)
    if loaded is None:
        raise CudaError(INVALID_IMAGE)
    module[0] = MACHINE.handle(loaded)


@driver(c_void_p)
def cuModuleUnload(module: int) -> None:
    MACHINE.forget(module, kernels.Module)


@driver(POINTER(c_void_p), c_void_p, c_char_p)
def cuModuleGetFunction(function: Any, module: int, name: bytes) -> None:
    found = MACHINE.find(module, kernels.Module).function(name.decode())
    if found is None:
        raise CudaError(NOT_FOUND)
    function[0] = MACHINE.handle(found)


@driver(c_void_p, c_int, c_int)
def cuFuncSetAttribute(function: int, attribute: int, value: int) -> None:
    MACHINE.find(function, kernels.Function).set_attribute(attribute, value)


@driver(POINTER(c_int), c_int, c_void_p)
def cuFuncGetAttribute(value: Any, attribute: int, function: int) -> None:
    value[0] = MACHINE.find(function, kernels.Function).attribute(attribute)


_LAUNCH = (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p))


@driver(*_LAUNCH, c_void_p)
def cuLaunchKernel(function: int, *launch: Any) -> None:
    *sizes, shared_bytes, stream, parameters, _ = launch
    _launch(function, sizes, shared_bytes, stream, parameters, cooperative=False)


@driver(*_LAUNCH)
def cuLaunchCooperativeKernel(function: int, *launch: Any) -> None:
    *sizes, shared_bytes, stream, parameters = launch
    _launch(function, sizes, shared_bytes, stream, parameters, cooperative=True)


@exported(DRIVER, POINTER(c_int), c_void_p, c_int, c_size_t, names=("cuOccupancyMaxActiveBlocksPerMultiprocessor",))
def occupancy(blocks: Any, function: int, block: int, shared_bytes: int) -> None:
    blocks[0] = MACHINE.find(function, kernels.Function).blocks_per_multiprocessor(block, shared_bytes)


def _launch(
    function: int, sizes: list[int], shared_bytes: int, stream: int | None, parameters: Any, *, cooperative: bool
) -> None:
    MACHINE.find(function, kernels.Function).launch(
        tuple(sizes[:3]), tuple(sizes[3:]), shared_bytes, MACHINE.stream(stream), parameters, cooperative
    )
