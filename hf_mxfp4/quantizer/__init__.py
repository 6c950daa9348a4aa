"""All contact with Transformers: the config, the HfQuantizer, the conversions, and the way in. Importing installs it."""

from .config import MXFP4Config
from .hf_quantizer import MXFP4HfQuantizer
from .takeover import disable, enable, install

__all__ = ["MXFP4Config", "MXFP4HfQuantizer", "disable", "enable"]

install()
