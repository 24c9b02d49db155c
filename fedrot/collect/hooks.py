"""Forward hooks for all collectors: inputs and outputs of named modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

#: The names under which a decoder gets its inputs.
DECODER_INPUTS = frozenset({"decoder_input_ids", "decoder_inputs_embeds"})


@contextmanager
def watched(
    model: Module,
    names: Iterable[str],
    seen: Callable[[str, Tensor, Tensor], Tensor | None],
) -> Iterator[None]:
    """Call ``seen(name, input, output)`` whenever a named module runs.

    If ``seen`` returns a tensor, this tensor replaces the module's output. Inside the
    context the model is in evaluation mode and no gradients are recorded.
    """
    with ExitStack() as stack, torch.no_grad(), evaluating(model):
        for name in names:

            def hook(
                module: Module,
                args: Any,
                kwargs: Any,
                output: Tensor,
                name: str = name,
            ) -> Tensor | None:
                return seen(name, (*args, *kwargs.values())[0], output)

            handle = model.get_submodule(name).register_forward_hook(
                hook, with_kwargs=True
            )
            stack.callback(handle.remove)
        yield


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Put a model into evaluation mode; restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def without_padding(
    units: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Return ``[..., units]`` as rows ``[tokens, units]``, without padding.

    Tokens that the mask excludes are padding. A mask is one of the units' ``[rows,
    tokens]``, or of choices, ``[rows, choices, tokens]``, which the model reads as
    rows.
    """
    if mask is not None and units.ndim == 3:
        mask = mask.flatten(0, -2)
        if mask.shape == units.shape[:2]:
            return units[mask.bool()]
    return units.flatten(0, -2)


@contextmanager
def masks_of(
    model: Module,
    inputs: Mapping[str, Any],
) -> Iterator[Callable[[str, Tensor], Tensor | None]]:
    """Yield a function that returns the mask of the tokens that a named module reads.

    Modules of an encoder, and those of a decoder that read the encoder's output, read
    the tokens of ``attention_mask``. Other modules of an encoder-decoder read those of
    ``decoder_attention_mask``, or of ``attention_mask`` if the decoder reads the same
    tokens. Modules that read images beside texts have no mask.

    Args:
        inputs: keyword arguments of forward, which runs inside of the context.
    """
    mask = inputs.get("attention_mask")
    encoder = _encoder(model)
    if encoder is None:
        images = _of_images(model) if "pixel_values" in inputs else set()
        yield lambda name, _: None if model.get_submodule(name) in images else mask
        return
    same = DECODER_INPUTS.isdisjoint(inputs)
    of_decoder = inputs.get("decoder_attention_mask", mask if same else None)
    inside = set(encoder.modules())
    encoded: list[Tensor] = []
    if "encoder_outputs" in inputs:
        encoded.append(inputs["encoder_outputs"][0])

    def mask_of(
        name: str,
        tensor: Tensor,
    ) -> Tensor | None:
        if model.get_submodule(name) in inside:
            return mask
        if any(tensor is output for output in encoded):
            return mask
        return of_decoder

    def hook(
        module: Module,
        args: Any,
        output: Any,
    ) -> None:
        encoded.append(output if isinstance(output, Tensor) else output[0])

    with ExitStack() as stack:
        # EncoderDecoderModel projects the output of an encoder of another width.
        for source in (encoder, getattr(model, "enc_to_dec_proj", None)):
            if source is not None:
                stack.callback(source.register_forward_hook(hook).remove)
        yield mask_of


def _of_images(model: Module) -> set[Module]:
    """Return all modules inside of the part of a model that reads images."""
    images: set[Module] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if module is not model and hasattr(config, "image_size"):
            images.update(module.modules())
    return images


def _encoder(model: Module) -> Module | None:
    """Return the encoder of an encoder-decoder of transformers, or None."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    for owner in (model, getattr(model, "base_model", None)):
        get_encoder: Any = getattr(owner, "get_encoder", None)
        if get_encoder is not None:
            return get_encoder()
    return None


def input_axis(module: Module | None) -> int | None:
    """Return the input axis of a module's weight; None if it is no linear layer."""
    if isinstance(module, nn.Linear):
        return 1
    # Conv1D of transformers, recognised by name: this package does not import
    # transformers.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return 0
    return None
