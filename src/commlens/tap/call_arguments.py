"""The arguments of a call of torch, by name. Programs pass them by position or by keyword, and
torch's versions differ in their order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

Reader = Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any] | None]


def reader_of(function: Callable[..., Any]) -> Reader:
    """Return a function that names the arguments of a call of ``function``. It returns None for a
    call that does not fit, and for every call if the parameters have no names.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as of pybind11's
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
