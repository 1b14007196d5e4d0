"""Fast decoding of the same models: compiled steps on a CPU (``cpu``), compiled and captured ones
on a GPU (``gpu``).

Begin with ``accelerate``. The readable files of ``model`` do not depend on this folder. What is
passed over for lack of a compiler is logged as a warning, which Python prints on stderr.
"""

import logging
from typing import Any

from torch import nn

from model.decoder import Decoder
from model.errors import InputError
from model.steps import Steps


class PreparedDecoder(Steps):
    """Base of decoders with faster steps than the readable ``model``, whose weights they share.

    A subclass has a ``__call__`` of its own, and those members of ``Steps`` that differ. All other
    members of a ``Decoder``, such as ``prefill``, are those of ``model``. An attribute that is set
    here is not set there.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        # copy asks before there is a model
        return getattr(vars(self).get("model"), name)


def accelerate(model: Decoder) -> Decoder | PreparedDecoder:
    """Return a model of the same weights whose steps are fast on its device.

    Where there are no faster steps, the model itself is returned, unchanged; a line on stderr says
    so where the step cannot be compiled or loaded. Otherwise the model that is passed is rewired
    too:

    - on a CPU its ``attend``, which prompts use;
    - on a CPU that does not multiply bfloat16, the ``forward`` of each of its ``nn.Linear`` layers,
      if it is in bfloat16;
    - on a GPU its ``planned`` blocks.

    A model that is cast, or gets other parameters, is to be accelerated again. Raises ValueError
    for a model that is split over processes.
    """
    if not isinstance(model.embed_tokens, nn.Embedding):
        raise ValueError(
            "a model that is split over processes has no faster steps: call it without accelerate"
        )
    if model.device.type != "cpu":
        from model.fast.gpu import StaticDecoder

        return StaticDecoder(model, model.device.type == "cuda")
    from model.fast.cpu import KINDS, FastDecoder

    if model.dtype not in KINDS:
        return model
    try:
        return FastDecoder(model)
    except InputError as error:
        logging.getLogger(__name__).warning(
            "steps are the readable blocks', several times slower: %s", error
        )
        return model
