"""Modules that an engine imports and its batch state does not use: empty stand-ins, so that the rest can be imported.

Installed modules are imported as they are. `stand_in` is called before the engine is imported.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ABSENT = (
    "aiter amdsmi flash_attn habana_frameworks intel_extension_for_pytorch libtpu torch_musa torch_npu torch_xla"
    " tpu_inference"
)
"""Modules of other devices: an engine asks whether they are there, and has to hear that they are not."""

ENGINES = ("sglang", "vllm", "minisgl", "nanovllm", "lmdeploy", "text_generation_server", "exllamav3", "tokasaurus")
BLANK: set[str] = set()
"""Parts of engines that are stood in for, with all that is below them."""
STOOD_IN: set[str] = set()
"""Modules that were asked for and stood in for."""


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class AnyBase(metaclass=_AnyAttribute):
    """A base class that takes whatever a subclass passes."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return importlib.import_module("pydantic_core.core_schema").any_schema()


class Anything:
    """A function, class, decorator or value of a module that is not there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (AnyBase,)

    def __or__(self, other: Any) -> Any:
        return other

    __radd__ = __ror__ = __or__

    def __lt__(self, other: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, item: Any) -> Any:
        return Anything()

    __get_pydantic_core_schema__ = AnyBase.__get_pydantic_core_schema__


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *args, **options: b"") if name == "dumps" else Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last to be asked. Stands in for modules that an engine asks for, and nobody else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if any(name.startswith(f"{part}.") for part in BLANK):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if top in ABSENT.split() or top in ENGINES or top in sys.stdlib_module_names or not _engine_asks():
            return None
        if top not in STOOD_IN and top in sys.modules:
            return None  # a part of a module that is there
        STOOD_IN.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def blank(name: str) -> None:
    """Puts a stand-in in the place of a module of an engine, and of its parts."""
    if name not in sys.modules:
        sys.modules[name] = _Module(name)
        BLANK.add(name)


def _engine_asks() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return not set(ENGINES).isdisjoint(Path(frame.f_code.co_filename).parts)


def stand_in() -> None:
    """From here on an engine's import finds a stand-in for each module that is not installed. Once is enough."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    torch: Any = importlib.import_module("torch")
    importlib.import_module("transformers").AutoProcessor  # noqa: B018 - loaded now, it sees what is really installed
    for name in ("torch._inductor.runtime.triton_compat", "torch._inductor.output_code"):
        importlib.import_module(name)  # they keep what they find out about triton
    triton: Any = importlib.import_module("torch.utils._triton")
    triton.has_triton_package(), triton.has_triton()
    torch.compile = lambda function=None, **options: function if function is not None else (lambda compiled: compiled)
    if not torch.cuda.is_available():  # there is no memory to pin
        for name in ("zeros", "empty", "ones", "tensor", "full"):
            setattr(torch, name, _unpinned(getattr(torch, name)))
    sys.meta_path.append(_Finder())


def _unpinned(make: Any) -> Any:
    def unpinned(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return unpinned
