"""All kernels of vLLM's Model Runner V2: which of them Triton's interpreter runs, and why not the others.

`kernels` drives some as the engine does. The others are launched once, alone, with made-up arguments: pointers get
memory of zeros that is large enough, numbers are small, flags are set. So this shows what the interpreter refuses on
the lines that are reached, and says nothing of results.
"""

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm.v1.worker.gpu as package

from batchstate.races import cuda_on_cpu

FLOATS = re.compile(
    "logit|prob|temp|min_p|penalt|cos|sin|score|embed|hidden|bias|max|sum|lse|mass|feature|pred|conf|slope|intercept"
    "|freqs|xh_|lat_|w1_|wlat|mixl|wg_|wu_|wd_"
)
"""Names of pointers to floating point numbers."""

INTEGERS = re.compile("idx|index|indices|ids|_len|num_|count|start|pos|mask|block|slot|cu_|token|argmax|step|_col_")
"""Names of pointers to integers, whatever else they name."""

POINTERS = re.compile("ptr|^(idx_mapping|query_start_loc|pos|block_table_strides|block_sizes|slot_mapping_enabled)$")
MANY = re.compile("stride|^(num|max|n)_|vocab")
"""Names of numbers that are more than 1."""

SIZES = re.compile("BLOCK|SIZE|DIM|PADDED|WIDTH|TILE|TOPK|MAX|NUM|LOOKAHEAD")
FLAGS = re.compile("HAS|USE|IS|MULTI|APPLY|MASK|RETURN|STORE|SAVE|DO")
ROOM = 1 << 16
"""Elements of a made-up pointer's memory, in front of it as well."""


def functions() -> Iterator[tuple[str, str, Any, str]]:
    """File, name and object of each function that is decorated with `triton.jit`, and what it is."""
    root = Path(str(package.__file__)).parent
    for file in sorted(root.rglob("*.py")):
        text = file.read_text()
        if "@triton.jit" not in text:
            continue
        inside = file.relative_to(root)
        tree = ast.parse(text)
        try:
            module: Any = importlib.import_module(".".join([package.__name__, *inside.with_suffix("").parts]))
        except Exception as error:
            module = error
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                value = module if isinstance(module, Exception) else getattr(module, node.name)
                kind = "kernel" if re.search(rf"\b{node.name}\s*\[", text) else "helper of kernels"
                outside = " on some lines calls libdevice" * bool(re.search(r"\b(tl|lib)device\.", ast.unparse(node)))
                yield str(inside), node.name, value, kind + outside


def arguments_of(kernel: Any) -> dict[str, Any]:
    """Made-up arguments; what tables of addresses name goes along, under names in brackets."""
    function = kernel.fn
    while hasattr(function, "fn"):  # behind heuristics
        function = function.fn
    made: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if "constexpr" in str(parameter.annotation):
            made[name] = constant(name, parameter.default)
        elif "ptrs" in name:
            target = torch.zeros(2 * ROOM, dtype=torch.int32, device="cuda")
            made[name] = torch.full((64,), target[ROOM:].data_ptr(), dtype=torch.int64, device="cuda")
            made[f"[{name}]"] = target
        elif POINTERS.search(name):
            floats = FLOATS.search(name) and not INTEGERS.search(name)
            made[name] = torch.zeros(2 * ROOM, dtype=torch.float32 if floats else torch.int64, device="cuda")[ROOM:]
        else:
            made[name] = 8 if MANY.search(name) else 1
    return made


def constant(name: str, default: Any) -> Any:
    """A value for a constant of the kernel."""
    if FLAGS.match(name):
        return True
    if default is not inspect.Parameter.empty:
        return default
    return 32 if SIZES.search(name) else 1


def reason(error: BaseException) -> str:
    """The innermost error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:150]


def verdict(kernel: Any) -> str:
    """What becomes of a launch of two programs; empty if it ran."""
    with cuda_on_cpu(on_race="collect"):
        made = arguments_of(kernel)
        try:
            kernel[2, 1, 1](**{name: value for name, value in made.items() if not name.startswith("[")})
        except Exception as error:
            return reason(error)
    return ""


def print_table(driven: Counter[str]) -> Counter[str]:
    """Prints each function, and what became of it; returns how often that was."""
    counts: Counter[str] = Counter()
    for file, name, kernel, kind in functions():
        if isinstance(kernel, Exception):
            said = f"not imported: {reason(kernel)}"
        elif kind.startswith("helper"):
            said = kind
        elif name in driven and file.count("/") < 2:
            said = "driven"
        else:
            failed = verdict(kernel)
            said = f"fails: {failed}" if failed else "runs, with made-up arguments"
            said += kind.removeprefix("kernel").replace(" on", "; on")
        counts[said.partition(":")[0]] += 1
        print(f"  {file}: {name}: {said}", flush=True)
    print(", ".join(f"{count} {said}" for said, count in counts.items()))
    return counts
