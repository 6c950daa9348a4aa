"""All contact with Transformers: config, HfQuantizer, conversions, and the way in, which importing installs."""

from transformers.utils import logging

from .config import MXFP4Config
from .hf_quantizer import MXFP4HfQuantizer
from .late import when_imported
from .streaming import stream_experts
from .takeover import disable, enable, install

__all__ = ["MXFP4Config", "MXFP4HfQuantizer", "disable", "enable", "stream_experts"]

install()


def _adapt() -> None:
    try:
        from . import injection
    except ImportError as error:  # a PEFT too old, or too new, to be known
        logging.get_logger(__name__).warning(f"hf_mxfp4: adapters on packed experts are not supported: {error}")
    else:
        injection.install()


when_imported("peft.tuners.lora.model", _adapt)
