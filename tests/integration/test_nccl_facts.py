"""The claims about NCCL on which commlens builds, on the emulation. tests/nccl_like/facts.py checks
them on a real GPU as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chosen import chosen

NCCL_LIKE = Path(__file__).parents[1] / "nccl_like"
sys.path.append(str(NCCL_LIKE.parent))

import nccl_like  # noqa: E402
from nccl_like import facts  # noqa: E402

pytestmark = pytest.mark.timeout(400)  # the first test runs all of them, and compiles the backend


@pytest.fixture(scope="module")
def rows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the checks said."""
    if why_not := nccl_like.why_not():
        pytest.skip(why_not)
    wanted = chosen(request, "engine", "name")
    engines = [engine for engine in facts.ENGINES if not nccl_like.why_not(engine)]
    names = [f"--only={name}" for _, name in wanted]
    answers = tmp_path_factory.mktemp("facts") / "answers.json"
    ended = subprocess.run(
        [
            *(sys.executable, str(NCCL_LIKE / "facts.py"), "--json", str(answers)),
            *("--engine", *engines, *names),
        ],
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert answers.exists(), ended.stdout + ended.stderr
    return {(row["engine"], row["name"]): row for row in json.loads(answers.read_text())["facts"]}


@pytest.mark.long  # of a tool of the tests; test_nccl_like_verdicts.py tests what rests on them
@pytest.mark.parametrize(
    ("engine", "name"), [(engine, fact.name) for fact in facts.FACTS for engine in fact.engines]
)
def test_the_claim_holds_on_the_emulation(rows, engine, name):
    if why_not := nccl_like.why_not(engine):
        pytest.skip(why_not)
    assert rows[engine, name]["holds"], rows[engine, name]["observed"]


def test_the_page_has_every_claim():
    page = facts.PAGE.read_text(encoding="utf-8")
    assert [fact.claim for fact in facts.FACTS if fact.claim not in page] == []
