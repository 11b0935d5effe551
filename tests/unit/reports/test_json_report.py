"""The published JSON schemas are what ``make schemas`` generates from the types."""

from __future__ import annotations

import jsonschema
import pytest
from make_schemas import ABOUT, FOLDER, content_of, file_of, schema


@pytest.mark.parametrize("name", ABOUT)
def test_a_schema_is_as_generated(name):
    assert file_of(name).read_text() == content_of(name), "run make schemas"
    jsonschema.Draft202012Validator.check_schema(schema(name))


def test_every_published_schema_is_generated():
    assert sorted(FOLDER.iterdir()) == sorted(file_of(name) for name in ABOUT)
