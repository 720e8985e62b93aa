"""`attached()`: GPU programs in CuTe DSL and Triton run in the simulator, unmodified as far as
possible.

While attached, device queries answer as the simulated device (`devices`: a B200 unless it is told
another), CuTe DSL and Triton compile for it, tensors made on a CUDA device lie in host memory, and
calls of compiled functions, plain and tvm-ffi, launch in the simulator. Events and streams are
accepted; their times are those of this machine, and no measure of a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from sm100_sim import devices
from sm100_sim.errors import LaunchError, MissingExtra, SimulationError
from sm100_sim.host import LaunchConfig, keeping_ptx, program_of
from sm100_sim.host.arguments import tensor_ranges
from sm100_sim.host.capsule import CudaCapsule
from sm100_sim.host.host_code import languages
from sm100_sim.launcher import options_from, run_host_code
from sm100_sim.report import Report
from sm100_sim.settings import read_settings
from sm100_sim.triton_launcher import driving

from .live import pointer_ranges
from .patch import Patch, applied

#: Libraries that keep compiled kernels in files of their own: what comes back from there holds
#: machine code without its PTX. (environment variable, its value that switches the cache off,
#: module and attribute that keep it, if any)
LIBRARY_CACHES = (
    ("QUACK_CACHE_ENABLED", "0", "quack.cache", "CACHE_ENABLED"),
    ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0", "flash_attn.cute.cache_utils",
     "CUTE_DSL_CACHE_ENABLED"),
    ("CUDNN_FRONTEND_DISABLE_COMPILED_CACHE", "1", "", ""),
)  # fmt: skip


class Session:
    """Launches inside one `attached()`.

    reports: of the launches, in order. failures: the errors that ended others. modules: kernel ->
    the PTX that it was launched from.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.reports: list[Report] = []
        self.failures: list[BaseException] = []
        self.modules: dict[str, str] = {}

    def run(self, call: Any, arguments: Any, keywords: dict[str, Any] | None = None) -> None:
        """Run host code that was called with `arguments`, and the kernels it launches. In the
        capture of a CUDA graph its launches are left to the replay, and may touch the memory that
        the arguments mean then."""
        from . import graphs

        if graphs.open_capture() is None:
            self._launch(call, _ranges(arguments, keywords))
            return

        def launched(config: LaunchConfig) -> None:
            graphs.refuse_default(config.kernel_name, config.stream)
            if not graphs.takes(config.stream):
                self._launch(lambda launch: launch(config), _ranges(arguments, keywords))
                return
            own = graphs.kept(config)

            def replay() -> None:
                self._launch(lambda launch: launch(own[0]), _ranges(arguments, keywords))

            graphs.record(replay, (own, arguments, keywords))

        call(launched)

    def _launch(self, call: Any, ranges: list[tuple[int, int, str]]) -> None:
        settings = read_settings()
        options = options_from(settings, **{**self._options, "observe": self._observe})

        def noted(on_launch: Callable[[LaunchConfig], None]) -> None:
            def launch(config: LaunchConfig) -> None:
                self.modules[config.kernel_name] = config.ptx
                on_launch(config)

            call(launch)

        try:
            run_host_code(noted, ranges, options, settings.report)
        except (SimulationError, KeyboardInterrupt) as error:
            self.failures.append(error)
            raise

    def _observe(self, config: LaunchConfig, report: Report) -> None:
        self.reports.append(report)
        observe = self._options["observe"]
        if observe is not None:
            observe(config, report)


def _ranges(arguments: Any, keywords: dict[str, Any] | None) -> list[tuple[int, int, str]]:
    """Return (start, end, name) of the memory that a call may touch."""
    return sorted([*tensor_ranges(arguments, keywords), *pointer_ranges(arguments, keywords)])


@contextlib.contextmanager
def attached(
    *,
    clusters: int | None = None,
    seed: int | None = None,
    schedule: str = "eager",
    sanitize: bool | str | None = None,
    trace: bool = False,
    observe: Callable[[LaunchConfig, Report], None] | None = None,
    lines: bool = True,
) -> Iterator[Session]:
    """Run what is compiled and called inside in the simulator, on CPU tensors.

    clusters, seed, schedule, sanitize, trace: as for `launch`, for every launch inside; the
    SM100_SIM_* environment variables are read where none is given. observe: called with the
    `LaunchConfig` of each launch and its report. Yields a `Session`, whose `reports` grow with each
    launch. lines: whether CuTe DSL compiles with line information, by which findings name the
    source. Raises RuntimeError inside another `attached()`, and ImportError without PyTorch or
    without a compiler: the extra `attach` installs CuTe DSL, `triton` Triton.

    Every tensor passes for a CUDA tensor inside; `.cuda()`, `.cpu()` and `.to(device)` copy. A
    kernel may touch the tensors of its call and those whose addresses the call has as integers, or
    in a 64-bit integer tensor; if the call holds raw pointers, every live tensor. torch.cuda.graph,
    and captures of a stream by cuda.bindings, record launches and PyTorch's operators. Several
    devices, files of compiled kernels and graphs built node by node are errors. Contexts do not
    nest.
    """
    if _active:
        raise RuntimeError("sm100_sim.attached() is active already; it does not nest")
    has_dsl, has_triton = _compilers()
    from . import graphs, streams, torch_cuda

    session = Session(clusters=clusters, seed=seed, schedule=schedule, sanitize=sanitize,
                      trace=trace, observe=observe)  # fmt: skip
    _active.append(session)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_no_library_caches())
            stack.enter_context(applied(torch_cuda.patches()))
            if has_dsl:
                from . import driver, driver_graphs

                stack.callback(driver_graphs.forget)
                stack.enter_context(applied(driver.patches()))
                stack.enter_context(_compiling_for_target(lines))
                stack.enter_context(applied(_dsl_patches(session)))
            if has_triton:
                stack.enter_context(driving(session.run, streams.current))
            torch_cuda.register_custom_operators()
            stack.callback(graphs.abandon)
            yield session
    finally:
        _active.clear()


_active: list[Session] = []


def _compilers() -> tuple[bool, bool]:
    """Return whether CuTe DSL and Triton are installed. Raises MissingExtra if neither is, or no
    PyTorch."""
    found = []
    for name in ("torch", "cutlass", "triton"):
        try:
            importlib.import_module(name)
            found.append(True)
        except ModuleNotFoundError as error:
            found.append(False)
            if name == "torch" or found[1:] == [False, False]:
                raise MissingExtra("attached()", "attach", error) from error
    return found[1], found[2]


@contextlib.contextmanager
def _compiling_for_target(lines: bool) -> Iterator[None]:
    from cutlass import cute

    with contextlib.ExitStack() as stack:
        stack.enter_context(keeping_ptx())
        # Keeping PTX bypasses the DSL's cache of compiled functions, as is meant here.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Cache is disabled")
        for variables, function in languages():
            # As of `keeping_ptx`: compiling copies the setting to where it would outlive this.
            option = function._compile_options.options[cute.GenerateLineInfo]
            stack.callback(setattr, variables, "_arch", vars(variables).get("_arch"))
            for owner, name in ((variables, "lineinfo"), (option, "value")):
                stack.callback(setattr, owner, name, getattr(owner, name))
            variables.arch = devices.current().target
            variables.lineinfo = variables.lineinfo or lines
        yield


@contextlib.contextmanager
def _no_library_caches() -> Iterator[None]:
    saved = {}
    with contextlib.ExitStack() as stack:
        for variable, off, module, attribute in LIBRARY_CACHES:
            saved[variable] = os.environ.get(variable)
            os.environ[variable] = off
            if module in sys.modules:
                stack.enter_context(applied([Patch(sys.modules[module], attribute, False)]))
        try:
            yield
        finally:
            for variable, value in saved.items():
                if value is None:
                    del os.environ[variable]
                else:
                    os.environ[variable] = value


def _dsl_patches(session: Session) -> Iterator[Patch]:
    """Calls of compiled functions, in all the ways the DSL offers, go to `session`."""
    import cutlass.cute.runtime as cute_runtime
    import cutlass.utils
    import torch
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    from .torch_cuda import custom_op

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        program = program_of(self)
        session.run(lambda on_launch: program.run(args, on_launch, kwargs), args, kwargs)

    arguments: list[Any] = [()]
    original_types = BaseDSL.generate_mlir_function_types

    def function_types(self: Any, func: Any, name: str, args: Any, *rest: Any, **more: Any) -> Any:
        # A jitted function that is called directly hands over addresses only; the tensors behind
        # them are seen here.
        arguments[0] = (args, rest[0] if rest else {})
        return original_types(self, func, name, args, *rest, **more)

    def run_addresses(self: Any, addresses: list[Any]) -> None:
        program = program_of(self)
        session.run(lambda on_launch: program.run_packed(addresses, on_launch), tuple(arguments))

    def clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        return devices.current().clusters(cluster_size)

    def no_module(path: str, **_: Any) -> None:
        raise LaunchError(
            f"{path} holds compiled kernels without their PTX; the simulator needs them compiled "
            "in this process (switch the library's own kernel cache off)"
        )

    compiled = CudaDialectJitCompiledFunction
    yield Patch(compiled, "__call__", call)
    yield Patch(compiled, "to", lambda self, device=None: self)
    yield Patch(compiled, "run_compiled_program", run_addresses)
    yield Patch(BaseDSL, "generate_mlir_function_types", function_types)
    yield Patch(cutlass.utils.HardwareInfo, "get_max_active_clusters", clusters)
    yield Patch(cute_runtime, "load_module", no_module)
    yield Patch(torch.library, "custom_op", custom_op(torch.library.custom_op))
    yield from _tvm_ffi_patches(session, call)


def _tvm_ffi_patches(session: Session, call: Any) -> Iterator[Patch]:
    try:
        import tvm_ffi
        from cutlass.cutlass_dsl import tvm_ffi_provider
    except ImportError:  # optional for CuTe DSL, too
        return
    import torch

    original = tvm_ffi.from_dlpack

    def from_dlpack(tensor: Any, **kwargs: Any) -> Any:
        return original(CudaCapsule(tensor) if isinstance(tensor, torch.Tensor) else tensor,
                        **kwargs)  # fmt: skip

    def function_itself(self: Any) -> Callable[..., None]:
        def call_by_position(*args: Any) -> None:
            program: Any = program_of(self)
            session.run(lambda on_launch: program.run_positional(args, on_launch), args)

        return call_by_position

    yield Patch(tvm_ffi, "from_dlpack", from_dlpack)
    yield Patch(tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs, "__tvm_ffi_object__",
                function_itself)  # fmt: skip
    for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
        yield Patch(getattr(tvm_ffi_provider, name), "__call__", call)
