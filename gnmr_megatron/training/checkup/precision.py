"""Which precision paths run here: each is tried on a tiny linear, or asked for what it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gnmr_megatron.control.units import Unit
from gnmr_megatron.errors import GnmrError
from gnmr_megatron.models.precision_plan import UnitPlan
from gnmr_megatron.precision.catalog import PATHS, PathName
from gnmr_megatron.precision.config import PrecisionConfig
from gnmr_megatron.training.checkup.findings import PRECISION, Finding
from gnmr_megatron.training.checkup.imports import describe, import_problem

_TOKENS, _WIDTH, _GROUP = 32, 128, 32  # what every path takes
_LARGEST_ERROR = (
    0.8  # INT2 is off by 0.67; what has nothing to do with the exact result, by 1 and more
)


def check_precision(wanted: Collection[PathName], *, fuse: bool | None) -> Iterator[Finding]:
    """Each path of the catalog.

    Args:
        wanted: paths that the run takes, which are required.
        fuse: the run's precision.fuse.
    """
    for info in PATHS.values():
        problem = path_problem(info.name)
        if problem is None:
            yield PRECISION.ok(info.name, _tried(info.name))
        elif info.name in wanted:
            yield PRECISION.problem(
                info.name, problem, "take other paths in precision.low and precision.recovery"
            )
        else:
            yield PRECISION.not_applicable(info.name, problem)
    yield _fused_kernels(fuse=fuse)


def path_problem(name: PathName) -> str | None:
    """Why a path does not run here; None where it does."""
    problem = import_problem("torch")
    if problem is not None:
        return "torch cannot be imported"
    try:
        return _te_problem(name) if PATHS[name].family == "te" else _linear_problem(name)
    except Exception as error:  # noqa: BLE001  # kernels raise what they like, most often RuntimeError
        return f"does not run: {describe(error)}"


def _linear_problem(name: PathName) -> str | None:
    """Run a linear forward and backward on the path, and compare it with the exact one."""
    import torch

    from gnmr_megatron.precision.frozen import PER_OUTPUT_CHANNEL, FrozenPath
    from gnmr_megatron.precision.linear import linear
    from gnmr_megatron.precision.paths import PrecisionPath
    from gnmr_megatron.precision.quantization import pack
    from gnmr_megatron.precision.registry import precision_path

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = torch.Generator().manual_seed(0)
    x, weight, grad_output = (
        torch.randn(shape, generator=draw).to(device, torch.bfloat16)
        for shape in ((_TOKENS, 1, _WIDTH), (_WIDTH, _WIDTH), (_TOKENS, 1, _WIDTH))
    )
    settings = PrecisionConfig(granularity="group", group_size=_GROUP)
    tried: PrecisionPath = (
        FrozenPath(name, packed=pack(weight, PER_OUTPUT_CHANNEL))
        if PATHS[name].family == "frozen"
        else precision_path(name, settings)
    )
    results = []
    for path in (precision_path("fp32", settings), tried):
        inputs = (x.clone().requires_grad_(), weight.clone().requires_grad_())
        output = linear(inputs[0], inputs[1], path)
        results.append([output.detach(), *torch.autograd.grad(output, inputs, grad_output)])
    for what, exact, ours in zip(("output", "input", "weight"), *results, strict=True):
        error = ((ours.float() - exact.float()).norm() / exact.float().norm()).item()
        if not error < _LARGEST_ERROR:  # also NaN
            return f"runs, but its {what} is wrong (off by {error:.2g} of its size)"
    return None


def _te_problem(name: PathName) -> str | None:
    """What Transformer Engine's path lacks; its kernels are not run."""
    if import_problem("megatron.core") is not None:
        return "megatron-core cannot be imported"
    from gnmr_megatron.models.te_adapter import check_environment

    unit = Unit(0, 0, "any", (_WIDTH, _WIDTH))
    try:
        check_environment([UnitPlan(unit, name, name)])
    except GnmrError as error:  # what it says after that is about a run's settings
        return str(error).removeprefix(f"precision: {name} ").partition(" (unit")[0]
    problem = import_problem("transformer_engine.pytorch")
    return None if problem is None else f"Transformer Engine cannot be imported: {problem}"


def _tried(name: PathName) -> str:
    if PATHS[name].family == "te":
        return "Transformer Engine and the GPU have what it needs; its kernels were not run"
    return "ran a small linear forward and backward"


def _fused_kernels(*, fuse: bool | None) -> Finding:
    check = "fused quantisation"
    if import_problem("torch") is not None:
        return PRECISION.not_applicable(check, "torch cannot be imported")
    import torch

    from gnmr_megatron.precision.fusion import has_compiler

    on_gpu = torch.cuda.is_available()
    device, compiler = ("cuda", "Triton") if on_gpu else ("cpu", "g++")
    if has_compiler(torch.device(device)):
        use = "" if on_gpu or fuse else ", used on a CPU only with precision.fuse: true"
        return PRECISION.ok(check, f"{compiler} is there{use}")
    lacking = f"{compiler} is not there, so saved and emulated paths quantise in several kernels"
    if fuse or (on_gpu and fuse is None):
        return PRECISION.warning(check, lacking, f"install {compiler}")
    return PRECISION.not_applicable(check, f"{lacking}; not asked for")
