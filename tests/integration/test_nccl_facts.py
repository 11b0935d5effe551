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
    names = [f"--only={name}" for (name,) in chosen(request, "name")]
    answers = tmp_path_factory.mktemp("facts") / "answers.json"
    ended = subprocess.run(
        [sys.executable, str(NCCL_LIKE / "facts.py"), "--json", str(answers), *names],
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert answers.exists(), ended.stdout + ended.stderr
    return {row["name"]: row for row in json.loads(answers.read_text())["facts"]}


@pytest.mark.long  # of a tool of the tests; test_nccl_like_verdicts.py tests what rests on them
@pytest.mark.parametrize("name", [fact.name for fact in facts.FACTS])
def test_the_claim_holds_on_the_emulation(rows, name):
    assert rows[name]["holds"], rows[name]["observed"]


def test_the_page_has_every_claim():
    page = facts.PAGE.read_text(encoding="utf-8")
    assert [fact.claim for fact in facts.FACTS if fact.claim not in page] == []
