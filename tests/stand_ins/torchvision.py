"""In place of torchvision, whose builds for CPU are not everywhere: the names that vLLM's Qwen 3.5 imports.

Put this folder on PYTHONPATH of a run. Engines that run as a language model alone call none of them.
"""

import enum
import importlib.machinery
import sys
import types

__version__ = "0"
__path__: list[str] = []


class InterpolationMode(enum.Enum):
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    LANCZOS = "lanczos"
    BOX = "box"
    HAMMING = "hamming"


class ImageReadMode(enum.Enum):
    RGB = "RGB"


def _missing(*_: object, **__: object) -> None:
    raise NotImplementedError("this is a stand-in for torchvision")


_NAMES = {
    "transforms": {"InterpolationMode": InterpolationMode},
    "transforms.functional": {"pil_to_tensor": _missing},
    "transforms.v2": {},
    "transforms.v2.functional": {"InterpolationMode": InterpolationMode},
    "io": {"ImageReadMode": ImageReadMode, "decode_image": _missing},
}
for _name, _content in _NAMES.items():
    _module = types.ModuleType(f"torchvision.{_name}")
    _module.__dict__.update(_content, __path__=[])
    _module.__spec__ = importlib.machinery.ModuleSpec(_module.__name__, None)
    sys.modules[_module.__name__] = _module
    _parent, _, _last = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
