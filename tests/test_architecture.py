"""The design's rules about the code itself, read from its syntax trees: layers, purity, names, what an import does."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import whale_torch

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "whale_torch"

# docs/design.md, section 4, bottom to top. A new module takes its place here first; a package stands for all in it.
LAYERS: list[set[str]] = [
    {"errors", "names"},
    {"ops", "mesh", "gloo", "exits", "restarts", "cluster", "simulate.device"},
    {"comm"},
    {"scopes", "annotation", "capture", "by_name", "trace", "planning"},
    {"strategies", "moe", "recomputation", "offload", "optim", "checkpoint"},
    {"apply", "agreement", "initial_values", "rehearsal", "profiling", "state", "metrics", "data", "positions"}
    | {"simulate.run", "simulate"},
    {"", "__main__", "integrations"},
]
PURE, STRATEGIES = 3, 4

# Imports that may go up: (importer, imported).
UPWARD = {
    # What a shard is, is pure data, of which both the planner and the runtime speak.
    ("comm.registry", "planning.layout"),
}

# Private names of torch, and the modules or packages that may use them.
PRIVATE_TORCH = {
    # The world's store: torch has no public way to it.
    "torch.distributed.distributed_c10d._get_default_store": {"exits"},
    # The only way to say which device, and so which polling thread, a gloo group uses.
    "torch.distributed.ProcessGroupGloo._Options": {"gloo"},
    # torch's own documentation of __torch_function__ tells subclasses to use it.
    "torch._C.DisableTorchFunctionSubclass": {"comm"},
    # The end of backward: DDP and FSDP use it, and nothing public is called there.
    "torch.autograd.Variable._execution_engine.queue_callback": {"comm", "strategies"},
    # Whether backward() or torch.autograd.grad runs, as torch's own register_multi_grad_hook asks.
    "torch._C._will_engine_execute_node": {"comm", "strategies"},
    # Tensors without memory: what torch.export and torch.compile record on.
    "torch._subclasses.fake_tensor.FakeTensor": {"trace"},
    "torch._subclasses.fake_tensor.FakeTensorMode": {"trace"},
    "torch._subclasses.fake_tensor.DataDependentOutputException": {"trace"},
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": {"trace"},
    # Documented under this name; sees which operations draw random numbers or write.
    "torch.utils._python_dispatch.TorchDispatchMode": {"trace", "strategies", "profiling"},
    # Whether a checkpoint's hooks are on, which a recording would lose.
    "torch._C._autograd._top_saved_tensors_default_hooks": {"trace"},
    # Inside a module that stays whole its own tensor subclasses see no functions.
    "torch._C.DisableTorchFunction": {"trace"},
    # Whether a backward may come again through the same graph, as torch's own ahead-of-time autograd asks.
    "torch._C._autograd._get_current_graph_task_keep_graph": {"comm"},
    # Inside torch.func, whose tensors mean nothing outside.
    "torch._C._are_functorch_transforms_active": {"strategies"},
    # Which backward runs: what one left behind when an error ended it belongs to no other, and a forward inside one
    # is a checkpoint's second.
    "torch._C._current_graph_task_id": {"comm", "strategies", "moe"},
    # Where F.cross_entropy and F.nll_loss go; every public way to see them costs Python at each other operation.
    "torch._C._nn": {"comm"},
    # What repr shows: subclasses are meant to override it.
    "torch.nn.Module._get_name": {"strategies"},
    # Whether a model runs inside a DistributedDataParallel that was put around it later.
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": {"strategies"},
    # Compared only: does a module load in a way of its own? torch's documentation tells modules to override it.
    "torch.nn.Module._load_from_state_dict": {"checkpoint"},
    # Compared only: does a scaler look for overflow as torch's does, in one rank's gradients?
    "torch.amp.GradScaler._unscale_grads_": {"optim"},
    # For people: the type of an op in an annotation, and which kernel answers.
    "torch._ops.OpOverload": {"ops"},
    "torch._C._dispatch_has_kernel_for_dispatch_key": {"ops"},
}

# The surface is a promise: a change of this list is a change of docs/design.md, section 3, and of CHANGELOG.md.
PUBLIC_NAMES = [
    "AnnotationError",
    "CheckpointError",
    "Cluster",
    "CommError",
    "GradScaler",
    "LayoutError",
    "LossError",
    "Plan",
    "PlanError",
    "TraceError",
    "WhaleError",
    "annotate",
    "auto_parallel",
    "batch_sampler",
    "clip_grad_norm_",
    "cpu_offload",
    "data_rank",
    "full_state_dict",
    "load",
    "no_sync",
    "parallelize",
    "pipeline",
    "plan",
    "recompute",
    "reduce",
    "replica",
    "sampler",
    "save",
    "split",
    "stage",
]


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, "" for the package itself, and its tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def every_module() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", list(modules()))


def layer_of(name: str) -> int:
    """The layer of a module: of its longest prefix that stands in LAYERS."""
    prefix = name
    while True:
        for index, members in enumerate(LAYERS):
            if prefix in members:
                return index
        if "." not in prefix:
            raise AssertionError(
                f"whale_torch/{name.replace('.', '/')} stands in no layer: docs/design.md section 4, then LAYERS"
            )
        prefix = prefix.rpartition(".")[0]


def unit_of(name: str) -> str:
    return name.partition(".")[0]


def imports_of(name: str) -> Iterator[str]:
    """The modules of this package that `name` imports anywhere, also inside functions."""
    known = modules()
    package = name if (PACKAGE / name.replace(".", "/")).is_dir() else name.rpartition(".")[0]
    for node in ast.walk(known[name]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if unit_of(alias.name) == "whale_torch":
                    yield alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ".".join(["whale_torch", *package.split(".")][: -(node.level - 1) or None]).rstrip(".")
                base = f"{above}.{base}".rstrip(".")
            if unit_of(base) != "whale_torch":
                continue
            base = base.partition(".")[2]
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in known else base


def torch_names_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every dotted name below torch that a module imports or reads, and its line."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if unit_of(alias.name) == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level and unit_of(node.module or "") == "torch":
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
    chains = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in chains}
    for node in chains:
        root, _, rest = ast.unparse(node).partition(".")
        if id(node) not in inner and root in bound:
            yield f"{bound[root]}.{rest}", node.lineno


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


@every_module()
def test_imports_go_down(name: str) -> None:
    mine = layer_of(name)
    for target in imports_of(name):
        theirs = layer_of(target)
        if (name, target) in UPWARD or (unit_of(target) == unit_of(name) != "simulate") or mine == len(LAYERS) - 1:
            continue
        assert theirs <= mine, f"whale_torch.{name} (layer {mine}) imports whale_torch.{target} (layer {theirs})"
        if mine == PURE:
            assert theirs in (0, PURE) or target == "cluster", (
                f"whale_torch.{name} is pure and imports whale_torch.{target}"
            )
        if mine == STRATEGIES == theirs:
            assert unit_of(target) == "strategies", f"whale_torch.{name} imports whale_torch.{target}, a sibling"


def test_exceptions_are_still_needed() -> None:
    upward = {(name, target) for name in modules() for target in imports_of(name) if layer_of(target) > layer_of(name)}
    assert upward >= UPWARD
    private = {(unit_of(name), dotted) for name, tree in modules().items() for dotted, _ in torch_names_of(tree)}
    assert private >= {(user, dotted) for dotted, users in PRIVATE_TORCH.items() for user in users}


@pytest.mark.parametrize("name", [name for name in modules() if {name, unit_of(name)} & LAYERS[PURE]])
def test_planning_never_communicates(name: str) -> None:
    used = [
        f"{dotted}, line {line}" for dotted, line in torch_names_of(modules()[name]) if "torch.distributed" in dotted
    ]
    assert not used, f"whale_torch.{name} is pure and uses {used}"


@every_module()
def test_only_mesh_reads_the_environment(name: str) -> None:
    readers = {"environ", "environb", "getenv", "putenv"}
    for node in ast.walk(modules()[name]):
        read = isinstance(node, ast.Attribute) and node.attr in readers
        read |= isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in readers for a in node.names)
        assert not read or name == "mesh", f"whale_torch.{name} reads the environment; mesh.py is the only reader"


@every_module()
def test_no_global_state(name: str) -> None:
    lines = [node.lineno for node in ast.walk(modules()[name]) if isinstance(node, ast.Global)]
    assert not lines, f"whale_torch.{name} says `global` in lines {lines}"


@every_module()
def test_no_private_torch(name: str) -> None:
    for dotted, line in torch_names_of(modules()[name]):
        allowed = unit_of(name) in PRIVATE_TORCH.get(dotted, ())
        assert allowed or not is_private(dotted), f"whale_torch.{name}, line {line}: {dotted} is private to torch"


@pytest.mark.parametrize("name", [name for name in modules() if unit_of(name) == "checkpoint"])
def test_tensors_of_checkpoints_say_their_device(name: str) -> None:
    """Else torch.set_default_device would put there what is read from files."""
    makers = {f"torch.{made}" for made in ("empty", "tensor", "zeros", "ones", "full", "arange", "as_tensor")}
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in makers:
            assert any(one.arg == "device" for one in node.keywords), f"whale_torch.{name}, line {node.lineno}"


@every_module()
def test_every_module_says_what_is_public(name: str) -> None:
    tree = modules()[name]
    assert ast.get_docstring(tree), f"whale_torch.{name} has no docstring"
    lists = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    is_empty = len(tree.body) == 1
    assert len(lists) == 1 or is_empty or name == "__main__", f"whale_torch.{name} needs one __all__"


@every_module()
def test_what_others_import_is_public(name: str) -> None:
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.ImportFrom) and unit_of(node.module or "") == "whale_torch":
            source = (node.module or "").partition(".")[2]
            strays = {a.name for a in node.names if f"{source}.{a.name}".lstrip(".") not in modules()}
            strays -= set(getattr(importlib.import_module(f"whale_torch.{source}".rstrip(".")), "__all__", ()))
            assert not strays, (
                f"whale_torch.{name} imports {strays}, which whale_torch.{source} does not list in __all__"
            )


DESIGN = (ROOT / "docs" / "design.md").read_text()


def test_the_design_names_every_module() -> None:
    built = DESIGN.partition("Built so far:")[2].partition("To come,")[0]
    files = [path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    named = built.replace("split_*.py", " ".join(name for name in files if name.startswith("split_")))
    assert [name for name in files if name not in named] == []


@every_module()
def test_names_say_what_a_module_is_about(name: str) -> None:
    assert not {"utils", "util", "common", "helpers", "helper", "manager", "misc"} & set(name.split("."))


def test_public_names_are_frozen() -> None:
    assert whale_torch.__all__ == PUBLIC_NAMES
    assert [name for name in PUBLIC_NAMES if f"wh.{name}" not in DESIGN and not name.endswith("Error")] == []


def test_no_public_name_is_a_module() -> None:
    for found in pkgutil.walk_packages(whale_torch.__path__, "whale_torch."):
        if not found.name.rpartition(".")[2].startswith("_"):  # no __main__, no compiled library
            importlib.import_module(found.name)
    for name in whale_torch.__all__:
        assert not isinstance(getattr(whale_torch, name), ModuleType), f"importing whale_torch.{name} hides the name"
        assert callable(getattr(whale_torch, name))


def test_import_starts_nothing() -> None:
    """No CUDA call (also not is_available: a process that asked once cannot fork ranks), thread, process or group."""
    code = """
import os, subprocess, threading
import torch, torch.distributed as dist
environment, filters, seed = dict(os.environ), len(__import__("warnings").filters), torch.initial_seed()
def touched(*args, **kwargs):
    raise AssertionError("importing whale_torch starts something")
for owner, name in [
    (torch.cuda, "is_available"), (torch.cuda, "device_count"), (torch.cuda, "current_device"), (torch.cuda, "init"),
    (dist, "init_process_group"), (dist, "new_group"), (threading.Thread, "start"), (subprocess, "Popen"), (os, "fork"),
]:
    setattr(owner, name, touched)
import whale_torch
assert not torch.cuda.is_initialized() and not dist.is_initialized()
assert dict(os.environ) == environment and torch.initial_seed() == seed
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_marker_has_a_user(pytestconfig: pytest.Config) -> None:
    ours = (ROOT / "pyproject.toml").read_text()
    markers = [line.partition(":")[0].partition("(")[0].strip() for line in pytestconfig.getini("markers")]
    markers = [name for name in markers if f'    "{name}' in ours]
    used = {
        node.attr
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    }
    assert set(markers) <= used, f"no test uses {set(markers) - used}"


def test_ranks_can_import_every_test_of_a_world() -> None:
    users = [path for path in (ROOT / "tests").rglob("*.py") if "from tests.world import" in path.read_text()]
    assert [path for path in users if not (path.parent / "__init__.py").exists()] == []
