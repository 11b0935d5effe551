"""Words about what else is known of a cause: nodes that have fallen silent, ranks that meet in
``init_process_group``, and collectives of torch.compile's own.
"""

from __future__ import annotations

from commlens.diagnosis.words.finding import Words
from commlens.model.cause import Cause, InitMeeting, StuckInside
from commlens.text import capital, joined, rank_phrase, ranks_and_verb, ranks_phrase


def with_lost_nodes(cause: Cause, words: Words) -> Words:
    """Return a finding's words with its lost nodes, if its cause names any.

    Args:
        cause: the cause, with the nodes.
        words: the finding's words about the ranks.
    """
    nodes = cause.lost_nodes
    if not nodes:
        return words
    hosts = joined(node.host for node in nodes)
    each = joined(f"{node.host} ({ranks_phrase(node.ranks)})" for node in nodes)
    names = f"{'node' if len(nodes) == 1 else 'nodes'} {each}"
    if nodes[0].vanished:
        waits = f"; {words.waits}" if words.waits else ""
        return words._replace(
            summary=f"{names} vanished{waits}",
            explanation=(
                f"The watcher of {hosts} fell silent {min(node.silent_s for node in nodes):.0f} s"
                " ago, when the connections to the ranks there were closed: the processes there"
                " ended, all at once or with the machine."
            ),
            next_step=(
                f"look at the scheduler's log and at dmesg of {hosts}: was the machine lost, or"
                " were all processes there killed?"
            ),
        )
    answers = "answers" if len(nodes) == 1 else "answer"
    return words._replace(
        summary=f"{words.waits or words.summary}; {names} no longer {answers}",
        next_step=(
            f"look at {hosts} and the network: a machine is lost, or the connection to it, or only"
            " commlens's watcher there. If its ranks still run, `commlens dump` there shows what"
            " they do"
        ),
        would_raise_confidence=(
            "Whether the machine, the connection or only commlens's watcher is lost does not show"
            " from here."
        ),
    )


LAUNCHERS_STORE = "the launcher's MASTER_ADDR and MASTER_PORT"
AGENT = (
    "TORCHELASTIC_USE_AGENT_STORE=True, which torchrun sets, makes every rank a client of the"
    " launcher's store, so no rank makes one"
)
KEYS_OF_ITS_OWN = (
    "give each init_process_group keys of its own"
    " (store=torch.distributed.PrefixStore(name, store)), or another init_method"
)
_MAKE_A_STORE = (
    "store=torch.distributed.TCPStore(host, port, world_size, is_master=rank == 0), which makes the"
    " store in rank 0"
)


def with_init_meeting(words: Words, cause: Cause) -> Words:
    """Return the words of a finding with how far the ranks have come in ``init_process_group``."""
    meeting = cause.init
    if meeting is None:
        return words
    if isinstance(cause, StuckInside) and cause.state == "nobody-listens":
        return _nobody_listens(words, meeting)
    evidence = [*words.evidence, _came_sentence(meeting)]
    if meeting.listens is not None:
        who = "A process listens" if meeting.listens else "Nobody listens"
        why = f": {AGENT}" if meeting.agent and not meeting.listens else ""
        evidence.append(f"{who} at {meeting.address}{why}.")
    if not (isinstance(cause, StuckInside) and meeting.again and meeting.listens):
        return words._replace(evidence=evidence)
    evidence.append(
        "These processes called init_process_group before. If they met at the same address, its"
        " store may still have the addresses that the ranks wrote then, under the same keys: a rank"
        " that reads one of them waits for a connection of the earlier group."
    )
    return words._replace(evidence=evidence, next_step=KEYS_OF_ITS_OWN)


def _came_sentence(meeting: InitMeeting) -> str:
    if not meeting.missing:
        return f"All {meeting.size} ranks have come to init_process_group."
    came = f"{len(meeting.came)} of {meeting.size} ranks have come to init_process_group"
    return f"{came}; {ranks_and_verb(meeting.missing, 'has', 'have')} not."


def _nobody_listens(words: Words, meeting: InitMeeting) -> Words:
    maker = rank_phrase(meeting.maker)
    why = AGENT if meeting.agent else f"{maker} is to make the store there, and has not"
    step = (
        f"leave out init_method, so that the ranks meet at {LAUNCHERS_STORE}, or pass"
        f" {_MAKE_A_STORE}"
        if meeting.agent
        else f"look at what {maker} does in init_process_group, or pass {_MAKE_A_STORE}"
    )
    return words._replace(
        summary=(f"all ranks are in init_process_group, and nobody listens at {meeting.address}"),
        explanation=(
            f"{words.explanation} {capital(why)}, and nothing else listens at {meeting.address}. No"
            " rank is to blame."
        ).lstrip(),
        next_step=step,
        evidence=(),
        would_raise_confidence=None,
    )
