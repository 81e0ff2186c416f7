"""The interface of every workload, what kinds of workloads have in common, and FLOPs, block by block.

Only matrix products, convolutions and attention count; their backward costs twice the forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.settings.values import unit_sizes
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.shape import WorkloadError, error_text, make_shape
from fsdpbench.workloads.tensor_plan import Product

if TYPE_CHECKING:  # torch's import takes most of a second, which commands that plan do without
    import torch
    from torch import nn

    from fsdpbench.workloads.inputs import Batch, Feed

TRAINING_BYTES = 16
"""Bytes of a parameter trained in float32 by AdamW: weight, gradient and two moments, four bytes each."""
S = TypeVar("S")


@dataclass(frozen=True)
class Flops:
    """Floating point operations of one forward and backward pass of one rank's microbatch.

    `model` is what MFU counts (forward + 2 x backward, no recomputation), `hardware` what HFU counts
    (`model` + what activation checkpointing computes again).
    """

    model: int
    hardware: int


@dataclass(frozen=True)
class BlockFlops:
    """The forward pass of one block that checkpointing applies to or not.

    Fields: `products`: of each product with weights, in the order in which they run; `attention`: products
    of activations with each other; `ends_needed`: backward needs what the last product gave (a norm or
    dropout follows it), so a recomputation has to make it again; `batched`: products with the weights of
    several experts at the same time, which checkpointing by operator keeps, as it keeps attention's; `empty`:
    of these, what is computed for places of buffers that hold no row.
    """

    products: tuple[int, ...]
    attention: int = 0
    ends_needed: bool = False
    batched: int = 0
    empty: int = 0

    @property
    def total(self) -> int:
        """Return the FLOPs of the whole block."""
        return sum(self.products) + self.attention + self.batched

    def recomputed(self, checkpointing: ActivationCheckpointing, in_full: bool) -> int:
        """Return the FLOPs that a checkpointed block computes again; `in_full`: also those of no use."""
        again = sum(
            flops for index, flops in enumerate(self.products) if not checkpointing.keeps_product(index)
        )
        last = len(self.products) - 1
        if not (in_full or self.ends_needed or checkpointing.keeps_product(last)):
            again -= self.products[last]
        return again if checkpointing.by_operator else again + self.attention + self.batched


@dataclass(frozen=True)
class ForwardFlops:
    """A model's forward pass over one microbatch.

    Fields: `stacks`: the blocks, in stacks that checkpointing counts one by one; `rest`: what is outside of
    them; `first`: of all, products whose input needs no gradient; `frozen`: products whose weight needs none;
    `empty`: forward and backward of places of experts' buffers that hold no row, which no model needs;
    `head`: of `rest`, the product that gives a token model's logits.
    """

    stacks: Sequence[Sequence[BlockFlops]]
    rest: int
    first: int = 0
    frozen: int = 0
    empty: int = 0
    head: int = 0

    def training(self, checkpointing: ActivationCheckpointing, in_full: bool = False) -> Flops:
        """Return the FLOPs of forward and backward. `in_full`: checkpoints recompute also what backward does
        not need, as they did before torch 2.1, and as formulas for HFU have it."""
        forward = sum(block.total for stack in self.stacks for block in stack) + self.rest
        computed = 3 * forward - self.first - self.frozen
        again = self.head if checkpointing.head else 0
        for stack in self.stacks:
            again += sum(
                block.recomputed(checkpointing.of_block(index), in_full)
                for index, block in enumerate(stack)
                if checkpointing.applies_to(index)
            )
            checkpointing = checkpointing.after(len(stack))
        return Flops(model=computed - self.empty, hardware=computed + again)


class Workload(ABC):
    """A model of one family in one shape: how to build it, feed it and count its work.

    The module that `build` returns is called as `module(*batch) -> scalar loss`, or without the last tensor
    of the batch, the targets, as `module(*inputs) -> predictions`.

    `seq` is the number of tokens a sample. Models that do not work on sequences have none: their
    `default_seq` is None, and so is every `seq` that they take.
    """

    name: str
    family: str
    library_config: Mapping[str, Any] | None = None
    """The content of the Hugging Face file that it came from, where that was kept (`library_model.py`)."""
    is_convolutional: ClassVar[bool] = False
    """Its products are convolutions, which torch rounds to TF32 by other rules than matrix products."""

    @property
    def is_causal(self) -> bool:
        """Return whether each token attends to the tokens before it and to no other."""
        return False

    @property
    @abstractmethod
    def shape(self) -> dict[str, ShapeValue]:
        """Return all fields of the shape as plain values, defaults included."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Return the number of parameters at `default_seq`, tied ones once; by formula, nothing is built."""

    @property
    def training_state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and AdamW's state in float32, without activations."""
        return TRAINING_BYTES * self.parameters

    @property
    @abstractmethod
    def default_seq(self) -> int | None:
        """Return the tokens a sample where the user names no length; None for models without sequences."""

    @property
    @abstractmethod
    def block_classes(self) -> tuple[type[nn.Module], ...]:
        """Return the module classes that are one FSDP unit each under `wrap=block`."""

    @abstractmethod
    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> nn.Module:
        """Return the module, on the current default device (`with torch.device(...)`).

        Every submodule that owns parameters has a `reset_parameters()`, so a module built on `meta` can be
        materialised and initialised later. The caller seeds torch's generator.

        Raises:
            WorkloadError: `activation_checkpointing` or `seq` is not possible.
        """

    def batches(
        self,
        batch: int,
        seq: int | None,
        seed: int,
        rank: int,
        device: torch.device | str,
        data: Path | None = None,
        *,
        world_size: int | None = None,
    ) -> Iterator[Batch]:
        """Yield microbatches of one rank without end, each on `device`; equal for equal arguments.

        Without `data` they are synthetic. With `data` each rank reads its own share of it, which takes
        `world_size` (may be left out for rank 0 alone).

        Raises:
            DataError: the data is missing, unreadable or too small.
            WorkloadError: `batch`, `seq` or `rank` is out of range.
        """
        import torch

        from fsdpbench.workloads.inputs import Feed

        return self.microbatches(Feed(batch, seed, rank, torch.device(device), data, world_size), seq)

    def microbatches(self, feed: Feed, seq: int | None) -> Iterator[Batch]:
        """Yield what `batches` yields; a family defines this, or `batches` itself."""
        raise NotImplementedError(f"{type(self).__name__} defines neither microbatches() nor batches()")

    @abstractmethod
    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        """Return the FLOPs of one forward pass over one microbatch."""

    def flops_per_step(
        self,
        batch: int,
        seq: int | None = None,
        activation_checkpointing: str = "none",
        recomputes_in_full: bool = False,
    ) -> Flops:
        """Return the FLOPs of one forward and backward pass over one microbatch.

        `recomputes_in_full`: checkpoints compute again also what backward does not need, as before torch 2.1.
        """
        checkpointing = ActivationCheckpointing.parse(activation_checkpointing)
        return self.forward_flops(batch, seq).training(checkpointing, recomputes_in_full)

    def units(self, wrap: str) -> int | None:
        """Return the number of blocks (`wrap` is `block`), or of groups of them (`every-K`); None: other."""
        return len(unit_sizes(wrap, self.stacks())) or None

    def stacks(self) -> list[int]:
        """Return the number of blocks in each of the model's lists of blocks."""
        return [len(stack) for stack in self.forward_flops(1, self.resolve_seq(None)).stacks]

    def samples(self, batch: int) -> int:
        """Return the samples of one microbatch."""
        return batch

    @abstractmethod
    def tokens(self, batch: int, seq: int | None = None) -> int | None:
        """Return the tokens of one microbatch; None for models that do not work on tokens."""

    @abstractmethod
    def resolve_seq(self, seq: int | None) -> int | None:
        """Return `seq`, or the default instead of None.

        Raises:
            WorkloadError: it is below 1, or the model has no sequences and it is given.
        """


class TokenWorkload(Workload):
    """A model that works on sequences of tokens."""

    @property
    @abstractmethod
    def default_seq(self) -> int:
        """Return the tokens a sample where the user names no sequence length."""

    def resolve_seq(self, seq: int | None) -> int:
        if seq is None:
            return self.default_seq
        if seq < 1:
            raise WorkloadError(f"seq is {seq}: it must be at least 1")
        return seq

    def tokens(self, batch: int, seq: int | None = None) -> int:
        return batch * self.resolve_seq(seq)


class SampleWorkload(Workload):
    """A model whose input is a sample as a whole, such as an image: it has no sequence length."""

    @property
    def default_seq(self) -> None:
        return None

    def resolve_seq(self, seq: int | None) -> None:
        if seq is not None:
            raise WorkloadError(error_text("base.no_sequences", seq, self.name, ", ".join(self.shape)))

    def tokens(self, batch: int, seq: int | None = None) -> None:
        self.resolve_seq(seq)


class Shaped(Workload, Generic[S]):
    """A workload of one shape, `spec`, and the module that is built of it.

    `shape_type` is the dataclass of the shape. `code` names the Python module with the classes of the model,
    which is imported when one is asked for: `model_class(*arguments, checkpointing)` makes the module, and
    `names_of_blocks` are the classes that are one FSDP unit each.
    """

    shape_type: ClassVar[type]
    code: ClassVar[str]
    model_class: ClassVar[str]
    names_of_blocks: ClassVar[tuple[str, ...]]

    def __init__(self, name: str, spec: S) -> None:
        self.name = name
        self.spec = spec

    @classmethod
    def from_values(cls, name: str, values: Mapping[str, Any]) -> Self:
        """Make a workload of the shape's plain or textual values.

        Raises:
            ShapeError: a field is unknown, missing or impossible.
        """
        return cls(name, make_shape(cls.shape_type, values))

    @property
    def shape(self) -> dict[str, ShapeValue]:
        # Fields are plain values: `asdict` would copy each.
        return {each.name: getattr(self.spec, each.name) for each in fields(self.spec)}  # type: ignore[arg-type]

    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> nn.Module:
        checkpointing = ActivationCheckpointing.parse(activation_checkpointing)
        model_class: type[nn.Module] = getattr(import_module(self.code), self.model_class)
        return model_class(*self.arguments(seq), checkpointing)

    def arguments(self, seq: int | None) -> tuple[object, ...]:
        """Return the arguments of the model's class for `seq` tokens a sample, checkpointing aside."""
        self.resolve_seq(seq)  # any length will do, but not any number
        return (self.spec,)

    @property
    def block_classes(self) -> tuple[type[nn.Module], ...]:
        return tuple(getattr(import_module(self.code), name) for name in self.names_of_blocks)


class LanguageShape(Protocol):
    """The fields that all shapes of decoder-only language models have."""

    @property
    def layers(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def max_seq(self) -> int: ...


L = TypeVar("L", bound=LanguageShape)


class NextTokenWorkload(Shaped[L], TokenWorkload):
    """A decoder-only language model: one stack of blocks predicts each token from the tokens before it."""

    @property
    def is_causal(self) -> bool:
        return True

    @property
    def default_seq(self) -> int:
        return self.spec.max_seq

    @property
    def block_count(self) -> int:
        return self.spec.layers

    @abstractmethod
    def products(self, layer: int) -> list[Product]:
        """Return the linear layers of block `layer` in the order in which they run (without experts)."""

    def product_weights(self, layer: int) -> int:
        """Return the weights of the linear layers of block `layer`."""
        return sum(each.inputs * each.outputs for each in self.products(layer))

    def microbatches(self, feed: Feed, seq: int | None) -> Iterator[Batch]:
        from fsdpbench.workloads.inputs import token_batches

        return token_batches(feed, vocab=self.spec.vocab, seq=self.resolve_seq(seq))

    def block_flops(self, layer: int, tokens: int, seq: int) -> BlockFlops:
        """Return the forward FLOPs of block `layer` over `tokens` tokens in sequences of `seq`.

        A token costs 2 for each weight, and 4 x d_model x seq for attention, in full although it is causal
        (Chowdhery et al. 2022, appendix B).
        """
        products = tuple(2 * tokens * each.inputs * each.outputs for each in self.products(layer))
        return BlockFlops(products, attention=4 * tokens * self.spec.d_model * seq)

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        seq = self.resolve_seq(seq)
        tokens = batch * seq
        blocks = [self.block_flops(layer, tokens, seq) for layer in range(self.block_count)]
        head = 2 * tokens * self.spec.vocab * self.spec.d_model
        empty = 3 * sum(block.empty for block in blocks)
        return ForwardFlops([blocks], rest=head, empty=empty, head=head)


class ImageShape(Protocol):
    """The fields that all shapes of vision models have: pixels along a side, and classes."""

    @property
    def image(self) -> int: ...
    @property
    def classes(self) -> int: ...


I = TypeVar("I", bound=ImageShape)  # noqa: E741


class VisionWorkload(Shaped[I], SampleWorkload):
    """A model that classifies images."""

    def microbatches(self, feed: Feed, seq: int | None) -> Iterator[Batch]:
        from fsdpbench.workloads.inputs import image_batches

        self.resolve_seq(seq)
        return image_batches(feed, image=self.spec.image, classes=self.spec.classes)
