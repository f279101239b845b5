"""Calls of the CPU kernels of a mixture of experts."""

from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinyvllm.backends import policies
from tinyvllm.backends.buffers import constant, empty, integers, present, scratch
from tinyvllm.backends.cpu.launch import launch
from tinyvllm.backends.cpu.prepared import MAX_THREADS, prepared_bytes
from tinyvllm.backends.kernel import Constant, Kernel
from tinyvllm.backends.operands import GateClamp, KernelWeight, NormWeights, Routing, RoutingPolicy, packed, packed_parts
from tinyvllm.integers import ceil_div, round_up
from tinyvllm.placement import RankGroup
from tinyvllm.quant.layouts import panel_bytes
from tinyvllm.quant.slices import ColumnShare

_PIECE = 96  # places of a task (kernels/cpu/include/experts.h)
_TILE = 32  # rows that a thread gathers: TILE_ROWS of experts.h


class ExpertKernels:
    """The methods of `CpuBackend` for experts. The weights of all experts are one matrix, one expert's rows after the other's."""

    def norm_route(
        self, variant: str, x: Tensor, norm: NormWeights | None, router: KernelWeight, rows: Tensor, policy: RoutingPolicy,
        bias: Tensor | None = None,
    ) -> Routing:  # fmt: skip
        router = packed(router)
        (T, E), X, C = (int(d) for d in x.shape), policy.experts, policy.chosen
        ins = [x, *present(None if norm is None else norm.weight), router.tensor, *present(bias if policy.bias else None), rows]
        kernel = Kernel.cpu(
            "norm_route", variant, 5 + policy.gated, len(ins), 2 * T * E * X, panel_bytes(router.format, X, E) + 4 * T * (E + X + 4 * C),
            E=E, X=X, C=C, WEIGHT=router.format, RENORMALIZE=int(policy.renormalize), **_norm(norm), **policies.routing(policy),
        )  # fmt: skip
        tasks = min(X, T * C) + T * C // _PIECE
        working = scratch(x, prepared_bytes(router.format, T, E) + 4 * T * round_up(X + policy.gated, 16))
        gates = [empty(x, T, 1)] if policy.gated else []
        outs = [empty(x, T, C), integers(x, T, C), integers(x, T * C), integers(x, 1 + 3 * tasks), *gates, working]
        shares, chosen, order, listed, *gates, _ = launch(kernel, outs, ins)
        return Routing(shares, chosen, (order, listed), gates[0] if gates else None)

    def experts_gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int,
        gelu: bool = False, bias: Tensor | None = None, clamp: GateClamp | None = None,
    ) -> Tensor:  # fmt: skip
        (T, C), E, F = (int(d) for d in routing.chosen.shape), weight.I, weight.O // 2 // experts
        out, parts, pitch = empty(x, T * C, F), packed_parts(weight), policies.bias_pitch(bias)
        for half, part in zip(("BOTH",) if len(parts) == 1 else ("GATE", "UP"), parts, strict=True):
            ins = [x, *present(None if norm is None else norm.weight), part.tensor, *present(bias), *_groups(routing), rows]
            kernel = Kernel.cpu(
                "experts_gate_up_silu", variant, 2, len(ins), 2 * T * C * E * part.O // experts,
                _read_bytes(part.format, part.O, E, experts, T * C) + 4 * T * (E + C * (F + pitch)),
                E=E, F=F, X=experts, C=C, WEIGHT=part.format, HALF=half, **_norm(norm), **policies.gate(gelu, clamp),
                **policies.bias(bias is not None), **policies.row_bias(pitch),
            )  # fmt: skip
            out, _ = launch(kernel, [out, scratch(x, _scratch_bytes(part.format, T, E))], ins)
        return out

    def experts_down(
        self, variant: str, h: Tensor, weight: KernelWeight, routing: Routing, rows: Tensor, experts: int, residual: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        weight = packed(weight)
        share = weight.share if isinstance(weight.share, ColumnShare) else None
        (T, C), E, F = (int(d) for d in routing.chosen.shape), weight.O // experts, weight.I if share is None else share.columns
        outs = [*([empty(h, T, E)] if share is None else []), empty(h, T * C, E), scratch(h, _scratch_bytes(weight.format, T * C, F))]
        shares = [routing.shares] if share is None else []
        ins = [h, weight.tensor, *present(bias), *shares, *_groups(routing), *present(residual), rows]
        kernel = Kernel.cpu(
            "experts_down", variant, len(outs), len(ins), 2 * T * C * E * F,
            _read_bytes(weight.format, weight.O, weight.I, experts, T * C) + 4 * T * (C * F + 2 * C * E + E),
            E=E, F=F, X=experts, C=C, WEIGHT=weight.format, RESIDUAL=int(residual is not None),
            **policies.bias(bias is not None), **policies.slices(share),
        )  # fmt: skip
        return launch(kernel, outs, ins)[0]

    def experts_all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, routing: Routing, rows: Tensor, residual: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        (T, C), E = (int(d) for d in routing.chosen.shape), int(part.shape[1])
        ins = [part, *present(bias), routing.shares, routing.chosen, *present(residual), rows]
        kernel = Kernel.cpu(
            "experts_all_reduce", variant, 2, len(ins), bytes=4 * T * E * (C * (group.world_size + 2) + 2),
            E=E, C=C, WORLD=group.world_size, RANK=group.rank, PLACE=group.place, RESIDUAL=int(residual is not None),
            BIAS=int(bias is not None),
        )  # fmt: skip
        return launch(kernel, [empty(part, T, E), group.memory], ins)[0]

    def list_heads(self, variant: str, T: int, H: int, rows: Tensor) -> Routing:
        count, device = rows.maximum(1), rows.device
        place = Tensor.arange(T * H, dtype=dtypes.int32, device=device)
        order = place % count * H + place // count
        pieces = (count + _PIECE - 1) // _PIECE
        most = H * ceil_div(T, _PIECE)
        task = Tensor.arange(most, dtype=dtypes.int32, device=device)
        first = task % pieces * _PIECE
        listed = Tensor.stack(
            task // pieces, task // pieces * count + first, task // pieces * count + (first + _PIECE).minimum(count), dim=1
        )
        tasks = (pieces * H).cat(listed.reshape(-1)).cast(dtypes.int32).contiguous()
        ones = Tensor.ones(T * H, 1, device=device).contiguous()
        return Routing(ones, (place % H).reshape(T * H, 1).contiguous(), (order.cast(dtypes.int32).contiguous(), tasks))


def _norm(norm: NormWeights | None) -> dict[str, Constant]:
    return {"NORM": "NO_NORM"} if norm is None else {"EPS": constant(norm.eps)}


def _groups(routing: Routing) -> tuple[Tensor, Tensor]:
    assert routing.groups is not None, "limits.py"
    return routing.groups


def _scratch_bytes(format: str, rows: int, I: int) -> int:
    """Scratch for `rows` prepared rows, and for a tile of them for each thread."""
    return prepared_bytes(format, rows, I) + prepared_bytes(format, MAX_THREADS * _TILE, I)


def _read_bytes(format: str, O: int, I: int, experts: int, pairs: int) -> int:
    """At most what is read of a matrix of all experts."""
    return panel_bytes(format, O, I) * min(experts, pairs) // experts
