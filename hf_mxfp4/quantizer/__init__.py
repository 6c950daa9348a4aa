"""All contact with Transformers: config, HfQuantizer, conversions, and the way in, which importing installs."""

from .config import MXFP4Config
from .hf_quantizer import MXFP4HfQuantizer
from .takeover import disable, enable, install

__all__ = ["MXFP4Config", "MXFP4HfQuantizer", "disable", "enable"]

install()
