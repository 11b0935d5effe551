"""No sentence that commlens wrote is cut up or searched again: whoever needs a part of it reads the
field that it was made of. What others wrote, such as torch's errors and logs, may be parsed.

A sentence is recognised by the field that holds it, or by the function that made it, also where it
is first given a name. Slices, :func:`re.search` and the like, ``in``, comparisons with a text and
methods such as ``partition`` look into it.
"""

from __future__ import annotations

import ast
import functools

import pytest

from conftest import SOURCE

FIELDS = {
    *("summary", "explanation", "next_step", "would_raise_confidence", "looked_at", "answer"),
    *("phrase", "words", "heading", "text", "message", "note", "stacks_note", "waits_for"),
    *("collective", "short_collective"),
}
"""Fields that hold a sentence, or a part of one."""
LISTS = {"evidence", "missing_evidence", "notes", "problems", "blind", "signs"}
"""Fields that hold several."""
MAKERS = ("_phrase", "_words", "_step", "_sentence")
"""How the names of functions end that make one."""
MORE_MAKERS = {
    *("joined", "capital", "sentence", "ranks_and_verb", "duration", "size", "words", "cells")
}
PARAMETERS = {"phrase", "sentence", "summary", "explanation", "words"}
"""Parameters that are one."""

METHODS = {
    *("partition", "rpartition", "split", "rsplit", "splitlines", "removeprefix", "removesuffix"),
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "replace"),
}
PATTERNS = {"search", "match", "fullmatch", "sub", "subn", "findall", "finditer"}

ALLOWED = {
    "blackbox/rank_log:BoxReader._exception": "the text of the exception is the program's",
    "model/verdict_html:_with_ranks": "prints the line unless the summary names it",
    "reports/terminal:_evidence": "prints no sentence twice",
    "reports/terminal:_with_source": "prints the line unless the summary names it",
    "testing/observation:_add": "the message is pytest's",
    "testing/observer:SuiteObserver._answer": "prints the summary in one line",
    "traces/fields:_cause": "searches for what the user asked for",
}
"""Why a sentence is looked into at these places. None of them decides what is wrong."""


class Finder(ast.NodeVisitor):
    """Finds the places of one module at which sentences are looked into."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []  # the innermost function or class, and the line
        self._within: list[str] = []
        self._names: set[str] = set()  # that stand for a sentence here
        self._lists: set[str] = set()

    # --- what is a sentence

    def _is_sentence(self, node: ast.AST | None) -> bool:
        match node:
            case ast.Attribute(attr=name):
                return name in FIELDS
            case ast.Name(id=name):
                return name in self._names
            case ast.JoinedStr(values=values):
                return any(map(self._is_sentence, values))
            case ast.FormattedValue(value=value):
                return self._is_sentence(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._is_sentence(left) or self._is_sentence(right)
            case ast.BoolOp(values=values):
                return any(map(self._is_sentence, values))
            case ast.IfExp(body=body, orelse=other):
                return self._is_sentence(body) or self._is_sentence(other)
            case ast.Subscript(value=value):
                return self._are_sentences(value)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if (
                name.endswith(MAKERS) or name in MORE_MAKERS
            ):
                return True
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                return isinstance(value, ast.Attribute | ast.Name | ast.Call) and (
                    name in ("strip", "rstrip", "lstrip", "lower", "capitalize", "get")
                    and self._is_sentence(value)
                )
        return False

    def _are_sentences(self, node: ast.AST | None) -> bool:
        match node:
            case ast.Attribute(attr=name):
                return name in LISTS
            case ast.Name(id=name):
                return name in self._lists
            case ast.List(elts=each) | ast.Tuple(elts=each):
                return any(map(self._is_sentence, each))
        return False

    # --- names

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        names, lists = set(self._names), set(self._lists)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        given = {argument.arg for argument in arguments}
        self._names = (self._names - given) | (given & PARAMETERS)
        self._lists = (self._lists - given) | (given & LISTS)
        self._scope(node)
        self._names, self._lists = names, lists

    def _scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _function
    visit_ClassDef = _scope

    def _name(self, target: ast.AST, *, sentence: bool, several: bool = False) -> None:
        if isinstance(target, ast.Name):
            for names, holds in ((self._names, sentence), (self._lists, several)):
                names.add(target.id) if holds else names.discard(target.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            values: list[tuple[ast.AST, ast.AST]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                values = list(zip(target.elts, node.value.elts, strict=False))
            for each, value in values:
                self._name(
                    each, sentence=self._is_sentence(value), several=self._are_sentences(value)
                )

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._name(node.target, sentence=self._is_sentence(node.value))

    def visit_For(self, node: ast.For) -> None:
        self._name(node.target, sentence=self._are_sentences(node.iter))
        self.generic_visit(node)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> None:
        names = set(self._names)
        for each in node.generators:
            self._name(each.target, sentence=self._are_sentences(each.iter))
        self.generic_visit(node)
        self._names = names

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    # --- looking into one

    def _add(self, node: ast.expr) -> None:
        self.found.append((".".join(self._within) or "module", node.lineno))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            cuts = node.func.attr in METHODS and self._is_sentence(node.func.value)
            matches = node.func.attr in PATTERNS and any(map(self._is_sentence, node.args))
            if cuts or matches:
                self._add(node)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for op, left, right in zip(
            node.ops, [node.left, *node.comparators], node.comparators, strict=False
        ):
            searched = isinstance(op, ast.In | ast.NotIn) and self._is_sentence(right)
            compared = self._is_sentence(left) and _is_text(right)
            if searched or compared:
                self._add(node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice) and self._is_sentence(node.value):
            self._add(node)
        self.generic_visit(node)


def _is_text(node: ast.expr) -> bool:
    """Whether it is a text that is not empty, a constant's name, or a choice of these."""
    match node:
        case ast.Constant(value=str() as text):
            return bool(text)
        case ast.Name(id=name):
            return name.isupper()
        case ast.Tuple(elts=each) | ast.Set(elts=each) | ast.List(elts=each):
            return any(map(_is_text, each))
    return False


def places(code: str) -> list[tuple[str, int]]:
    finder = Finder()
    finder.visit(ast.parse(code))
    return finder.found


@functools.cache
def all_places() -> list[tuple[str, int]]:
    return [
        (f"{path.relative_to(SOURCE / 'commlens').with_suffix('')}:{name}", line)
        for path in sorted((SOURCE / "commlens").rglob("*.py"))
        for name, line in places(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param('finding.summary.rpartition("; rank")', id="cut at words"),
        pytest.param('"left no record" in verdict.summary', id="search"),
        pytest.param('text = end.text\nif text.startswith("was "): pass', id="by another name"),
        pytest.param('text = view.exit.text or "ended"\ntext.split()', id="or another text"),
        pytest.param('_NUMBER.sub("#", end.text)', id="regular expression"),
        pytest.param("doing.phrase == DEBUGGED", id="comparison with a constant"),
        pytest.param('ranks_phrase(ranks).capitalize().replace("Rank", "Process")', id="made here"),
        pytest.param('f"{op} at {frame_phrase(frame)}".removesuffix(" at ")', id="f-string"),
        pytest.param('[text for text in coverage.blind if text.startswith("F")]', id="of a list"),
        pytest.param('def f(phrase):\n    first, _, rest = phrase.partition(" ")', id="parameter"),
        pytest.param(
            'at = row.collective\nat = _MEMBERS.sub("", at.replace(" of ", ""))', id="named anew"
        ),
        pytest.param("def f(words):\n    return words[3:]", id="slice"),
        pytest.param(
            'def f(doing):\n    words = activity_words(doing)\n    return words in ("idle",)',
            id="choice",
        ),
    ],
)
def test_looking_into_a_sentence_is_found(code: str) -> None:
    assert places(code)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param('f"{finding.summary}; {names} vanished"', id="put together"),
        pytest.param('frame.file.rpartition("/")', id="not a sentence"),
        pytest.param("finding.evidence[:4]", id="some of several"),
        pytest.param(
            'text = finding.summary\ntext = path.name\ntext.split(".")', id="another value"
        ),
        pytest.param('finding.next_step or "wait"', id="whether there is one"),
        pytest.param('found[f"{name}_total"].split()', id="name made here"),
    ],
)
def test_other_code_is_not_found(code: str) -> None:
    assert not places(code)


def test_no_sentence_of_ours_is_parsed_back() -> None:
    found = [f"{place}, line {line}" for place, line in all_places() if place not in ALLOWED]
    assert not found, "read the field that the sentence was made of: " + "; ".join(found)


def test_what_is_allowed_is_there() -> None:
    assert set(ALLOWED) <= {place for place, _ in all_places()}
