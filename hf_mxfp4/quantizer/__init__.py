"""All contact with Transformers: config, HfQuantizer, conversions, and the way in, which importing installs."""

from .config import MXFP4Config
from .hf_quantizer import MXFP4HfQuantizer
from .late import when_imported
from .streaming import stream_experts
from .takeover import disable, enable, install

__all__ = ["MXFP4Config", "MXFP4HfQuantizer", "disable", "enable", "stream_experts"]

install()


def _adapt() -> None:
    from . import adapters

    adapters.install()


when_imported("peft.tuners.lora.model", _adapt)
