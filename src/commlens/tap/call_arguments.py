"""The arguments of a call of torch, by name. Programs pass them by position or by keyword, and
torch's versions differ in their order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_PARAMETER_OF_PYBIND: Final = re.compile(r"[(,] ?(\w+): ")

Reader = Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any] | None]


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return a function's signature: of one of pybind11, the one that its docstring starts with;
    None if the parameters are unknown.
    """
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        names = _PARAMETER_OF_PYBIND.findall((function.__doc__ or "").partition("\n")[0])
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=None) for name in names]
    return inspect.Signature(parameters) if names else None


def reader_of(function: Callable[..., Any]) -> Reader:
    """Return a function that names the arguments of a call of ``function``. It returns None for a
    call that does not fit, and for every call if the parameters have no names.
    """
    signature = signature_of(function)
    if signature is None:
        return lambda args, kwargs: None
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return lambda args, kwargs: None

    names = tuple(signature.parameters)
    fitting: set[tuple[Any, ...]] = set()  # numbers of positions, and keywords

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        # whether a call fits depends on these alone, and binding takes microseconds
        form = (len(args), *kwargs)
        if form not in fitting:
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                return None
            fitting.add(form)
        return {**dict(zip(names, args, strict=False)), **kwargs}

    return read
