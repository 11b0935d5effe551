"""A send and its receive."""

from __future__ import annotations

from builders import asked, spec

from commlens.matching.answer import Agree, Disagree, Unknown
from commlens.matching.point_to_point import compare_pair


def test_a_send_must_match_its_receive() -> None:
    send, recv = asked("send", spec(4)), asked("recv", outputs=(spec(4),))
    assert compare_pair(0, send, 1, recv) == Agree()
    assert isinstance(compare_pair(0, asked("send"), 1, recv), Unknown)
    for other in (spec(5), spec(4, "int64")):
        answer = compare_pair(0, send, 1, asked("recv", outputs=(other,)))
        assert isinstance(answer, Disagree)
        assert answer.aspect == "p2p"
