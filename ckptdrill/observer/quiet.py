"""Silence the random layers of a launch that exists for that alone: a restore whose first gradient
is compared with another topology's, where dropout would hide whether the two are the same.

`install` puts functions in the place of torch's that make the masks: dropout of every form keeps
all, at the rate of 0; what draws a mask or noise inside a model gets its mean. Elsewhere in the
program, in samplers and augmentation, random numbers stay what they are. Both launches of a pair
are silenced alike, and neither is ever compared with one that is not. What still draws shows in the
generators: the fact of the gradient says so (`drawn`).
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

# Name -> the place of the rate among the arguments.
_DROPOUTS = {
    "dropout": 1,
    "dropout1d": 1,
    "dropout2d": 1,
    "dropout3d": 1,
    "alpha_dropout": 1,
    "feature_alpha_dropout": 1,
}
_OF_TORCH = ("dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


def install(in_a_model: Callable[[], bool]) -> None:
    """Silence what is random in models. `in_a_model` tells whether a trained module is called."""
    functional = torch.nn.functional
    for name, place in _DROPOUTS.items():
        _at_rate_0(functional, name, "p", place)
    for name in _OF_TORCH:
        _at_rate_0(torch, name, "p", 1)
    _at_rate_0(functional, "scaled_dot_product_attention", "dropout_p", 4)
    for kind in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU):
        _without_dropout(kind)
    _means(in_a_model)


def _at_rate_0(holder: Any, name: str, rate: str, place: int) -> None:
    plain = getattr(holder, name, None)
    if plain is None:
        return

    @functools.wraps(plain)
    def silent(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        else:
            kwargs[rate] = 0.0
        return plain(*args, **kwargs)

    setattr(holder, name, silent)


def _without_dropout(kind: Any) -> None:
    """Recurrent layers give their rate to a kernel."""
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rate, self.dropout = self.dropout, 0.0
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.dropout = rate

    kind.forward = forward


def _means(in_a_model: Callable[[], bool]) -> None:
    """Masks and noise that a model draws itself (stochastic depth, say): their mean."""
    bernoulli, bernoulli_ = torch.bernoulli, torch.Tensor.bernoulli_
    randn_like, rand_like = torch.randn_like, torch.rand_like

    def mean_mask(input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch's name
        return input.clone() if in_a_model() else bernoulli(input, *args, **kwargs)

    def mean_mask_(self: Any, p: Any = 0.5, **kwargs: Any) -> Any:
        if not in_a_model():
            return bernoulli_(self, p, **kwargs)
        return self.copy_(p) if isinstance(p, torch.Tensor) else self.fill_(p)

    def no_noise(input: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch's name
        like = torch.zeros_like(input, **kwargs) if in_a_model() else None
        return randn_like(input, **kwargs) if like is None else like

    def half(input: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch's name
        like = torch.full_like(input, 0.5, **kwargs) if in_a_model() else None
        return rand_like(input, **kwargs) if like is None else like

    torch.bernoulli, torch.Tensor.bernoulli_ = mean_mask, mean_mask_  # type: ignore[method-assign]
    torch.randn_like, torch.rand_like = no_noise, half
