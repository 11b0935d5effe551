"""Plausible stacks: what Python looks like above a collective of a training program."""

from __future__ import annotations

from functools import cache

from dumpgen.pickler import Frame
from dumpgen.program import Op

_TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
_MODEL = "/workspace/train/model/transformer.py"
_PIPELINE = "/workspace/train/parallel/schedule.py"
_TRAIN = "/workspace/train/train.py"

_API = {
    "_all_gather_base": ("all_gather_into_tensor", 4002),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 4519),
    "all_to_all": ("all_to_all_single", 4662),
    "all_reduce": ("all_reduce", 2950),
    "send": ("isend", 2381),
    "recv": ("irecv", 2428),
    "coalesced": ("batch_isend_irecv", 2700),
}
_USER: dict[str, tuple[tuple[str, str, int], ...]] = {
    "attention_forward": (
        ("gather", _MODEL, 88),
        ("forward", _MODEL, 141),
        ("forward", _MODEL, 233),
    ),
    "experts_forward": (
        ("dispatch", _MODEL, 310),
        ("forward", _MODEL, 352),
        ("forward", _MODEL, 236),
    ),
    "mlp_forward": (("scatter", _MODEL, 97), ("forward", _MODEL, 188), ("forward", _MODEL, 238)),
    "attention_backward": (("backward", _MODEL, 121),),
    "experts_backward": (("backward", _MODEL, 335),),
    "mlp_backward": (("backward", _MODEL, 109),),
    "gather_weights": (
        ("unshard", f"{_TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 291),
    ),
    "reduce_gradients": (
        ("post_backward", f"{_TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 420),
    ),
    "clip_gradients": (("clip_gradients", _TRAIN, 171),),
    "reduce_embedding": (("finish_gradients", _TRAIN, 160),),
    "average_loss": (("average_loss", _TRAIN, 190),),
}


@cache
def frames_of(op: Op) -> tuple[Frame, ...]:
    """Innermost first, 15 of them."""
    api, line = _API[op.name]
    frames: list[Frame] = [
        (api, f"{_TORCH}/distributed/distributed_c10d.py", line),
        ("wrapper", f"{_TORCH}/distributed/c10d_logger.py", 81),
    ]
    frames += _USER.get(op.site, ((op.site, _PIPELINE, 60 + 7 * len(op.site)),))
    modules = [
        ("_call_impl", f"{_TORCH}/nn/modules/module.py", 1790),
        ("_wrapped_call_impl", f"{_TORCH}/nn/modules/module.py", 1779),
    ]
    if "forward" in op.site and "recv" not in op.site and "send" not in op.site:
        frames += [*modules, ("forward", _MODEL, 402), *modules, ("forward_step", _PIPELINE, 204)]
    elif "backward" in op.site and "recv" not in op.site and "send" not in op.site:
        frames += [
            ("apply", f"{_TORCH}/autograd/function.py", 311),
            ("backward", f"{_TORCH}/autograd/__init__.py", 354),
        ]
        frames += [("backward", f"{_TORCH}/_tensor.py", 625), ("backward_step", _PIPELINE, 231)]
    if op.site not in ("clip_gradients", "average_loss", "reduce_embedding"):
        frames += [
            ("one_forward_one_backward", _PIPELINE, 318),
            ("forward_backward", _PIPELINE, 371),
        ]
    frames += [
        ("train_step", _TRAIN, 214),
        ("train", _TRAIN, 262),
        ("main", _TRAIN, 301),
        ("<module>", _TRAIN, 318),
    ]
    return tuple(frames[:15])
