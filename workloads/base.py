"""Interface of all workloads, base classes for kinds of workloads, and FLOPs by block.

FLOPs count only matrix products, convolutions and attention; their backward costs twice their forward.
"""

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

if TYPE_CHECKING:  # importing torch takes most of a second, and commands that only plan do not need it
    import torch
    from torch import nn

    from fsdpbench.workloads.inputs import Batch, Feed

TRAINING_BYTES = 16
"""Bytes per parameter trained in float32 by AdamW: weight, gradient and two moments, four bytes each."""
S = TypeVar("S")


@dataclass(frozen=True)
class Flops:
    """Floating point operations of forward and backward over one rank's microbatch.

    `model` is the count for MFU (forward + 2 x backward, no recomputation), `hardware` the count for HFU
    (`model` plus the recomputation of activation checkpointing).
    """

    model: int
    hardware: int


@dataclass(frozen=True)
class BlockFlops:
    """Forward FLOPs of one block, the unit of activation checkpointing.

    Fields: `products`: FLOPs of each product with weights, in execution order; `attention`: products of
    activations with each other; `ends_needed`: backward needs the output of the last product (a norm or
    dropout follows), so a recomputation must include it; `batched`: products with the weights of several
    experts at the same time, which checkpointing by operator keeps like attention; `empty`: the part of
    `batched` that is computed for empty rows of buffers.
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
        """Return a checkpointed block's recomputed FLOPs; `in_full`: including unnecessary ones."""
        again = sum(
            flops for index, flops in enumerate(self.products) if not checkpointing.keeps_product(index)
        )
        last = len(self.products) - 1
        if not (in_full or self.ends_needed or checkpointing.keeps_product(last)):
            again -= self.products[last]
        return again if checkpointing.by_operator else again + self.attention + self.batched


@dataclass(frozen=True)
class ForwardFlops:
    """Forward FLOPs of a model over one microbatch.

    Fields: `stacks`: the blocks, by the stacks in which checkpointing numbers them; `rest`: FLOPs outside
    blocks; `first`: FLOPs of products whose input needs no gradient; `frozen`: FLOPs of products whose weight
    needs none; `empty`: forward and backward for empty rows of expert buffers, which do not count for the
    model; `head`: the part of `rest` that computes a token model's logits.
    """

    stacks: Sequence[Sequence[BlockFlops]]
    rest: int
    first: int = 0
    frozen: int = 0
    empty: int = 0
    head: int = 0

    def training(self, checkpointing: ActivationCheckpointing, in_full: bool = False) -> Flops:
        """Return the FLOPs of forward and backward. `in_full`: recomputation includes what backward does not
        need, as before torch 2.1 and in formulas for HFU."""
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
    """A model of one family in one shape: builds it, feeds it and counts its FLOPs.

    The module that `build` returns is called as `module(*batch) -> scalar loss`, or as
    `module(*inputs) -> predictions`, without the last tensor of the batch (the targets).

    `seq` is the number of tokens per sample. Models that do not work on sequences have none: their
    `default_seq` is None, and so is every `seq` that they accept.
    """

    name: str
    family: str
    library_config: Mapping[str, Any] | None = None
    """Content of the Hugging Face file that describes the model, if it was kept (`library_model.py`)."""
    is_convolutional: ClassVar[bool] = False
    """Whether its products are convolutions, which torch rounds to TF32 by different rules."""

    @property
    def is_causal(self) -> bool:
        """Return whether each token attends only to itself and earlier tokens."""
        return False

    @property
    @abstractmethod
    def shape(self) -> dict[str, ShapeValue]:
        """Return all fields of the shape as plain values, including defaults."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Return the number of parameters at `default_seq`, tied ones once; computed without building."""

    @property
    def training_state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and AdamW states in float32, without activations."""
        return TRAINING_BYTES * self.parameters

    @property
    @abstractmethod
    def default_seq(self) -> int | None:
        """Return the default number of tokens per sample; None for models without sequences."""

    @property
    @abstractmethod
    def block_classes(self) -> "tuple[type[nn.Module], ...]":
        """Return the module classes that are one FSDP unit each with `wrap=block`."""

    @abstractmethod
    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> "nn.Module":
        """Return the module, built on the current default device (`with torch.device(...)`).

        Every submodule that owns parameters has a `reset_parameters()`, so a module built on `meta` can be
        materialised and initialised later. The caller seeds torch's generator.

        Raises:
            WorkloadError: `activation_checkpointing` or `seq` is invalid.
        """

    def batches(
        self,
        batch: int,
        seq: int | None,
        seed: int,
        rank: int,
        device: "torch.device | str",
        data: Path | None = None,
        *,
        world_size: int | None = None,
    ) -> "Iterator[Batch]":
        """Yield endless microbatches of one rank on `device`; equal arguments give equal batches.

        Without `data` they are synthetic. With `data`, each rank reads its own share, which requires
        `world_size` (optional if rank 0 runs alone).

        Raises:
            DataError: the data is missing, unreadable or too small.
            WorkloadError: `batch`, `seq` or `rank` is out of range.
        """
        import torch

        from fsdpbench.workloads.inputs import Feed

        return self.microbatches(Feed(batch, seed, rank, torch.device(device), data, world_size), seq)

    def microbatches(self, feed: "Feed", seq: int | None) -> "Iterator[Batch]":
        """Yield the batches of `batches`; a family defines this method, or `batches`."""
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

        `recomputes_in_full`: recomputation includes what backward does not need, as before torch 2.1.
        """
        checkpointing = ActivationCheckpointing.parse(activation_checkpointing)
        return self.forward_flops(batch, seq).training(checkpointing, recomputes_in_full)

    def units(self, wrap: str) -> int | None:
        """Return the number of blocks (`wrap` is `block`) or groups of them (`every-K`), otherwise None."""
        return len(unit_sizes(wrap, self.stacks())) or None

    def stacks(self) -> list[int]:
        """Return the number of blocks in each of the model's lists of blocks."""
        return [len(stack) for stack in self.forward_flops(1, self.resolve_seq(None)).stacks]

    def samples(self, batch: int) -> int:
        """Return the number of samples in one microbatch."""
        return batch

    @abstractmethod
    def tokens(self, batch: int, seq: int | None = None) -> int | None:
        """Return the number of tokens in one microbatch; None for models without tokens."""

    @abstractmethod
    def resolve_seq(self, seq: int | None) -> int | None:
        """Return `seq`, or the default if it is None.

        Raises:
            WorkloadError: `seq` is below 1, or it is given and the model has no sequences.
        """


class TokenWorkload(Workload):
    """A model that works on sequences of tokens."""

    @property
    @abstractmethod
    def default_seq(self) -> int:
        """Return the default number of tokens per sample."""

    def resolve_seq(self, seq: int | None) -> int:
        if seq is None:
            return self.default_seq
        if seq < 1:
            raise WorkloadError(f"seq is {seq}: it must be at least 1")
        return seq

    def tokens(self, batch: int, seq: int | None = None) -> int:
        return batch * self.resolve_seq(seq)


class SampleWorkload(Workload):
    """A model whose input is a whole sample, such as an image, without a sequence length."""

    @property
    def default_seq(self) -> None:
        return None

    def resolve_seq(self, seq: int | None) -> None:
        if seq is not None:
            raise WorkloadError(error_text("base.no_sequences", seq, self.name, ", ".join(self.shape)))

    def tokens(self, batch: int, seq: int | None = None) -> None:
        self.resolve_seq(seq)


class Shaped(Workload, Generic[S]):
    """A workload of one shape, `spec`, whose module is built from that shape.

    `shape_type` is the dataclass of the shape. `code` names the Python module with the model's classes, which
    is imported when a class is needed: `model_class(*arguments, checkpointing)` builds the model;
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
        """Make a workload from plain or textual values of the shape.

        Raises:
            ShapeError: a field is unknown, missing or invalid.
        """
        return cls(name, make_shape(cls.shape_type, values))

    @property
    def shape(self) -> dict[str, ShapeValue]:
        # Fields are plain values; `asdict` would copy each of them.
        return {each.name: getattr(self.spec, each.name) for each in fields(self.spec)}  # type: ignore[arg-type]

    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> "nn.Module":
        checkpointing = ActivationCheckpointing.parse(activation_checkpointing)
        model_class: type[nn.Module] = getattr(import_module(self.code), self.model_class)
        return model_class(*self.arguments(seq), checkpointing)

    def arguments(self, seq: int | None) -> tuple[object, ...]:
        """Return the model class's arguments for `seq` tokens per sample, except checkpointing."""
        self.resolve_seq(seq)  # the model accepts any length, but not any number
        return (self.spec,)

    @property
    def block_classes(self) -> "tuple[type[nn.Module], ...]":
        return tuple(getattr(import_module(self.code), name) for name in self.names_of_blocks)


class LanguageShape(Protocol):
    """Fields of the shapes of all decoder-only language models."""

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
    """A decoder-only language model: a stack of blocks predicts each token from earlier tokens."""

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
        """Return the linear layers of block `layer` in execution order, without those of experts."""

    def product_weights(self, layer: int) -> int:
        """Return the number of weights in the linear layers of block `layer`."""
        return sum(each.inputs * each.outputs for each in self.products(layer))

    def microbatches(self, feed: "Feed", seq: int | None) -> "Iterator[Batch]":
        from fsdpbench.workloads.inputs import token_batches

        return token_batches(feed, vocab=self.spec.vocab, seq=self.resolve_seq(seq))

    def block_flops(self, layer: int, tokens: int, seq: int) -> BlockFlops:
        """Return the forward FLOPs of block `layer` over `tokens` tokens in sequences of `seq`.

        Each token costs 2 per weight, plus 4 x d_model x seq for attention, in full although attention is
        causal (Chowdhery et al. 2022, appendix B).
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
    """Fields of the shapes of all vision models: pixels per side, and classes."""

    @property
    def image(self) -> int: ...
    @property
    def classes(self) -> int: ...


I = TypeVar("I", bound=ImageShape)  # noqa: E741


class VisionWorkload(Shaped[I], SampleWorkload):
    """A model that classifies images."""

    def microbatches(self, feed: "Feed", seq: int | None) -> "Iterator[Batch]":
        from fsdpbench.workloads.inputs import image_batches

        self.resolve_seq(seq)
        return image_batches(feed, image=self.spec.image, classes=self.spec.classes)
