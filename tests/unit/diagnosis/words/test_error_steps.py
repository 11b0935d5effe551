"""What to do after errors whose text decides it."""

from __future__ import annotations

from commlens.diagnosis.words.error_steps import known_step, peer_step


def test_the_step_names_the_address_and_the_number_that_the_error_tells() -> None:
    joined = "torch.distributed.DistStoreError: Timed out after 121 seconds waiting for clients."
    assert "3/4 of the world size joined" in known_step(f"{joined} 3/4 clients joined.")
    lost = "The client socket has timed out after 600000ms while trying to connect to (n0, 29500)."
    assert known_step(lost).endswith("(n0, 29500) does not answer")


def test_the_step_goes_by_what_the_system_says_of_the_stores_address() -> None:
    lost = "The client socket has timed out after 60000ms while trying to connect to (n0, 29500)."
    refused = known_step(f"{lost}\n[Errno 111] Connection refused")
    assert refused.startswith("look at rank 0 or the first node's launcher: (n0, 29500) refuses")
    unknown = known_step(f"{lost}\n(gai error: -2 - Name or service not known)")
    assert unknown.startswith("look up the name in (n0, 29500) on the node that could not")
    assert "give MASTER_ADDR or --rdzv-endpoint a name" in unknown
    of_launcher = known_step(f"RendezvousConnectionError: see below\ncaused by {lost}")
    assert "the first node's launcher runs on the host that --rdzv-endpoint names" in of_launcher
    assert "MASTER_ADDR" not in of_launcher


def test_a_broken_link_is_named_with_the_host_at_its_other_end_if_that_is_known() -> None:
    link = "NET/IB : Got completion from peer 10.1.0.6<41023> with status=12 opcode=0"
    assert "the InfiniBand link to 10.1.0.6 (" in known_step(link)
    assert "the InfiniBand link (" in known_step("NET/IB : Got completion with error 12, opcode 1")


def test_an_error_that_names_a_peers_host_leads_to_that_hosts_output() -> None:
    closed = "socketProgress: Connection closed by remote peer gpu-01<51234>"
    assert peer_step(closed) == "look at the output of the ranks on gpu-01 for the first error"
    assert known_step(closed) == known_step("ValueError: bad sample") == peer_step("bad") == ""
