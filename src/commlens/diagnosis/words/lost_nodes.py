"""Words about nodes that have fallen silent."""

from __future__ import annotations

from commlens.diagnosis.words.finding import Words
from commlens.model.cause import Cause
from commlens.text import joined, ranks_phrase


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
