"""Nothing of commlens starts an accelerator's driver in a rank: a program may still fork, or choose
its devices.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from chosen import long
from launching import Bench

pytest.importorskip("torch")

from conftest import SOURCE

ELSEWHERE = ("launch/environment.py", "tracing/preview/", "scenarios/")
"""No rank: ``commlens doctor``, previews, which pretend to have GPUs, and programs that stand for a
user's.
"""

HARMLESS = {"is_initialized", "is_built", "Event", "Stream", "CUDAGraph"}
"""These read a flag, or are classes whose methods are patched."""

ONCE_STARTED = {
    *("is_current_stream_capturing", "current_stream", "default_stream"),
    *("current_device", "default_generators"),
}
"""These do not start a driver that runs: a function that asks ``is_initialized`` may use them."""


def asked(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that is taken from torch.cuda, torch.xpu or
    torch.accelerator, and may start a driver.
    """
    guarded = {
        part
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and "is_initialized" in ast.unparse(function)
        for part in ast.walk(function)
        if isinstance(part, ast.Attribute) and part.attr in ONCE_STARTED
    }
    for node in ast.walk(tree):
        if node in guarded:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Attribute, ast.Name)):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
            if owner in ("cuda", "xpu", "accelerator"):
                yield node.lineno, node.attr
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            # whose class is patched
            names = [name for name in names if name != "torch.cuda.graphs"]
            if any(
                name.startswith(("torch.cuda", "torch.xpu", "torch.accelerator")) for name in names
            ):
                yield node.lineno, "an import"


def test_no_module_of_a_rank_asks_for_devices() -> None:
    package = SOURCE / "commlens"
    texts = {
        str(path.relative_to(package)): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
    }
    found = [
        f"{path}:{line} {name}"
        for path, text in texts.items()
        if not path.startswith(ELSEWHERE) and re.search("cuda|xpu|accelerator", text)
        for line, name in asked(ast.parse(text))
        if name not in HARMLESS
    ]
    assert found == []


def test_the_search_finds_what_it_looks_for() -> None:
    text = (
        "import torch\nif torch.cuda.is_available():\n    from torch.cuda import"
        " current_device\ntorch.accelerator.device_count()\n"
    )
    assert sorted(asked(ast.parse(text))) == [
        (2, "is_available"),
        (3, "an import"),
        (4, "device_count"),
    ]


@pytest.mark.parametrize(
    ("line", "may_start"),
    [
        ("return torch.cuda.is_initialized() and torch.cuda.current_device()", False),
        ("return torch.cuda.current_device()", True),
        ("return torch.cuda.is_initialized() and torch.cuda.device_count()", True),
    ],
)
def test_a_function_may_ask_a_driver_that_runs(line: str, may_start: bool) -> None:
    names = {name for _, name in asked(ast.parse(f"def ask():\n    {line}\n"))}
    assert bool(names - HARMLESS) is may_start


WATCHED = """
import os, sys
import torch, torch.distributed as dist

def noted(name, answer):
    def ask(*args, **kwargs):
        frame = sys._getframe(1)
        if f"{os.sep}commlens{os.sep}" in frame.f_code.co_filename:
            os.write(1, f"asked {name} {frame.f_code.co_filename}:{frame.f_lineno}\\n".encode())
        return answer
    return ask

for name, answer in (("is_available", False), ("device_count", 0), ("_lazy_init", None), ("current_device", 0), ("get_device_name", "")):
    setattr(torch.cuda, name, noted(name, answer))
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.barrier()
dist.all_gather_object([None, None], dist.get_rank())
peer = 1 - dist.get_rank()
dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, torch.ones(1), peer)])
dist.new_group([0, 1])
import commlens
commlens.verify_operation(lambda tensor: None)(torch.ones(3))
dist.destroy_process_group()
os.write(1, b"finished\\n")
"""


@pytest.mark.parametrize(
    "options", [long(["--debug"]), ["--trace=all"]], ids=["verified", "traced"]
)
def test_a_recorded_rank_asks_for_no_device(tmp_path: Path, options: list[str]) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "watched.py").write_text(WATCHED)
    program = bench.launch(*options, "watched.py")
    assert program.end() == 0, program.report()
    assert program.out.count("finished") == 2
    assert [line for line in program.out if line.startswith("asked")] == []
    bench.close()
