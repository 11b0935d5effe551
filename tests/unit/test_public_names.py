"""What ``import commlens`` gives, and what it costs."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

import commlens
from conftest import SOURCE


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_names_are_sorted_and_there():
    assert commlens.__all__ == sorted(commlens.__all__)
    for name in commlens.__all__:
        assert getattr(commlens, name) is not None
    assert dir(commlens) == commlens.__all__


def test_what_type_checkers_see_is_what_is_there():
    import ast

    tree = ast.parse((SOURCE / "commlens" / "__init__.py").read_text())
    seen = next(node for node in tree.body if isinstance(node, ast.If))
    names = {
        alias.asname or alias.name
        for node in seen.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert names | {"__version__"} == set(commlens.__all__)


def test_every_error_is_public():
    from commlens import errors

    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.CommlensError)
    }
    assert classes <= set(commlens.__all__)


def test_the_version_is_the_distributions():
    assert importlib.metadata.version("commlens") == commlens.__version__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'commlens' has no attribute 'nonsense'"):
        _ = commlens.nonsense  # type: ignore[attr-defined]


@pytest.mark.launches
def test_importing_commlens_is_cheap_and_changes_nothing():
    heavy = "{'torch', 'rich', 'numpy', 'msgspec', 'yaml', 'argparse', 'asyncio', 'inspect'}"
    program = (
        f"import sys; sys.modules.pop('torch', None); import commlens; print(sorted({heavy} &"
        " set(sys.modules)))"
    )
    assert python(program) == "[]"


@pytest.mark.launches
@pytest.mark.parametrize("name", ["diagnose", "trace", "verify"])
def test_no_package_hides_a_public_function(name):
    """Importing ``commlens.diagnose.something`` would replace the function of that name."""
    assert not (SOURCE / "commlens" / name).exists()
    assert not (SOURCE / "commlens" / f"{name}.py").exists()
    assert python(f"import commlens, inspect; print(inspect.isfunction(commlens.{name}))") == "True"


@pytest.mark.launches
def test_a_decorated_function_is_what_it_was_without_torch():
    program = """
import sys
sys.modules["torch"] = None
import commlens
@commlens.verify_operation(values=["op"])
def gather(inputs, op="mean"):
    "What it does."
    return op
print(gather(1), gather.__name__, gather.__doc__)
"""
    assert python(program) == "mean gather What it does."


@pytest.mark.launches
@pytest.mark.parametrize(
    "call",
    [
        "commlens.enable()",
        "commlens.enable(stall_timeout=3)",
        "commlens.enable(verify=True)",
        "commlens.verify().__enter__()",
    ],
)
def test_enable_without_torch_says_which_line_to_type(call):
    program = f"""
import sys
sys.modules["torch"] = None  # as if it were not installed
import commlens
try:
    {call}
except commlens.MissingDependency as error:
    print(error)
"""
    assert "pip install torch" in python(program)


def test_two_names_for_one_setting_must_say_the_same():
    pytest.importorskip("torch")
    with pytest.raises(commlens.ConfigError, match="two names for one setting"):
        commlens.enable(verify=True, debug=False)


@pytest.mark.launches
def test_dump_follows_the_settings_that_enable_was_given(tmp_path):
    pytest.importorskip("torch")
    program = f"""
import commlens, stat
import torch.distributed as dist
try:
    commlens.dump({str(tmp_path)!r})
except commlens.CommandError as error:
    print(error)
commlens.enable(dump_mode="0640", keep_dumps=1, box_dir={str(tmp_path / "box")!r}, watched=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
for path in sorted(commlens.dump({str(tmp_path / "dumps")!r}).iterdir()):
    print(path.name.split(".")[0], oct(path.stat().st_mode & 0o777))
print(oct(next(commlens.dump({str(tmp_path / "other")!r}, mode=0o600).glob("*.box")).stat().st_mode & 0o777))
"""
    lines = python(program).splitlines()
    assert lines[0].startswith("This process is not recorded, so there is nothing to dump")
    assert [line.split() for line in lines[1:4]] == [
        ["commlens-dump", "0o640"],
        [f"observed-{os.uname().nodename}", "0o640"],
        ["rank0", "0o640"],
    ]
    assert lines[4] == "0o600"


@pytest.mark.launches
def test_expect_slow_without_torch_does_nothing():
    program = (
        "import sys; sys.modules['torch'] = None; import commlens\nwith"
        " commlens.expect_slow('checkpoint'):\n    print('done')"
    )
    assert python(program) == "done"
