"""Projections of a layer: where its modules hold queries, keys, values and neurons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedrot.errors import SymmetryError
from fedrot.symmetry.describe.spaces import Axes, Entry, read
from fedrot.symmetry.groups import Slice, Slot

#: The usual names of the four modules of an attention block.
Q_K_V_OUT = "q_proj k_proj v_proj out_proj"


@dataclass(frozen=True)
class Units:
    """The place of a projection's output units in a module.

    Attributes:
        module: the module with the ``weight`` and, if ``bias``, the ``bias``.
        bias: whether there is a bias, or the name of a parameter with the bias of only
            these units.
        start: the index of the first unit among the module's outputs.
        every: 0 if the units are consecutive. Fused projections that store query, key
            and value of each head together have a stride: head ``h`` begins at output
            ``start + h * every``.
        together: number of consecutive heads at each stride; if above 1, only whole
            heads can be moved.
        conv1d: whether the weight is ``[in, out]``, as in GPT-2.
    """

    module: str
    bias: bool | str = True
    start: int = 0
    every: int = 0
    conv1d: bool = False
    together: int = 1

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"

    @property
    def bias_name(self) -> str:
        """The name of the bias, empty if there is none."""
        if isinstance(self.bias, str):
            return self.bias
        return f"{self.module}.bias" if self.bias else ""

    def written(
        self,
        heads: int,
        dim: int,
        low: int = 0,
        high: int = 0,
        contravariant: bool = False,
        unsigned: bool = False,
    ) -> list[Slot]:
        """Return the rows of the weight, then the entries of the bias.

        The slots are the units from ``low`` to ``high`` (``dim`` if 0) of each of
        ``heads`` heads of ``dim`` units.

        Raises:
            SymmetryError: only some units of each head are selected, but ``together``
                is above 1.
        """
        high = high or dim
        if self.together > 1 and high - low < dim:
            raise SymmetryError(
                f"The module '{self.module}' stores {self.together} heads side by "
                "side. A part of each head (partial rotary positions) is not supported "
                "there."
            )
        blocks = (dim, low, high) if high - low < dim else ()
        rows = Slice(self.start, self.start + heads * dim, *blocks)
        if self.every:
            stop = heads // self.together * self.every
            end = self.start + (self.together - 1) * dim + high
            rows = Slice(0, stop, self.every, self.start + low, end)
        axis = 1 if self.conv1d else 0
        weight = Slot(self.weight, axis, rows, contravariant, unsigned)
        if not self.bias:
            return [weight]
        if isinstance(self.bias, str):
            # A parameter of its own holds these units alone.
            rows = Slice(0, heads * dim, *blocks)
        return [weight, replace(weight, tensor=self.bias_name, axis=0, slice=rows)]

    def read(self, size: int) -> Slot:
        """Return the slot of the module's ``size`` inputs."""
        axis = 0 if self.conv1d else 1
        return Slot(self.weight, axis, Slice(0, size), contravariant=True)

    def between(self, out: Entry, into: Entry) -> Axes:
        """Return the axes of the module, which reads ``into`` and writes ``out``."""
        entry = read(into)
        weight = (entry, out) if self.conv1d else (out, entry)
        bias = {self.bias_name: (out,)} if self.bias else {}
        return {self.weight: weight, **bias}


def units(
    prefix: str, names: str, bias: bool = True, conv1d: bool = False
) -> Iterator[Units]:
    """Yield the units of whole modules, by their names after a prefix: ``fc1 fc2``."""
    for name in names.split():
        yield Units(prefix + name, bias, conv1d=conv1d)


@dataclass(frozen=True)
class Heads:
    """The heads of an attention block.

    Attributes:
        count: query heads.
        dim: units of each head.
        keys: key and value heads, each shared by ``count / keys`` consecutive query
            heads; 0 means ``count``.
        rotary: number of units at the start of each head that rotary positions rotate.
        normed: whether queries and keys pass a norm with gains before the rotary
            positions.
        interleaved: whether a rotary frequency rotates units ``2 f`` and ``2 f + 1``
            (GPT-J), instead of ``f`` and ``f + rotary / 2``.
        ordered: whether heads must keep their order, because each has its own constant
            (ALiBi slopes).
    """

    count: int
    dim: int
    keys: int = 0
    rotary: int = 0
    normed: bool = False
    interleaved: bool = False
    ordered: bool = False

    @property
    def key_count(self) -> int:
        """The number of key and value heads."""
        return self.keys or self.count

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        count: str = "num_attention_heads",
        width: str = "hidden_size",
    ) -> Heads:
        """Return heads of ``width / count`` units, by the configuration's keys."""
        return cls(config[count], config[width] // config[count])


@dataclass(frozen=True)
class Projections:
    """The projections of an attention block.

    Attributes:
        queries: further projections into the queries' coordinates (of relative
            positions).
        keys: further projections into the keys' coordinates.
        key_bias_seen: whether the bias of ``key`` adds different numbers to the scores
            of one softmax, because positions have queries. Biases under rotary
            positions are handled separately.
    """

    query: Units
    key: Units
    value: Units
    output: Units
    queries: tuple[Units, ...] = ()
    keys: tuple[Units, ...] = ()
    key_bias_seen: bool = False

    @classmethod
    def separate(
        cls,
        p: str,
        names: str,
        bias: bool = True,
        output_bias: bool | None = None,
    ) -> Projections:
        """Return projections that are separate modules.

        Args:
            p: the prefix of the modules.
            names: of the modules for query, key, value and output.
            bias: whether query, key and value have biases.
            output_bias: whether the output has a bias; ``bias`` if None.
        """
        query, key, value, output = units(p, names, bias)
        if output_bias is not None:
            output = replace(output, bias=output_bias)
        return cls(query, key, value, output)

    @classmethod
    def fused(
        cls,
        module: str,
        heads: Heads,
        output: Units,
        bias: bool = True,
        by_head: bool = False,
    ) -> Projections:
        """Return projections with query, key and value in one module.

        Args:
            output: the output projection; ``module`` has its layout (``conv1d``).
            by_head: whether the module stores the queries of a key head together with
                their key and value (GPT-NeoX, Falcon); if False, all queries are first,
                then all keys, then all values.
        """
        shared = heads.count // heads.key_count
        queries = shared if by_head else heads.count
        keys = 1 if by_head else heads.key_count
        starts = (0, queries * heads.dim, (queries + keys) * heads.dim)
        every = (shared + 2) * heads.dim if by_head else 0
        query, key, value = (
            Units(module, bias, start, every, output.conv1d) for start in starts
        )
        if by_head:
            query = replace(query, together=shared)
        return cls(query, key, value, output)

    @classmethod
    def query_key_value(cls, p: str, heads: Heads, bias: bool = True) -> Projections:
        """Return Megatron's two modules: ``query_key_value`` by head, and ``dense``."""
        output = Units(f"{p}dense", bias)
        return cls.fused(f"{p}query_key_value", heads, output, bias, by_head=True)
