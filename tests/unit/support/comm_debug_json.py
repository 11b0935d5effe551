"""Makes JSON as PyTorch's CommDebugMode writes it."""

from __future__ import annotations

AR, AG = "c10d_functional.all_reduce", "c10d_functional.all_gather_into_tensor"

ADDMM: dict[str, object] = {
    "name": "aten.addmm.default",
    "input_shape": ["torch.Size([16])", "torch.Size([8, 10])"],
    "input_sharding": ["(Shard(dim=0),)", "(Replicate(),)"],
    "device_mesh": "DeviceMesh((4,))",
    "is_bw": False,
}


def module(
    fqn: str,
    *children: object,
    forward: object = (),
    backward: object = (),
    ops: object = (),
    recomputed: object = (),
) -> dict[str, object]:
    """A module with its collectives as pairs of name and count."""
    return {
        "fqn": fqn,
        "module_type": "class 'torch.nn.modules.linear.Linear'",
        "parameters": [["weight", "(Shard(dim=0),)"]],
        "children": list(children),
        "collectives_forward": list(forward),
        "collectives_backward": list(backward),
        "operations_forward": list(ops),
        "operations_backward": [],
        "operations_checkpointing": list(recomputed),
    }
