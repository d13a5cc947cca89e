"""The structure of the package: layers of imports, the cost of an import, protocols, and what is documented."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

import cupyconv
from cupyconv.call.dispatch import Backend
from cupyconv.call.operation import _OPERATIONS
from cupyconv.cuda.run import CudaBackend
from cupyconv.cuda.run.device import Device
from cupyconv.numpy import NumpyBackend
from tests.host_device import HostDevice

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cupyconv"
MODULES = sorted(path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py"))

# --- layers ---------------------------------------------------------------------------------------------------

#: The layers from top to bottom, as a call passes them.  A module may import from its own layer and those below.
LAYERS: dict[str, tuple[str, ...]] = {
    "programs": ("cupyconv.__main__", "cupyconv.bench", "cupyconv.dask", "cupyconv.demo", "cupyconv.interop"),
    "package": ("cupyconv", "cupyconv.configuration"),
    "explain": ("cupyconv.call.explain",),
    "operations": ("cupyconv.ops",),
    "call": ("cupyconv.call",),
    "backends": ("cupyconv.numpy", "cupyconv.cuda.run"),
    "decisions": ("cupyconv.cuda.plan", "cupyconv.cuda"),
    "problem": ("cupyconv.problem", "cupyconv.typing", "cupyconv.version"),
}

#: Packages that know problems and plans, but not each other.
STRANGERS = ("cupyconv.numpy", "cupyconv.cuda.run")

#: Packages outside the standard library that a layer may import; a layer that is not listed may import NumPy.
OUTSIDE = {
    "cupyconv.cuda.plan": set(),
    "cupyconv.problem": set(),
    "cupyconv.problem.arrays": {"numpy", "ml_dtypes"},
    "cupyconv.numpy": {"numpy", "scipy", "threadpoolctl"},
    "cupyconv.cuda.run": {"numpy", "cupy", "cupy_backends", "cuda"},  # `cuda` finds libraries for CuPy
    "cupyconv.demo": {"numpy", "cupy", "matplotlib"},
    "cupyconv.interop": {"numpy", "ml_dtypes", "cupy", "torch", "jax", "dask", "onnx"},
    "cupyconv.bench": {"numpy", "threadpoolctl"},
}


def dotted(path: Path) -> str:
    return ".".join(part for part in path.parts if part != "__init__")


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in it, or names in a string to import it later."""
    names = {dotted(module) for module in MODULES}
    for node in ast.walk(ast.parse((ROOT / path).with_suffix(".py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute, so that they can be searched for"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in names else node.module
        elif isinstance(node, ast.Constant) and node.value in names - {"cupyconv"}:
            yield node.value


def member(module: str) -> tuple[int, str]:
    """Return the number of a module's layer, and the entry of LAYERS that it belongs to: the longest match."""
    entries = [(len(name), depth, name) for depth, names in enumerate(LAYERS.values()) for name in names]
    fitting = [e for e in entries if module == e[2] or (e[2] != "cupyconv" and module.startswith(e[2] + "."))]
    assert fitting, f"{module} has no layer: enter it in LAYERS"
    return max(fitting)[1:]


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_downward(path):
    module = dotted(path)
    depth, owner = member(module)
    for imported in imports(path):
        if imported == "cupyconv" or imported.startswith("cupyconv."):
            other_depth, other = member(imported)
            assert other_depth >= depth, f"{module} imports {imported}, which is above it"
            if owner in STRANGERS and other in STRANGERS:
                assert owner == other, f"{module} imports {imported}: a plan is all they share"
        elif imported.partition(".")[0] not in sys.stdlib_module_names:
            allowed = OUTSIDE.get(module, OUTSIDE.get(owner, {"numpy"}))
            assert imported.partition(".")[0] in allowed, f"{module} imports {imported}, allowed are {sorted(allowed)}"


def test_the_rule_would_see_an_upward_import():
    assert member("cupyconv.cuda.plan.gemm")[0] > member("cupyconv.call.call")[0]
    assert member("cupyconv.demo.merge")[0] < member("cupyconv")[0]
    assert "cupyconv.cuda.plan.conv" in set(imports(Path("cupyconv/cuda/plan/__init__")))


def test_contributings_drawing_is_the_tree():
    """The drawing of the tree has every folder with every module, and nothing else."""
    drawing = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("The tree, every file.")[2]
    drawn: dict[str, set[str]] = {}
    room = ""
    for line in drawing.split("```")[1].partition("cupyconv/\n")[2].splitlines():
        if not line.startswith("  "):
            break
        place, modules = line[2:14].strip(), re.split(r"\s{3,}", line[14:])[0]
        room = place.rstrip("/") or room
        drawn.setdefault(room, set()).update(modules.split())
    there: dict[str, set[str]] = {}
    for path in MODULES:
        if len(path.parts) > 2 and path.name != "__init__":
            there.setdefault("/".join(path.parts[1:-1]), set()).add(path.name)
    assert drawn == there


def test_a_file_name_stands_in_two_rooms_at_most():
    rooms = Counter(path.name for path in MODULES if path.name != "__init__")
    assert [name for name, count in rooms.items() if count > 2] == []


def files_entered(code: str) -> set[str]:
    """Return the package's files whose functions run during the last line of the code, in a new process."""
    *before, last = code.splitlines()
    traced = (
        "import sys",
        *before,
        "seen = set()",
        "sys.setprofile(lambda frame, event, argument: seen.add(frame.f_code.co_filename))",
        last,
        "sys.setprofile(None)",
        "print(*sorted(name for name in seen if 'cupyconv' in name and name.endswith('.py')))",
    )
    return set(python("\n".join(traced)).split())


def test_a_convolution_is_followed_through_few_files():
    """A first call on NumPy runs through nineteen files from its signature to its product, for a newcomer to read.

    They are the operation, three files of `call/`, eight of `numpy/`, and seven of `problem/`.  All layers share two of
    them: `cost`, the only place that estimates times of methods, and `caches`, the only budget of what is cached between
    calls.  In `numpy/`, all kinds of problems share `choice` and `block_loops`: in one file with the convolution's own
    code they were 700 lines of three subjects, and a reader of one subject does not want the others.
    A smaller call also enters `lone_product`.
    """
    arrays = "x, weight = numpy.ones((2, 8, 33, 33), numpy.float32), numpy.ones((16, 8, 3, 3), numpy.float32)"
    entered = files_entered(f"import numpy, cupyconv\n{arrays}\ncupyconv.conv(x, weight)")
    assert any(name.endswith("ops/conv.py") for name in entered)
    assert len(entered) <= 19, sorted(entered)


def test_max_pool_lives_in_few_files():
    """Every layer has one file that defines a part of max_pool, and each of its two kernels has a file."""
    rooms = ("ops", "problem", "numpy", "cuda")
    defining = [
        path
        for path in MODULES
        if path.parts[1] in rooms
        and re.search(r"^(def|class) \w*max_?pool", (ROOT / path).with_suffix(".py").read_text("utf-8"), re.I | re.M)
    ]
    assert sorted(path.parts[1] for path in defining) == sorted(rooms), defining
    assert len([path for path in KERNELS if "pool" in path.stem]) == 2


def test_no_module_is_named_after_nothing():
    """Code that nobody found a name for ends up in `utils`."""
    parts = {part for path in MODULES for part in path.parts}
    assert not parts & {"util", "utils", "helper", "helpers", "misc", "common", "tools"}
    assert all(len(part) > 2 for part in parts)


# --- importing ------------------------------------------------------------------------------------------------

HEAVY = ("cupy", "scipy", "torch", "dask", "matplotlib", "hypothesis", "ml_dtypes", "threadpoolctl")

#: Limit of the time of `import cupyconv`, in imports of NumPy (0.1 s on a quiet machine): load affects both.
IMPORT_SHARE = 0.9


def python(code: str, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_nothing_heavy_is_imported():
    code = f"import sys, cupyconv; print([name for name in {HEAVY} if name in sys.modules])"
    assert python(code).strip() == "[]"


def test_importing_is_quick(tmp_path):
    """Processor time, the best of five new processes, so that a busy machine causes no failure.

    Conditions are a user's: bytecode of an earlier import exists, and conftest does not limit BLAS to one thread, which
    makes NumPy's import faster.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    for name in ("OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    code = (
        "from time import process_time as now;"
        "start = now(); import numpy; middle = now(); import cupyconv; print((now() - middle) / (middle - start))"
    )
    python(code, environment)  # writes the bytecode
    assert min(float(python(code, environment)) for _ in range(5)) < IMPORT_SHARE


def test_cupy_is_imported_for_its_arrays_only():
    code = (
        "import sys, numpy, cupyconv;"
        "x, weight = numpy.ones((1, 1, 5)), numpy.ones((1, 1, 3));"
        "cupyconv.conv(x, weight); cupyconv.explain(cupyconv.conv, x, weight, on='sm_90');"
        "print('cupy' in sys.modules)"
    )
    assert python(code).strip() == "False"


def test_what_dispatch_expects_of_cupy():
    """Dispatch knows CuPy's array by its module and name, without importing it."""
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    assert any(c.__module__.partition(".")[0] == "cupy" and c.__name__ == "ndarray" for c in cupy.ndarray.__mro__)


# --- seams ----------------------------------------------------------------------------------------------------


def public_signatures(cls: type) -> dict[str, inspect.Signature]:
    functions = {name: f for name, f in vars(cls).items() if isinstance(f, FunctionType) and not name.startswith("_")}
    return {name: inspect.signature(function) for name, function in functions.items()}


@pytest.mark.parametrize("backend", [NumpyBackend, CudaBackend])
def test_backends_have_the_protocols_methods_and_no_others(backend):
    needed, given = public_signatures(Backend), public_signatures(backend)
    assert given.keys() == needed.keys()
    for name in needed:  # return types may be narrower than the protocol's
        assert list(given[name].parameters.values()) == list(needed[name].parameters.values()), name


def parameter_names(path: Path, cls: str) -> dict[str, list[str]]:
    """Return the parameters of a class's public methods, read from its source: it need not be importable."""
    classes = {node.name: node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)}
    return {
        f.name: [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
        for f in classes[cls].body
        if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")
    }


def test_cupys_device_has_the_protocols_methods():
    needed = {name: list(signature.parameters) for name, signature in public_signatures(Device).items()}
    assert parameter_names(PACKAGE / "cuda/run/cupy_device.py", "CupyDevice") == needed


def test_the_host_device_has_the_protocols_methods():
    """The host device has the protocol's methods, and others that tests use."""
    needed = {name: list(signature.parameters) for name, signature in public_signatures(Device).items()}
    given = {name: list(signature.parameters) for name, signature in public_signatures(HostDevice).items()}
    assert {name: given.get(name) for name in needed} == needed


def test_the_seams_are_not_empty():
    assert {"prepare", "empty", "address"} <= public_signatures(Backend).keys()
    assert {"load", "gemm_strided_batched", "empty"} <= public_signatures(Device).keys()


# --- words ----------------------------------------------------------------------------------------------------

FUNCTIONS = [name for name in cupyconv.__all__ if not name.startswith("__")]

#: Sections that a docstring must have; a name that prints, or is a value, has fewer.
SECTIONS = {
    "Plan": ("Attributes", "Examples"),
    "ConvGradients": ("Attributes", "Examples"),
    "ConvLayer": ("Parameters", "Raises", "Examples"),
    "RecurrentGradients": ("Attributes", "Examples"),
    "options": ("Parameters", "Raises", "Examples"),
    "show_config": ("Examples",),
    "clear_caches": ("Examples",),
}


def test_every_operation_answers_calls_of_other_libraries():
    """An operation's function accepts their keywords and positional arguments, and its signature shows none of them."""
    for function in _OPERATIONS:
        flags = function.__code__.co_flags
        assert flags & inspect.CO_VARKEYWORDS and flags & inspect.CO_VARARGS, function.__name__
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, function.__name__


def test_everything_promised_is_public():
    promised = {"conv", "linmerge", "im2col", "col2im", "fold_batchnorm", "onnx_padding", "explain", "options"}
    promised |= {"show_config", "Plan", "__version__"}
    assert promised <= set(cupyconv.__all__)
    assert list(cupyconv.__all__) == sorted(cupyconv.__all__)
    assert all(hasattr(cupyconv, name) for name in cupyconv.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings(name):
    """Docstrings are in NumPy style: a summary, the sections, and every parameter by name."""
    documented = getattr(cupyconv, name)
    text = inspect.getdoc(documented)
    assert text and text.splitlines()[0].endswith((".", "``")), "a summary in one line"
    for section in SECTIONS.get(name, ("Parameters", "Returns", "Raises", "Examples")):
        assert re.search(rf"^{section}\n-{{{len(section)}}}$", text, re.MULTILINE), f"no section {section}"
    assert ">>> " in text
    if name not in ("Plan", "ConvGradients", "RecurrentGradients"):
        for parameter in inspect.signature(documented).parameters:
            listed = re.search(rf"^[\w, *]*\b{parameter}\b[\w, *]*( : .*)?$", text, re.MULTILINE)
            assert listed, f"parameter {parameter} is not described"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_every_module_says_what_it_is(path):
    text = ast.get_docstring(ast.parse((ROOT / path).with_suffix(".py").read_text("utf-8")))
    assert text and text.splitlines()[0].endswith((".", "``", ":"))


KERNELS = sorted((ROOT / "kernels").glob("*.cu"))


def header(path: Path) -> str:
    """Return the comment at the start of a file."""
    lines = path.read_text("utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    return "\n".join(line.removeprefix("//").rstrip() for line in lines[:end])


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_begin_with_what_they_compute(path):
    """A kernel's header has the formula, the meaning of M, N and K, what bounds it, the floor, and the macros."""
    text = header(path)
    assert re.search(r"^ {5}\w+\[.*\] = ", text, re.MULTILINE), "no formula"
    for letter in "MNK":
        assert re.search(rf"\b{letter} = |\bno {letter}\b|\bno \w, no {letter}\b", text), f"no word on {letter}"
    assert "Bound by" in text
    assert re.search(r"Floor: .* over ", text, re.DOTALL), "no floor"
    assert " -D: " in text


@pytest.mark.parametrize("path", [*KERNELS, *(ROOT / "kernels").glob("*.cuh")], ids=lambda path: path.name)
def test_macros_of_a_kernel_are_in_its_header(path):
    """Every -D that a header lists is used, so that the list stays current."""
    text, code = header(path), path.read_text("utf-8")
    assert text.strip(), "no header"
    for macro in re.findall(r"\b[A-Z][A-Z_]+\b", text.partition("-D: ")[2]):
        assert len(re.findall(rf"\b{macro}\b", code)) > 1, f"{macro} is not used"


def test_the_kernels_map_names_every_file():
    """The kernels' map names every file, and no other."""
    named = re.findall(r"`(\w+\.cuh?)`", (ROOT / "kernels" / "README.md").read_text("utf-8"))
    assert set(named) == {path.name for path in (ROOT / "kernels").glob("*.cu*")}


def test_kernels_are_found():
    assert {path.stem for path in KERNELS} >= {"merge", "direct", "depthwise", "im2col", "col2im", "epilogue"}


def test_numpy_is_the_one_requirement():
    """The package imports without SciPy and ml_dtypes; any other import is optional where it happens."""
    assert python("import sys; sys.modules['scipy'] = sys.modules['ml_dtypes'] = None; import cupyconv") == ""
    assert np.lib.NumpyVersion(np.__version__) >= "2.0.0"
