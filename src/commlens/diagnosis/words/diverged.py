"""Words about tensors that ranks must have alike, and do not: "rank 2's layers.0.weight differs
from ranks 0-1,3 (first seen at step 100, equal at step 90)".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from commlens.diagnosis.words.finding import Words, finding_of
from commlens.model.cause import (
    Departure,
    Diverged,
    DivergedDoubt,
    DivergedTensor,
    OpSide,
    TensorKind,
    TensorSide,
)
from commlens.model.numbers import StepsCompared
from commlens.model.verdict import Finding, Verdict
from commlens.text import capital, count, joined, rank_phrase, ranks_and_verb, ranks_phrase

_SHOWN: Final = 5  # tensors in the evidence
_NAMES: Final = 8
_ARGUMENTS: Final = 3
_KIND_NAMES: Final = {
    "parameter": "parameter",
    "gradient": "gradient",
    "optimizer-state": "optimizer state",
    "hyperparameter": "hyperparameters",
}

_DOUBTS: Final[Mapping[DivergedDoubt, str]] = {
    "which-is-right": "Nothing tells which of these ranks should have other data.",
    "first-unseen": "commlens did not watch the place where NaN first appeared.",
    "on-all": "All ranks have it, so none of them is blamed.",
    "no-majority": "The ranks differ, and no majority of them agrees.",
    "others-changed": "No majority agrees, so the ranks whose value did not change are blamed.",
    "inferred": "commlens infers that they must agree: they did in earlier checks.",
}


def verdict_of(cause: Diverged) -> Verdict:
    """Return the verdict on tensors that ranks have differently."""
    ranks = count(len(cause.ranks), "rank")
    tensors = f", {count(cause.compared, 'tensor')}" if cause.compared else ""
    looked_at = f"{ranks}{tensors}, while the job runs"
    if cause.ops:
        looked_at = f"{ranks}, {count(cause.compared, 'op')} of step {cause.step}"
    return Verdict.from_findings([finding(cause)], looked_at=looked_at)


def finding(cause: Diverged) -> Finding:
    """Return the finding of tensors that ranks have differently."""
    return finding_of(cause, words(cause))


def no_difference(ranks: int, tensors: int) -> Verdict:
    """Return the verdict of a check that found no difference."""
    return Verdict(
        kind="healthy",
        summary=(
            f"{count(tensors, 'tensor')} agree on {count(ranks, 'rank')}"
            if tensors
            else "no tensor is held by several ranks: there is nothing to compare"
        ),
        looked_at=f"{count(ranks, 'rank')}, {count(tensors, 'tensor')}",
    )


def steps_compared(done: StepsCompared) -> str:
    """Return what is said at the end of a job of the steps that were compared."""
    steps = [str(step) for step in done.steps]
    if done.checks > len(steps):
        steps.insert(-1, "...")
    what = count(done.tensors, "tensor") if done.tensors else "no tensor that several ranks hold"
    return (
        f"compared {what} on {count(done.ranks, 'rank')} after step{'s' * (done.checks > 1)}"
        f" {', '.join(steps)}: "
        + (
            f"a difference was found at step {done.differs_at}"
            if done.differs_at
            else "no difference was found"
        )
    )


def other_ops(step: int, sides: Sequence[OpSide]) -> str:
    """Return what is said of ranks that run different ops, though no values have parted."""
    ran = "; ".join(f"{ranks_phrase(side.ranks)}: {_op(side)}" for side in sides)
    return (
        f"in step {step}, the ranks' sequences of ops differ from this op on: {ran}. That alone is"
        " no fault: each op is compared with those that had the same inputs."
    )


def words(cause: Diverged) -> Words:
    """Return what a finding says about tensors that ranks have differently."""
    sentences = _SENTENCES[cause.departure]
    return Words(
        summary=_summary(cause),
        explanation=" ".join(filter(None, (_extent(cause), sentences.explanation(cause)))),
        next_step=sentences.next_step(cause),
        evidence=[_evidence(each) for each in cause.tensors[:_SHOWN]],
        would_raise_confidence=cause.doubt and _DOUBTS[cause.doubt],
    )


# --- the summary


def _summary(cause: Diverged) -> str:
    when = _when_phrase(cause)
    if cause.departure == "same-data":
        same = joined(ranks_phrase(side.ranks) for side in cause.tensors[0].sides)
        name = "the same batch" if cause.why == "same-batch" else f"the same {_subject(cause)}"
        return f"{same} have {name} {when}"
    if cause.departure == "not-finite":
        where = ranks_phrase(cause.culprits) if cause.culprits else "all ranks"
        if cause.tensors:
            return f"{_subject(cause)} of {where} has NaN {when}"
        what = f"the output of {cause.module}" if cause.module else f"the input of {cause.op}"
        return f"NaN came up on {where} at step {cause.step}, first in {what}"
    if cause.departure == "other-tensors":
        own = cause.only_on[0]
        return f"only {ranks_and_verb(own.ranks, 'has', 'have')} {_listed(own.names)} {when}"
    if cause.departure == "other-order":
        return _summary_of_order(cause)
    if not cause.culprits:
        first = cause.tensors[0]
        between = [
            f"between {joined(ranks_phrase(side.ranks) for side in tensor.sides)}"
            for tensor in cause.tensors
            if (tensor.kind, tensor.name) == (first.kind, first.name)
        ]
        return f"{_subject(cause)} differs {joined(between)} {when}"
    others = ranks_phrase(cause.victims)
    if len(cause.culprits) == 1:
        return f"{rank_phrase(cause.culprits[0])}'s {_subject(cause)} differs from {others} {when}"
    return f"{_subject(cause)} of {ranks_phrase(cause.culprits)} differs from {others} {when}"


def _summary_of_order(cause: Diverged) -> str:
    one, many, what = (
        ("runs", "run", "modules")
        if cause.tensors[0].kind == "module"
        else ("registers", "register", "parameters")
    )
    return (
        f"{ranks_and_verb(_suspects(cause), one, many)} {what}"
        f" in another order{'' if cause.culprits else ' than one another'}, from"
        f" {cause.tensors[0].name} on"
    )


def _step_phrase(cause: Diverged) -> str:
    """Return the step in which values part, and the op after which they do."""
    if cause.why == "op-output":  # the subject names the op
        return f"in step {cause.step}"
    # the op of a minority, if one ran any: that of most ranks comes first, and is probably right
    ran = next(side for side in (*cause.ops[1:], cause.ops[0]) if side.op is not None)
    return f"after {_op(ran)} in step {cause.step}"


def _op(side: OpSide) -> str:
    """Return an op and its place."""
    if not side.op:
        return "no op" if side.op is None else "a change that no op of torch made"
    part = "the backward pass of " if side.backward else ""
    module = f" in {part}{side.module}" if side.module else ""
    return f"{side.op}{module}{f' at {side.source}' if side.source else ''}"


def _suspects(cause: Diverged) -> list[int]:
    """Return the ranks to look at: those to blame, or all of them."""
    return cause.culprits or cause.ranks


def _subject(cause: Diverged) -> str:
    if cause.why == "op-output":
        return f"output of {_op(cause.ops[0])}"
    return _title(cause.tensors[0])


def _title(tensor: DivergedTensor) -> str:
    if tensor.kind == "collective-output":
        return f"output of {tensor.name}{f' at {tensor.source}' if tensor.source else ''}"
    if tensor.kind == "rng":
        return f"state of {tensor.name}"
    return f"gradient of {tensor.name}" if tensor.kind == "gradient" else tensor.name


def _when_phrase(cause: Diverged) -> str:
    if cause.ops:
        return _step_phrase(cause)
    if cause.source == "batch":
        return f"at step {cause.step}"
    if not cause.source.startswith("optimizer"):
        return f"in {cause.source}" if cause.step == 1 else f"in {cause.source}, call {cause.step}"
    optimizer = f" of {cause.source}" if cause.source != "optimizer 1" else ""
    if cause.equal_at is None:
        return f"at step {cause.step}{optimizer}"
    before = "not" if cause.departure == "not-finite" else "equal"
    return f"(first seen at step {cause.step}{optimizer}, {before} at step {cause.equal_at})"


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES
    return joined(names[:_NAMES] + ([f"{more} more"] if more > 0 else []))


# --- the explanation


def _extent(cause: Diverged) -> str:
    """Return how many tensors differ, and which other kinds of the first one do."""
    if cause.ops or cause.departure in ("same-data", "not-finite", "other-order"):
        return ""
    if not cause.differing:
        return ""
    one = cause.differing == 1
    whose = "its" if one else "the first one's"
    unequal = [_KIND_NAMES[kind] for kind in cause.unequal_kinds]
    equal = [_KIND_NAMES[kind] for kind in cause.equal_kinds]
    return "".join(
        (
            f"{cause.differing} of {count(cause.compared, 'tensor')}",
            " differs" if one else " differ",
            f", and {whose} {joined(unequal)} with it" if unequal else "",
            f"; {whose} {joined(equal)} {'is' if len(equal) == 1 else 'are'} equal"
            if equal
            else "",
            ".",
        )
    )


def _hyperparameters(cause: Diverged) -> str:
    tensor = cause.tensors[0]
    values = [
        f"{value} on {ranks_phrase(side.ranks)}"
        for side in tensor.sides
        if (value := _number(side))
    ]
    return f"{tensor.name} is {joined(values)}." if len(values) > 1 else ""


def _number(side: TensorSide) -> str:
    """Return the value of a hyperparameter, which is the mean of its only element; empty if it is
    not finite.
    """
    return f"{side.mean:g}" if side.mean is not None else ""


def _distance(cause: Diverged) -> str:
    one, other = (side.norm or 0.0 for side in cause.tensors[0].sides[:2])
    return (
        f"The values are close: the norm of {cause.tensors[0].name} is {one:.9g} and {other:.9g}."
    )


def _previous_collective(cause: Diverged) -> str:
    """Return a sentence about the last collective before the op."""
    after = next((side.after for side in cause.ops if side.after), None)
    return f" The last collective before it was {after}." if after else ""


def _other_ops(cause: Diverged) -> str:
    ran = "; ".join(f"{ranks_phrase(side.ranks)}: {_op(side)}" for side in cause.ops)
    return f"The next change of {cause.tensors[0].name} is another one on these ranks: {ran}." + (
        _previous_collective(cause)
    )


def _other_arguments(cause: Diverged) -> str:
    columns = list(zip(*(side.arguments for side in cause.ops), strict=False))
    differing = [each for each in columns if len(set(each)) > 1][:_ARGUMENTS]
    sides = [ranks_phrase(side.ranks) for side in cause.ops]
    texts = [
        ", ".join(f"{value} on {side}" for value, side in zip(values, sides, strict=True))
        for values in differing
    ]
    return (
        f"It was called with different arguments: {'; '.join(texts)}.{_previous_collective(cause)}"
    )


def _other_inputs(cause: Diverged) -> str:
    made = "; ".join(
        f"on {ranks_phrase(side.ranks)} "
        + (f"it comes from {_op(side)}" if side.op else "a part of it was changed later")
        for side in cause.origins
    )
    by = f" {capital(made)}." if any(side.op for side in cause.origins) else ""
    return f"One of its inputs differed already.{by}{_previous_collective(cause)}"


def _always(text: str) -> Callable[[Diverged], str]:
    return lambda _: text


class _Sentences(NamedTuple):
    """The words of a departure: the explanation, and what to do next."""

    explanation: Callable[[Diverged], str]
    next_step: Callable[[Diverged], str]


_SENTENCES: Final[Mapping[Departure, _Sentences]] = {
    "not-broadcast": _Sentences(
        _always(
            "It differs in the first check: the ranks did not start from the same values, or did"
            " not load the same checkpoint."
        ),
        _always(
            "broadcast the values after they are made or loaded, or load the checkpoint on all"
            " ranks"
        ),
    ),
    "other-outputs": _Sentences(
        _always(
            "A collective gives all ranks of its group the same bytes. Here they differ as soon as"
            " it is done: they were damaged on the way or in memory, or something else writes to"
            " this tensor."
        ),
        lambda cause: (
            "look for code that writes to this tensor while the collective runs; if there is none,"
            f" test the memory and the network of {ranks_phrase(_suspects(cause))}"
        ),
    ),
    "other-gradients": _Sentences(
        _always("The ranks update their parameters with different gradients."),
        _always(
            "look for a reduction that these ranks left out: no_sync(), a gradient hook, a"
            " parameter that DDP ignores"
        ),
    ),
    "other-hyperparameters": _Sentences(
        _hyperparameters,
        _always(
            "set the optimizer and its scheduler up alike on all ranks, also when a job resumes"
        ),
    ),
    "one-bit": _Sentences(
        lambda cause: (
            f"Only one bit differs: bit {cause.tensors[0].bit} of element"
            f" {cause.tensors[0].element}. Programs do not change a single bit; failing hardware"
            " does."
        ),
        lambda cause: (
            f"test the memory of {ranks_phrase(_suspects(cause))}, and resume from a"
            " checkpoint before this step"
        ),
    ),
    "one-element": _Sentences(
        lambda cause: f"Only element {cause.tensors[0].element} differs, in more than one bit.",
        lambda cause: (
            f"look for code that writes to single elements of {cause.tensors[0].name} on"
            f" {ranks_phrase(_suspects(cause))} only; to see the step, compare after each one:"
            ' --check-numbers="every 1 step"'
        ),
    ),
    "not-updated": _Sentences(
        lambda cause: (
            f"On {ranks_phrase(_suspects(cause))} the value is still that of step {cause.equal_at};"
            " on the others it has changed."
        ),
        _always("look for the code that changes it on some ranks only"),
    ),
    "other-random-numbers": _Sentences(
        lambda cause: (
            "Tensor parallel ranks that compute the same activations drop different elements of"
            " them."
            if cause.tensors[0].kind == "rng"
            else "The random number generators of these ranks differ, too: dropout drops different"
            " elements on each of them."
        ),
        lambda cause: (
            "look for code that draws random numbers on some of these ranks only, and give it a"
            " generator of its own"
            if cause.tensors[0].kind == "rng"
            else "seed these ranks alike"
        ),
    ),
    "other-order": _Sentences(
        lambda cause: (
            "FSDP gathers the parameters of the modules in the order in which they run: these ranks"
            " compute with the parameters of other modules."
            if cause.tensors[0].kind == "module"
            else "DDP pairs parameters by position, not by name: it averages the gradients of"
            " different parameters."
        ),
        lambda cause: (
            "run the modules in the same order on all ranks"
            if cause.tensors[0].kind == "module"
            else "register the modules in the same order on all ranks: do not iterate over a set"
        ),
    ),
    "other-tensors": _Sentences(
        lambda cause: " ".join(
            f"Only {ranks_phrase(own.ranks)}: {_listed(own.names)}."
            for own in cause.only_on[:_SHOWN]
        ),
        _always("build the same model on all ranks"),
    ),
    "rounding": _Sentences(
        _distance,
        _always(
            "reduce the gradient over these ranks, or make the kernels deterministic; to allow for"
            " noise, use --check-numbers=tolerance=1e-6"
        ),
    ),
    "same-data": _Sentences(
        _always("They train on the same data and count it twice."),
        _always("give each rank its own part: DistributedSampler, or another seed or shard"),
    ),
    "not-finite": _Sentences(
        _always("NaN reaches all ranks with the next reduction."),
        lambda cause: (
            "run again with --check-numbers=nan, which names the rank and the module that had it"
            " first"
            if cause.tensors
            else f"look at the data of {ranks_phrase(_suspects(cause))} in this step, and"
            " at what this module computes"
        ),
    ),
    "other-result": _Sentences(
        lambda cause: (
            "It had the same inputs on all of these ranks, and gave other outputs."
            f"{_previous_collective(cause)}"
        ),
        lambda cause: (
            "run the same step again: if it happens again with the same rank, test that machine;"
            " otherwise compare its processor, number of threads and versions of libraries with"
            f" those of {ranks_phrase(cause.victims or cause.ranks)}"
        ),
    ),
    "other-op": _Sentences(
        _other_ops,
        _always("look at the condition under which this line runs on some ranks only"),
    ),
    "other-arguments": _Sentences(
        _other_arguments,
        _always("find out where this number comes from on each of the ranks"),
    ),
    "other-inputs": _Sentences(
        _other_inputs,
        _always(
            "look at the op that made this input, and whether a collective should have made it"
            " equal"
        ),
    ),
    "changed-outside": _Sentences(
        lambda cause: (
            f"{cause.tensors[0].name} changed between two ops.{_previous_collective(cause)}"
        ),
        lambda cause: (
            "look for code that writes to it without torch, such as NumPy or a kernel of your own;"
            f" if there is none, test the memory of {ranks_phrase(_suspects(cause))}"
        ),
    ),
    "unclear": _Sentences(
        _always(""),
        lambda cause: (
            "look at the code that changes it between these two steps"
            if cause.equal_at is not None
            else "look at what it is computed from on each of these ranks"
        ),
    ),
}


# --- the evidence


def _evidence(tensor: DivergedTensor) -> str:
    sides = "; ".join(_side(side, tensor.kind) for side in tensor.sides)
    return f"{_title(tensor)}: {sides}."


def _side(side: TensorSide, kind: TensorKind) -> str:
    facts = [f"hash {side.digest}"]
    if side.nans or side.infs:
        facts.append(f"{side.nans} NaN, {side.infs} infinite")
    elif kind == "hyperparameter":
        facts.append(f"value {_number(side)}")
    elif side.norm is not None and side.mean is not None:
        facts.append(f"norm {side.norm:.9g}")
        facts.append(f"mean {side.mean:.3g}")
    return f"{ranks_phrase(side.ranks)} {', '.join(facts)}"
