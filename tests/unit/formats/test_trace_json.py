"""Trace files: what is written is read again, what is not a trace gets a sentence, and the
published schema holds.
"""

from __future__ import annotations

import functools
import gzip
import json
from importlib import resources
from pathlib import Path

import jsonschema
import msgspec
import pytest
from chosen import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces import one_event, training

import commlens
from commlens.formats.trace_json import encode, read_trace, write_trace
from commlens.model.collective import Frame, FrameKind, ProcessGroup
from commlens.model.hazard import Hazard
from commlens.model.trace import (
    Coverage,
    Depth,
    Owner,
    Phase,
    Redistribution,
    TraceData,
    TracedModule,
    TracedOp,
    TracedParameter,
    TraceEvent,
)
from commlens.model.trace_changes import Change, TraceComparison
from commlens.model.trace_summary import ModuleTotal, Summary, Total, Why
from commlens.text import clean

names = st.text(max_size=12).map(clean)  # as every reader returns them
small = st.integers(0, 1 << 70)
frames = st.builds(Frame, names, st.integers(0, 10_000), names, st.sampled_from(FrameKind))
owners = st.builds(Owner, names, names, st.lists(names, max_size=2).map(tuple))
causes = st.builds(Redistribution, st.none() | names, names, names, st.booleans(), names)
events = st.builds(
    TraceEvent,
    sequence=small,
    op=names,
    api=names,
    phase=st.none() | st.sampled_from(Phase),
    group=st.integers(0, 1),
    site=st.none() | names,
    call=small,
    owner=st.none() | owners,
    cause=st.none() | causes,
    source=st.none() | frames,
    through=st.none() | names,
    dtype=names,
    input_bytes=small,
    output_bytes=small,
    wire_bytes=small,
    reduce_op=st.none() | names,
    root=st.none() | small,
    peer=st.none() | small,
    tag=st.integers(),
    asynchronous=st.none() | st.booleans(),
    members=small,
    thread=small,
    step=st.integers(0, 5),
    started_ns=small,
    returned_ns=small,
    wait_began_ns=small,
    wait_ended_ns=small,
    count=st.integers(1, 1 << 40),
    last_step=st.none() | st.integers(5, 9),
)
parameters = st.builds(
    TracedParameter, names, names, st.none() | st.just((4, 8)), names, st.none() | small, names
)
traces = st.builds(
    TraceData,
    rank=st.integers(0, 9),
    world_size=st.integers(1, 10),
    script=names,
    depth=st.sampled_from(Depth),
    steps=small,
    whole_steps=st.none() | small,
    setup_until=st.none() | small,
    preview=st.booleans(),
    groups=st.just([ProcessGroup("1", (0, 1), "dp", "gloo", "dp"), ProcessGroup("2", (0,), "x")]),
    modules=st.lists(
        st.builds(
            TracedModule, names, names, small, parameters=st.just(()) | st.tuples(parameters)
        ),
        max_size=2,
    ),
    events=st.lists(events, max_size=4),
    ops=st.lists(
        st.builds(
            TracedOp,
            names,
            small,
            st.none() | st.sampled_from(Phase),
            input_shapes=st.just(((1, 2), ())),
        ),
        max_size=2,
    ),
    coverage=st.builds(Coverage, small, small, small, st.lists(names, max_size=2)),
)


def published(name: str) -> dict[str, object]:
    return json.loads(resources.files("commlens.reports").joinpath("schemas", name).read_text())


@functools.cache  # jsonschema.validate would check the schema for each example
def _by_trace_schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(published("trace-1.schema.json"))


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=traces, compressed=st.booleans())
def test_what_is_written_is_read_again(tmp_path: Path, data: TraceData, compressed: bool):
    path = tmp_path / ("x.json.gz" if compressed else "x.json")
    write_trace(data, path)
    assert read_trace(path) == data
    _by_trace_schema().validate(json.loads(encode(data)))
    # Whatever it holds, it can be shown.
    trace = commlens.Trace.load(path)
    assert trace.to_summary().calls == trace.calls
    assert not trace.compare(trace)


def test_a_file_name_that_is_no_text_is_escaped_wherever_it_is(tmp_path: Path) -> None:
    line = Frame("caf\udce9.py", 3, "main", FrameKind.USER)
    data = one_event(source=line, owner=Owner("DDP", "bucket 0", ("fc\udce9",)))
    data.hazards = [Hazard("never-waited", 1, (line,))]
    path = tmp_path / "x.json"
    path.write_bytes(encode(data))
    found = read_trace(path)
    assert found.events[0].source is not None
    assert found.events[0].source.file == found.hazards[0].stack[0].file == "caf\\udce9.py"


def test_the_schema_names_what_the_data_has_and_no_more():
    schema = published("trace-1.schema.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    assert list(schema["properties"]) == list(TraceData.__struct_fields__)
    for kind in (
        TraceEvent,
        TracedModule,
        TracedParameter,
        TracedOp,
        Coverage,
        Owner,
        Redistribution,
        Frame,
        ProcessGroup,
    ):
        assert list(schema["$defs"][kind.__name__]["properties"]) == list(kind.__struct_fields__)
    assert schema["$defs"]["Phase"]["enum"] == sorted(phase.value for phase in Phase)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**json.loads(encode(training())), "more": 1}, schema)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("trace-summary-1.schema.json", (Summary, ModuleTotal, Total, Why)),
        ("comparison-1.schema.json", (TraceComparison, Change)),
    ],
)
def test_the_other_schemas_do_so_too(name, kinds):
    schema = published(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert list(schema["properties"]) == list(kinds[0].__struct_fields__)
    for kind in kinds[1:]:
        assert list(schema["$defs"][kind.__name__]["properties"]) == list(kind.__struct_fields__)
    one, other = commlens.Trace(training()), commlens.Trace(training(dtype="bfloat16", layers=3))
    made = one.to_summary() if kinds[0] is Summary else one.compare(other)
    jsonschema.validate(json.loads(msgspec.json.encode(made)), schema)


def test_one_event_a_line():
    lines = encode(training()).decode().splitlines()
    assert sum(line.startswith('  {"sequence":') for line in lines) == 32


def test_size_is_linear_in_events():
    one, ten = len(encode(training(steps=1))), len(encode(training(steps=10)))
    assert ten < 10 * one


GOOD = encode(training())
BAD = {
    "empty": (b"", "is not a trace: it is empty"),
    "text": (b"hello", "it holds no JSON"),
    "binary": (bytes(range(256)), "it holds no JSON"),
    "black box": (b"COMMLENS" + bytes(100), "it is a black box; commlens diagnose reads those"),
    "cut": (GOOD[:3000], "its JSON is cut off"),
    "garbled": (GOOD.replace(b'"events"', b'}}]"events"', 1), "its JSON is damaged"),
    "list": (b"[1, 2]", "it is JSON, but not one object"),
    "number": (b"17", "it is JSON, but not one object"),
    "no schema": (b'{"a": 1}', "JSON without a schema, where 'commlens.trace/1' is expected"),
    "verdict": (b'{"schema": "commlens.verdict/1"}', "it is a verdict"),
    "newer": (b'{"schema": "commlens.trace/2"}', "written by a newer commlens"),
    "other": (b'{"schema": "something/1"}', "its schema is 'something/1'"),
    "odd schema": (b'{"schema": [1]}', "its schema is '[1]'"),
    "wrong type": (
        b'{"schema": "commlens.trace/1", "rank": "a"}',
        r"damaged: Expected `int`, got `str` - at `$.rank`",
    ),
    "no such group": (encode(one_event(group=7)), "event 0 refers to group 7 of 2"),
    "negative group": (encode(one_event(group=-1)), "event 0 refers to group -1 of 2"),
    "count": (encode(one_event(count=0)), "count of 0"),
    "bytes": (encode(one_event(wire_bytes=-4)), "negative number of bytes"),
    "steps": (encode(one_event(step=3, last_step=1)), "ends in step 1, before it begins in step 3"),
    "parent": (
        b'{"schema": "commlens.trace/1", "modules": [{"path": "a", "type": "b", "parent": 3}]}',
        "refers to parent 3 of 1",
    ),
    "gzip cut": (gzip.compress(GOOD)[:-200], "cut off or damaged"),
    "gzip garbled": (gzip.compress(GOOD)[:400] + b"x" * 400, ""),
    "deep": (b"[" * 100_000, "not a trace"),
    "deep children": (
        b'{"fqn": "Global", "children": [' + b'{"fqn": "a", "children": [' * 100_000,
        "",
    ),
    "not utf-8": (GOOD.replace(b"MLP", b"\xff\xfe\xfd"), ""),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_a_trace_gets_a_sentence(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(commlens.FormatError) as caught:
        commlens.Trace.load(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_files_that_are_none(tmp_path):
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "x", "There is no file"),
        (Path("/dev/zero"), "no regular file"),
    ):
        with pytest.raises(commlens.FormatError, match=message):
            commlens.Trace.load(path)


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_damage_is_a_sentence_or_harmless(tmp_path: Path, data: st.DataObject):
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content) - 1))
        length = data.draw(st.integers(0, 40))
        content[start : start + length] = data.draw(st.binary(max_size=20))
        if not content:
            content = bytearray(b" ")
    path = tmp_path / "x.json"
    path.write_bytes(content)
    try:
        trace = commlens.Trace.load(path)
    except commlens.FormatError as error:
        assert str(path) in str(error)
    else:
        trace.to_summary()
        trace.to_rows()
        commlens.Trace(training()).compare(trace)


# --- CommDebugMode's own JSON
