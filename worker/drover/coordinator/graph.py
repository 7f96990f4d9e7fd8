"""Graph: a list of tensors, and one constructor per operation with its shape rule (docs/protocol.md section 6).

Constructors only describe: no memory is placed and nothing is sent here. An operand that does not fit is a GraphError.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drover.errors import GraphError
from drover.ggml.ops import METADATA_OPS, Glu, Op, Precision, RopeMode, TensorFlag, Unary, pack_params
from drover.ggml.tensor import NO_PARAMS, Shape, Tensor, contiguous_strides, shape
from drover.ggml.types import F16, F32, I32, I64, TensorType


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of a rotary embedding (docs/protocol.md section 6.6); the defaults rotate plainly."""

    dims: int
    mode: RopeMode = RopeMode.NORMAL
    original_context: int = 0
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def packed(self) -> bytes:
        """The operation's parameters."""
        ints = {1: self.dims, 2: self.mode, 4: self.original_context}
        reals = (
            self.freq_base, self.freq_scale, self.ext_factor, self.attn_factor, self.beta_fast, self.beta_slow
        )  # fmt: skip
        return pack_params(ints, dict(enumerate(reals, 5)))


class Graph:
    """Tensors in the order they were made, so operands stand before their users; inputs also by name."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.inputs: dict[str, Tensor] = {}
        self._leaves: dict[tuple[int, int], Tensor] = {}
        self._by_id: dict[int, Tensor] = {}

    @property
    def nodes(self) -> list[Tensor]:
        """The tensors that must be computed, in order."""
        return [tensor for tensor in self.tensors if tensor.op not in METADATA_OPS]

    def count_uses(self) -> None:
        """Fill in `use_count`, by which a worker sees what it may fuse."""
        uses = Counter(source for tensor in self.tensors for source in tensor.src)
        for tensor in self.tensors:
            tensor.use_count = uses[tensor.id]

    def tensor(self, id_: int) -> Tensor:
        """The tensor with this id."""
        return self._by_id[id_]

    # Leaves.

    def input(self, name: str, type_: TensorType, *extents: int) -> Tensor:
        """Memory that is written before every run; the same name gives the same tensor."""
        if name not in self.inputs:
            ne = shape(*extents)
            tensor = Tensor(
                id=0, ne=ne, nb=contiguous_strides(type_, ne), type=type_, flags=TensorFlag.INPUT, name=name
            )
            self.inputs[name] = self._add(tensor)
        return self.inputs[name]

    def leaf(self, placed: Tensor) -> Tensor:
        """A tensor that lives outside the graph: a weight, a KV cache."""
        key = (placed.buffer, placed.data)
        if key not in self._leaves:
            self._leaves[key] = self._add(replace(placed))
        return self._leaves[key]

    # Other names for the same memory.

    def view(self, a: Tensor, ne: Sequence[int], nb: Sequence[int] | None = None, offset: int = 0) -> Tensor:
        """A window that starts `offset` bytes into `a`, with strides of its own."""
        extents = shape(*ne)
        strides = contiguous_strides(a.type, extents) if nb is None else shape(*nb)
        params = pack_params({0: offset & 0xFFFFFFFF, 1: offset >> 32})
        return self._alias(Op.VIEW, a, extents, strides, params, offset)

    def reshape(self, a: Tensor, *extents: int) -> Tensor:
        """The elements of contiguous `a` in another shape."""
        ne = shape(*extents)
        _require(a.contiguous and _count(ne) == a.elements, Op.RESHAPE, a, detail=f"into {ne}")
        return self._alias(Op.RESHAPE, a, ne, contiguous_strides(a.type, ne))

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        """Dimension i of `a` becomes dimension `axes[i]`."""
        _require(sorted(axes) == [0, 1, 2, 3], Op.PERMUTE, a, detail=f"axes {axes}")
        where = [axes.index(i) for i in range(4)]
        ne, nb = shape(*(a.ne[i] for i in where)), shape(*(a.nb[i] for i in where))
        return self._alias(Op.PERMUTE, a, ne, nb, pack_params(dict(enumerate(axes))))

    def transpose(self, a: Tensor) -> Tensor:
        """Rows become columns."""
        ne, nb = a.ne, a.nb
        return self._alias(Op.TRANSPOSE, a, (ne[1], ne[0], ne[2], ne[3]), (nb[1], nb[0], nb[2], nb[3]))

    # Data movement.

    def get_rows(self, a: Tensor, ids: Tensor) -> Tensor:
        """Rows of `a` [n, R] by `ids` I32 [m]: F32 [n, m]."""
        fits = ids.type is I32 and a.ne[2:] == ids.ne[1:3]
        _require(fits, Op.GET_ROWS, a, ids)
        type_ = I32 if a.type is I32 else F32
        return self._node(Op.GET_ROWS, (a, ids), (a.ne[0], ids.ne[0], ids.ne[1], ids.ne[2]), type_)

    def set_rows(self, target: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Write `rows` [n, m] into rows `ids` (I64 [m]) of `target` [n, R], converting; a view of `target`."""
        fits = ids.type in (I64, I32) and rows.ne[0] == target.ne[0] and rows.ne[1] == ids.ne[0]
        _require(fits and rows.ne[2:] == target.ne[2:], Op.SET_ROWS, rows, ids, target)
        return self._alias(Op.SET_ROWS, target, target.ne, target.nb, sources=(rows, ids, target))

    def cpy(self, a: Tensor, target: Tensor) -> Tensor:
        """Write `a` into the memory of `target`, converting; a view of `target`."""
        _require(a.elements == target.elements, Op.CPY, a, target)
        return self._alias(Op.CPY, target, target.ne, target.nb, sources=(a, target))

    def cont(self, a: Tensor, *extents: int) -> Tensor:
        """The elements of `a` without gaps, in another shape if one is given."""
        ne = shape(*extents) if extents else a.ne
        _require(_count(ne) == a.elements, Op.CONT, a, detail=f"into {ne}")
        return self._node(Op.CONT, (a,), ne, a.type)

    # Element by element.

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """`a + b`, with `b` repeated over `a`."""
        return self._elementwise(Op.ADD, a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a * b`, with `b` repeated over `a`."""
        return self._elementwise(Op.MUL, a, b)

    def scale(self, a: Tensor, factor: float, bias: float = 0.0) -> Tensor:
        """`factor * a + bias`."""
        return self._node(Op.SCALE, (a,), a.ne, params=pack_params(floats={0: factor, 1: bias}))

    def unary(self, function: Unary, a: Tensor) -> Tensor:
        """A function of each element."""
        return self._node(Op.UNARY, (a,), a.ne, params=pack_params({0: function}))

    def glu(self, kind: Glu, gate: Tensor, up: Tensor) -> Tensor:
        """A gated unit: a function of `gate`, times `up`."""
        _require(gate.ne == up.ne, Op.GLU, gate, up)
        return self._node(Op.GLU, (gate, up), gate.ne, params=pack_params({0: kind}))

    # Rows.

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        """Each row over its root mean square."""
        return self._node(Op.RMS_NORM, (a,), a.ne, params=pack_params(floats={0: eps}))

    def norm(self, a: Tensor, eps: float) -> Tensor:
        """Each row with mean 0 and variance 1."""
        return self._node(Op.NORM, (a,), a.ne, params=pack_params(floats={0: eps}))

    def soft_max(self, a: Tensor, mask: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0) -> Tensor:
        """Softmax of `scale * a + mask` [C, N, H] over each row; mask F16 or F32 [C, N]."""
        fits = mask is None or (mask.type in (F16, F32) and mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1])
        sources = (a,) if mask is None else (a, mask)
        _require(fits, Op.SOFT_MAX, *sources)
        return self._node(Op.SOFT_MAX, sources, a.ne, params=pack_params(floats={0: scale, 1: max_bias}))

    def rope(self, a: Tensor, positions: Tensor, how: Rope, factors: Tensor | None = None) -> Tensor:
        """Rotate `a` [D, heads, tokens] by its positions I32 [tokens]; frequency factors F32 [dims / 2]."""
        fits = positions.type is I32 and positions.ne[0] == a.ne[2] and how.dims <= a.ne[0] and how.dims % 2 == 0
        fits = fits and (factors is None or (factors.type is F32 and factors.ne[0] >= how.dims // 2))
        sources = (a, positions) if factors is None else (a, positions, factors)
        _require(fits, Op.ROPE, *sources)
        return self._node(Op.ROPE, sources, a.ne, a.type, how.packed())

    # Products.

    def mul_mat(self, a: Tensor, b: Tensor, precision: Precision = Precision.DEFAULT) -> Tensor:
        """`a` [K, N, P, Q] times `b` [K, M, P', Q']: F32 [N, M, P', Q']; `a` is shared by groups of `b`."""
        fits = a.ne[0] == b.ne[0] and b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0
        _require(fits, Op.MUL_MAT, a, b)
        return self._node(Op.MUL_MAT, (a, b), (a.ne[1], b.ne[1], b.ne[2], b.ne[3]), params=pack_params({0: precision}))

    def flash_attn_ext(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attention of `q` [D, N, H] over `k` [D, C, Hk] and `v` [DV, C, Hv], mask F16 [C, N]: F32 [DV, H, N]."""
        fits = q.ne[0] == k.ne[0] and k.ne[1] == v.ne[1] and q.ne[2] % k.ne[2] == 0 and q.ne[2] % v.ne[2] == 0
        fits = fits and mask.type is F16 and mask.contiguous and mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1]
        _require(fits, Op.FLASH_ATTN_EXT, q, k, v, mask)
        params = pack_params({3: Precision.F32}, {0: scale})
        return self._node(Op.FLASH_ATTN_EXT, (q, k, v, mask), (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), params=params)

    # How tensors are made.

    def _elementwise(self, op: Op, a: Tensor, b: Tensor) -> Tensor:
        _require(all(n and m and n % m == 0 for n, m in zip(a.ne, b.ne, strict=True)), op, a, b)
        return self._node(op, (a, b), a.ne, a.type)

    def _node(
        self, op: Op, sources: Sequence[Tensor], ne: Shape, type_: TensorType = F32, params: bytes = NO_PARAMS
    ) -> Tensor:
        src = tuple(source.id for source in sources)
        nb = contiguous_strides(type_, ne)
        return self._add(
            Tensor(id=0, ne=ne, nb=nb, type=type_, op=op, params=params, flags=TensorFlag.COMPUTE, src=src)
        )

    def _alias(
        self,
        op: Op,
        a: Tensor,
        ne: Shape,
        nb: Shape,
        params: bytes = NO_PARAMS,
        offset: int = 0,
        sources: Sequence[Tensor] = (),
    ) -> Tensor:
        """A tensor in the memory of `a`; views of views point at the root, as the wire wants it."""
        return self._add(
            Tensor(
                id=0,
                ne=ne,
                nb=nb,
                type=a.type,
                op=op,
                params=params,
                flags=TensorFlag.COMPUTE,
                src=tuple(source.id for source in sources or (a,)),
                view_src=a.view_src or a.id,
                view_offs=a.view_offs + offset,
            )
        )

    def _add(self, tensor: Tensor) -> Tensor:
        tensor.id = len(self.tensors) + 1
        tensor.name = tensor.name or f"{tensor.op.name.lower()}_{tensor.id}"
        self.tensors.append(tensor)
        self._by_id[tensor.id] = tensor
        return tensor


def _count(ne: Shape) -> int:
    return ne[0] * ne[1] * ne[2] * ne[3]


def _require(fits: bool, op: Op, *operands: Tensor, detail: str = "") -> None:
    if not fits:
        shown = ", ".join(f"{tensor.name} {tensor.type.name}{list(tensor.ne)}" for tensor in operands)
        raise GraphError(f"{op.name} cannot take {shown} {detail}".rstrip())
