"""Put what was found into words."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.cycle import FoundCycle, FoundDeparture
from commlens.diagnosis.causes.dead import FoundDead
from commlens.diagnosis.causes.ended import FoundEnded
from commlens.diagnosis.causes.fewer import FoundFewer
from commlens.diagnosis.causes.groups_differ import FoundGroupsDiffer
from commlens.diagnosis.causes.mismatch import FoundMismatch, FoundRace
from commlens.diagnosis.causes.missing import FoundMissing, FoundWorking
from commlens.diagnosis.causes.motionless import FoundMotionless
from commlens.diagnosis.causes.slow import FoundSlow
from commlens.diagnosis.causes.started_twice import FoundStartedTwice
from commlens.diagnosis.causes.stuck_inside import FoundStuckGroups, FoundStuckInside
from commlens.diagnosis.causes.told_by_errors import FoundInErrors
from commlens.diagnosis.causes.unrecorded import FoundUnrecorded
from commlens.diagnosis.causes.unwritten import FoundUnwritten
from commlens.diagnosis.words import (
    cycle,
    dead,
    ended,
    fewer,
    groups_differ,
    mismatch,
    missing,
    motionless,
    slow,
    started_twice,
    stuck_inside,
    told_by_errors,
    unrecorded,
    unwritten,
    working,
)
from commlens.diagnosis.words.finding import finding_of, locate
from commlens.model.verdict import Finding


def describe(context: Context, case: Case) -> Finding:
    """Return the finding of a case."""
    return locate(_finding(context, case), case.op, case.frame)


def _finding(context: Context, case: Case) -> Finding:
    found = case.found
    match found:
        case Finding():
            return found
        case FoundMissing():
            return finding_of(found.cause, missing.words(context, found))
        case FoundWorking():
            return finding_of(found.cause, working.words(context, found))
        case FoundUnrecorded():
            return finding_of(found.cause, unrecorded.words(context, found))
        case FoundStuckInside():
            return finding_of(found.cause, stuck_inside.words(context, found))
        case FoundStuckGroups():
            return finding_of(found.cause, stuck_inside.words_of_groups(context, found))
        case FoundUnwritten():
            return finding_of(found.cause, unwritten.words(context, found))
        case FoundCycle():
            return finding_of(found.cause, cycle.words(context, found))
        case FoundDeparture():
            return finding_of(found.cause, cycle.words_of_departure(context, found))
        case FoundMismatch():
            return finding_of(found.cause, mismatch.words(context, found))
        case FoundRace():
            return finding_of(found.cause, mismatch.words_of_race(context, found))
        case FoundStartedTwice():
            return finding_of(found.cause, started_twice.words(found))
        case FoundSlow():
            return finding_of(found.cause, slow.words(context, found))
        case FoundFewer():
            return finding_of(found.cause, fewer.words(context, found))
        case FoundGroupsDiffer():
            return finding_of(found.cause, groups_differ.words(context, found))
        case FoundMotionless():
            return finding_of(found.cause, motionless.words(found))
        case FoundEnded():
            return finding_of(found.cause, ended.words(context, found))
        case FoundDead():
            return finding_of(found.cause, dead.words(context, found))
        case FoundInErrors():
            return finding_of(found.cause, told_by_errors.words(context, found))
    raise TypeError(f"there are no words for {type(found)}")
