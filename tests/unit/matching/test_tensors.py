"""Tensors as the wire carries them."""

from __future__ import annotations

from builders import spec

from commlens.matching.tensors import is_sparse, squeezed, total, wire_dtype, wire_numel


def test_complex_numbers_travel_as_pairs_of_real_ones() -> None:
    complex_ones = spec((4, 2), "complex64")
    assert (wire_dtype(complex_ones), wire_numel(complex_ones)) == ("float32", 16)
    assert (wire_dtype(spec(3, "int8")), wire_numel(spec(3, "int8"))) == ("int8", 3)
    assert total([complex_ones, spec(3)]) == 19


def test_dimensions_of_size_1_do_not_change_the_order() -> None:
    assert squeezed(spec((1, 4, 1, 2))) == (4, 2)
    assert squeezed(spec((1, 1))) == ()


def test_sparse_layouts() -> None:
    assert is_sparse(spec(4, layout="sparse_coo")) and not is_sparse(spec(4))
